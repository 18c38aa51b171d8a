"""Toys are faster on one thread, most of all where other tests run."""

from tests.finetune.conftest import _one_thread  # noqa: F401
