"""Tables kept between calls: bounded, in the order of use, safe in threads, graphs, traces and inference mode."""

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from random import Random
from threading import Barrier

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from farspan.ops import Rotary, coca_attention, rope_attention
from farspan.ops.device import TABLES, TableCache
from farspan.ops.masking import make_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fill(tables: TableCache, *sizes: int) -> list[int]:
    """Ask for tables of so many bytes, each under its size, and return the sizes that had to be made."""
    made: list[int] = []
    for size in sizes:

        def make(size: int = size) -> Tensor:
            made.append(size)
            return torch.zeros(size, dtype=torch.uint8)

        assert tables.get(size, make).nbytes == size
    return made


def test_tables_are_made_once_and_bounded_in_bytes() -> None:
    tables = TableCache(limit=100)
    assert fill(tables, 40, 30, 40, 30) == [40, 30]
    assert tables.nbytes == 70
    for size in range(1, 60):
        fill(tables, size)
        assert tables.nbytes <= 100


def test_the_least_recently_used_table_goes_first() -> None:
    tables = TableCache(limit=100)
    fill(tables, 40, 30, 20)
    assert fill(tables, 40, 25) == [25]  # 40 was used again, so 30 had to go
    assert fill(tables, 40, 20, 25) == []
    assert fill(tables, 30) == [30]
    assert fill(tables, 40) == [40]  # it had become the oldest


def test_a_table_larger_than_the_bound_is_kept_alone() -> None:
    """Else each step of decoding would make it again."""
    tables = TableCache(limit=100)
    fill(tables, 40, 30)
    assert fill(tables, 500, 500) == [500]
    assert tables.nbytes == 500
    assert fill(tables, 40) == [40]
    assert tables.nbytes == 40


def test_many_threads_make_each_table_once_and_keep_the_count() -> None:
    tables, made = TableCache(limit=2**20), []
    start = Barrier(8)

    def work(seed: int) -> bool:
        start.wait(timeout=30)
        keys = [Random(seed).randrange(40) for _ in range(200)]
        return all(
            int(tables.get(key, lambda key=key: made.append(key) or torch.full((16,), key))[0]) == key for key in keys
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert len(made) == len(set(made))
    assert tables.nbytes == len(made) * 16 * 8

    small = TableCache(limit=10 * 16 * 8)

    def churn(seed: int) -> None:
        draw = Random(seed)
        for _ in range(300):
            key = draw.randrange(40)
            assert int(small.get(key, lambda key=key: torch.full((16,), key))[0]) == key
            if draw.random() < 0.02:
                small.clear()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(churn, range(8)))
    assert small.nbytes == sum(table.nbytes for table in small._kept.values()) <= small.limit


def test_a_table_made_from_another_does_not_deadlock() -> None:
    tables = TableCache(limit=2**20)
    start = Barrier(2)

    def nested(key: int) -> Tensor:
        start.wait(timeout=30)
        return tables.get(
            ("outer", key), lambda: tables.get(("inner", 1 - key), lambda: torch.ones(4)) + tables.get("x", _two)
        )

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(nested, key) for key in (0, 1)]
        assert all((one.result(timeout=30) == 3).all() for one in running)
    assert tables.nbytes == 5 * 16


def _two() -> Tensor:
    return torch.full((4,), 2.0)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad], ids=str)
def test_tables_of_inference_serve_training_later(context) -> None:
    TABLES.clear()
    q, t, v = torch.randn(1, 2, 9, 8), torch.rand(1, 2, 9, 4), torch.randn(1, 2, 9, 8)
    with context():
        first = coca_attention(q[:, :, -1:], t, v, rotary=Rotary(8))
        rope_attention(q, v, v, rotary=Rotary(8))
    assert TABLES._kept
    assert not any(table.is_inference() or table.requires_grad for table in TABLES._kept.values())
    assert torch.equal(coca_attention(q[:, :, -1:], t, v, rotary=Rotary(8)), first.clone())
    for op, k in ((coca_attention, t), (rope_attention, v)):
        leaf = q.clone().requires_grad_()
        op(leaf, k, v, rotary=Rotary(8)).sum().backward()
        assert leaf.grad is not None


def steps(rotary: Rotary) -> Tensor:
    """Return the steps of a mask of its own, hence from the cache alone."""
    return make_mask(3, 3, 1, torch.device(DEVICE)).angles(rotary).steps


@pytest.mark.parametrize("fake_first", [True, False])
def test_tables_made_under_fake_tensors_are_not_kept(fake_first: bool) -> None:
    """Tracing by fake tensors must neither leave one behind for real calls nor receive a real one."""
    rotary = Rotary(16, base=777.0 + fake_first)  # of its own, so that nothing is kept yet
    for fake in (fake_first, not fake_first):
        with FakeTensorMode() if fake else nullcontext():
            assert isinstance(steps(rotary), FakeTensor) is fake


@contextmanager
def capturing() -> Iterator[None]:
    """Act as if a CUDA graph were captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def test_tables_made_in_a_cuda_graph_are_not_kept() -> None:
    rotary = Rotary(16, base=4711.0)
    with capturing():
        inside, again = steps(rotary), steps(rotary)
    outside = steps(rotary)
    assert len({id(x) for x in (inside, again, outside)}) == 3
    assert (inside - outside).abs().max() <= 2**12  # 2⁻⁵² turns: a GPU's powers are not the CPU's to the last bit


def test_a_cuda_graph_reads_tables_made_before_which_then_stay() -> None:
    """Otherwise it would replay the making of them. A graph does not keep alive what it reads."""
    tables = TableCache(limit=100)
    before = tables.get("before", lambda: torch.zeros(40, dtype=torch.uint8))
    other = weakref.ref(tables.get("other", lambda: torch.zeros(30, dtype=torch.uint8)))
    with capturing():
        assert tables.get("before", lambda: pytest.fail("made again")) is before
    assert tables.nbytes == 30  # what is pinned does not count
    fill(tables, 60, 90)
    assert other() is None  # no graph reads it
    assert tables.get("before", lambda: pytest.fail("made again")) is before
    tables.clear()
    assert tables.get("before", lambda: torch.ones(1)) is not before
