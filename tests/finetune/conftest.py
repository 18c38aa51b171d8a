"""Fixtures of the tests of recipes: an original and its copy, made once, and one thread, as toys are faster on it."""

from collections.abc import Iterator

import pytest
import torch

from tests.finetune.folders import Folders, made


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory, _one_thread: None) -> Folders:
    return made(tmp_path_factory.mktemp("made"))
