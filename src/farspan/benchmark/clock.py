"""How long a call takes on a device: medians with quantiles, caches cold, launches out of the picture."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.benchmark.measure import drawn_orders, in_turn, measure_once

FLUSH = 2**28
"""Bytes read between two timings, so that no call finds its inputs in the cache: five times an H200's. Written, they
would make each call wait for a cacheful to leave first, as none does in a model, which reads weights in between."""
START = 2**24
"""Cycles that a GPU idles before a call that is not captured, 8 ms or so: by then the processor has launched all of it,
as it runs ahead in a model of many layers."""


class Times(NamedTuple):
    """Seconds: the median and the quantiles that hold three fifths."""

    median: float
    low: float
    high: float
    graph: bool
    """Replayed from a CUDA graph; else a GPU's times include launches."""

    @property
    def spread(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}

    @property
    def milliseconds(self) -> dict[str, Any]:
        return {name: value * 1e3 for name, value in self.spread.items()} | {"graph": self.graph}


def clock(call: Callable[[], Any], *, device: str, repeats: int, graph: bool = True) -> Times:
    """Time a call `repeats` times; on a GPU between events, replayed from a CUDA graph if `graph` (no launch cost).

    >>> 0 < clock(lambda: sum(range(1000)), device="cpu", repeats=3).median < 1
    True
    """
    call()
    if not device.startswith("cuda"):
        return quantiles([measure_once(call, device) for _ in range(repeats)], False)
    torch.cuda.synchronize()
    if graph:
        call = captured(call)
    flush = flusher(device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        flush()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return quantiles([start.elapsed_time(stop) / 1e3 for start, stop in events], graph)


def clock_in_turn(
    calls: dict[str, Callable[[], Any]], *, device: str, repeats: int, start: bool = False
) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` of them, taken in turn after one round that warms up.

    As :func:`in_turn` does, but on a GPU between events, with its caches cold. `start`: the processor gets a head start
    of :data:`START`, so that what is timed is the GPU's work and not a wait for launches.

    >>> found = clock_in_turn({"one": lambda: sum(range(10)), "other": lambda: None}, device="cpu", repeats=3)
    >>> {name: len(seconds) for name, seconds in found.items()}
    {'one': 3, 'other': 3}
    """
    for call in calls.values():
        call()
    if not device.startswith("cuda"):
        return in_turn(calls, repeats=repeats, device=device)
    torch.cuda.synchronize()
    flush = flusher(device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for order in drawn_orders(calls, repeats):
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if start:
                torch.cuda._sleep(START)
            flush()
            begin.record()
            calls[name]()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) / 1e3 for begin, end in found] for name, found in events.items()}


UNFAIR = "cannot be captured in a CUDA graph: timed with its launches, and left out of speedups over ours without"


def comparable(times: dict[str, Times], ours: bool) -> tuple[dict[str, Times], dict[str, str]]:
    """The times taken as ours were (from a graph or not), and why the others cannot be divided by ours.

    >>> comparable({"a": Times(1.0, 1.0, 1.0, True), "b": Times(1.0, 1.0, 1.0, False)}, True)[1].keys()
    dict_keys(['b'])
    """
    same = {name: t for name, t in times.items() if t.graph == ours}
    return same, {name: UNFAIR for name in times if name not in same}


def copy_speed(device: str, size: int) -> float:
    """Terabytes a second, read and written, of copying `size` bytes: the ceiling for whatever only moves memory.

    By a kernel that multiplies by one, or by the driver's copy if that is faster.
    """
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copies = (lambda: torch.mul(source, 1.0, out=target), lambda: target.copy_(source))
    return 2 * size / min(clock(copy, device=device, repeats=20).median for copy in copies) / 1e12


def flusher(device: str) -> Callable[[], Tensor]:
    """What leaves a cache full of numbers that nobody wants, and that are in memory too."""
    return torch.zeros(FLUSH // 4, dtype=torch.float32, device=device).sum


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of the call, to be replayed; runs the call once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def quantiles(seconds: list[float], graph: bool = False) -> Times:
    """Median and the quantiles that hold three fifths.

    >>> quantiles([5.0, 1.0, 2.0, 3.0, 4.0]).low
    2.0
    """
    ordered = sorted(seconds)
    fifth = len(ordered) // 5
    return Times(statistics.median(ordered), ordered[fifth], ordered[-1 - fifth], graph)
