"""Fixtures of the tests of recipes: an original and its copy, made once a file."""

from pathlib import Path

import pytest

from tests.finetune.folders import made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    return made(tmp_path_factory.mktemp("made"))
