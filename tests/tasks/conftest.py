"""Models this small are fastest on one thread."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test of this folder."""
