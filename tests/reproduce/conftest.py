"""Reproductions without their page, which takes longer than all else at this size."""

from pathlib import Path

import pytest


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how steps are done: drawing the figures takes longer than the steps."""
    monkeypatch.setattr("farspan.report.write_report", lambda folder: Path(folder) / "report" / "index.html")
