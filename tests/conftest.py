"""Shared fixtures. Tests need no data and no network; those that need a GPU say so and skip."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # before torch: see Makefile
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
import torch

from tests.processes import start_server

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: kernels are decorated as they are imported


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for new processes: a thread that waits for a core burns another
    if workers > 1:
        start_server()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Toys are faster on one, most of all where other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    if request.path.parent.name in ("ops", "layers", "models"):
        request.getfixturevalue("one_thread")
