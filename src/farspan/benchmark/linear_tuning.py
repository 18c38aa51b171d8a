"""Which tiles are fastest for cosFormer on this device: the source of the table in ops.cosformer.kernels.attention."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from farspan.benchmark.ahead import compile_ahead
from farspan.benchmark.clock import clock
from farspan.benchmark.linear import OURS, PASSES, Shape, as_call, check, contestants, random_inputs

BLOCKS, COLUMNS, WARPS, STAGES = (32, 64), (32, 64, 128), (4, 8), (1, 2, 3)
KERNELS = ("totals_kernel", "prefix_kernel", "walk_kernel", "delta_kernel")

Numbers = tuple[int, int, int, int]
"""Those of a Cut, which this module cannot name before triton is there."""


def variants(d: int) -> list[Numbers]:
    """The cuts to try for heads of width d; 128 columns in four warps would leave no registers."""
    every = product(BLOCKS, COLUMNS, WARPS, STAGES)
    return [cut for cut in every if cut[1] <= min(d, 16 * cut[2])]


def run(
    *, device: str, repeats: int, widths: tuple[int, ...] = (64, 128), toy: bool = False
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a row for each cut and pass, at 16 384 tokens; raises ResultsDifferError where a cut is wrong."""
    if not toy:
        prepare(device, widths)
    for d in (16,) if toy else widths:
        shape = Shape(1, 1, 66, d) if toy else Shape(4, 16, 16_384, d)
        for cut in [(64, 64, 4, 2)] if toy else variants(d):
            yield f"width {d}, cut {cut}", _measure(shape, cut, device, repeats, toy)


def prepare(device: str, widths: tuple[int, ...] = (64, 128)) -> int:
    """Compile all variants."""
    return compile_ahead(_try, [(Shape(4, 16, 16_384, d), cut, device) for d in widths for cut in variants(d)])


def _try(shape: Shape, cut: Numbers, device: str) -> None:
    with _cut(shape.d, cut):
        as_call(contestants(shape.n, device, None)[OURS], random_inputs(shape, device), True)()


@contextmanager
def _cut(d: int, numbers: Numbers) -> Iterator[None]:
    """The table, with one cut in it to try."""
    from farspan.ops.cosformer.kernels.attention import CUTS, Cut

    size = 64 if d <= 64 else 128
    usual = CUTS[size]
    CUTS[size] = Cut(*numbers)
    try:
        yield
    finally:
        CUTS[size] = usual


def _measure(shape: Shape, cut: Numbers, device: str, repeats: int, toy: bool) -> list[dict[str, Any]]:
    from triton.runtime.errors import OutOfResources

    rows = []
    try:
        with _cut(shape.d, cut):
            check(Shape(1, 1, 66, shape.d) if toy else Shape(1, 4, 1000, shape.d), device, None)
            attend, inputs = contestants(shape.n, device, None)[OURS], random_inputs(shape, device)
            for passes in PASSES:
                call = as_call(attend, inputs, passes != "forward")
                times = clock(call, device=device, repeats=repeats, graph=False)
                row = {"kind": "tuning", **shape._asdict(), "cut": cut, "passes": passes}
                rows.append(row | {"milliseconds": times.milliseconds, "kernels": kernel_times(call, device)})
    except OutOfResources:  # more shared memory or registers than a processor has
        return []
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
