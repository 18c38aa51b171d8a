"""Which tiles are fastest for cosFormer on this device: the source of the table in ops.triton.linear."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from farspan.benchmark.ahead import compile_ahead, refused
from farspan.benchmark.clock import clock
from farspan.benchmark.cosformer_gpu import OURS, PASSES, WIDTHS, Shape, as_call, check, contestants, random_inputs

KERNELS = ("totals_kernel", "prefix_kernel", "pairs_kernel")

Change = tuple[str, Any]
"""A table of ops.triton.linear, and what to try in it."""


def variants(d: int) -> list[Change]:
    """One change at a time, from what the tables hold; four warps have no registers for more than 64 rows."""
    shapes = ((64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8), (128, 128, 8))
    pairs = [(*shape, stages) for shape in shapes for stages in (1, 2, 3) if shape[1] == 64 or stages == 2]
    totals = [
        (rows, columns, warps, stages)
        for rows, columns, warps, stages in product((64, 128), (64, 128), (4, 8), (2, 3))
        if columns <= d and rows * columns <= 2048 * warps
    ]
    tables = {"PAIRS": pairs, "QUERY_PAIRS": pairs, "TOTALS": totals, "SEGMENT": (128, 256, 512, 1024)}
    return [(name, change) for name, changes in tables.items() for change in changes]


def run(
    *, device: str, repeats: int, widths: tuple[int, ...] = WIDTHS, toy: bool = False
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a row for each variant and pass, at 16 384 tokens; raises ResultsDifferError where one is wrong."""
    shapes = [Shape(1, 1, 66, 16)] if toy else [Shape(4, 16, 16_384, d) for d in widths]
    calls = [(shape, ("PAIRS", (64, 64, 4, 2)), device) for shape in shapes]
    if not toy:
        calls, bad = compile_ahead(_try, [(shape, x, device) for shape in shapes for x in variants(shape.d)])
        yield "variants that cannot run", refused(bad)
    for shape, change, _ in calls:
        with _changed(shape.d, change):
            yield f"width {shape.d}, {change}", _measure(shape, change, device, repeats, toy)


def parts(widths: tuple[int, ...] = WIDTHS) -> int:
    """The most steps that :func:`run` yields: a variant that cannot run has none."""
    return 1 + sum(len(variants(d)) for d in widths)


def _try(shape: Shape, change: Change, device: str) -> None:
    with _changed(shape.d, change):
        as_call(contestants(shape.n, device, None)[OURS], random_inputs(shape, device), True)()
        torch.cuda.synchronize()


@contextmanager
def _changed(d: int, change: Change) -> Iterator[None]:
    """The tables, with one change to try."""
    from farspan.ops.triton import linear

    (name, value), size = change, linear.widest(d, d)
    table = getattr(linear, name)
    usual = table[size]
    table[size] = linear.Cut(*value) if isinstance(value, tuple) else value
    try:
        yield
    finally:
        table[size] = usual


def _measure(shape: Shape, change: Change, device: str, repeats: int, toy: bool) -> list[dict[str, Any]]:
    check(shape if toy else Shape(1, 4, 2500, shape.d), device, None)  # more than two of the longest segments
    attend, inputs, rows = contestants(shape.n, device, None)[OURS], random_inputs(shape, device), []
    for passes in PASSES:
        call = as_call(attend, inputs, passes != "forward")
        times = clock(call, device=device, repeats=repeats, graph=False)
        row = {"kind": "tuning", **shape._asdict(), "change": change, "passes": passes}
        rows.append(row | {"milliseconds": times.milliseconds, "kernels": kernel_times(call, device)})
    return rows


def kernel_times(call: Callable[[], Any], device: str, repeats: int = 5) -> list[tuple[str, float]]:
    """Milliseconds of each of our kernels that a call launches, in order; none where no GPU runs them."""
    if not device.startswith("cuda"):
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = sorted((x for x in found.events() if x.name in KERNELS), key=lambda x: x.time_range.start)
    each = len(events) // repeats
    return [
        (events[i].name, statistics.median(x.time_range.elapsed_us() for x in events[i::each]) / 1e3)
        for i in range(each)
    ]
