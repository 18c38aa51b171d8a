"""Fixtures of the data tests: small sources, and what preparing them in one go gives."""

from pathlib import Path

import pytest

from farspan.data import prepare
from tests.data.corpora import SMALL, TEXTS, jsonl


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "single.txt").write_text("a single document")
    return [
        str(jsonl(folder / "a.jsonl", TEXTS[:200])),
        str(folder / "single.txt"),
        str(jsonl(folder / "b.jsonl", TEXTS[200:])),
    ]


@pytest.fixture(scope="module")
def expected(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(sources, out, **SMALL)
    return out
