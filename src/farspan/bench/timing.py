"""Time and memory of calls: caches cold, candidates in random order, ratios of neighbours in time.

`triton.testing.do_bench` times one call after another and empties the cache by writing to it. Dirty lines must leave
the cache during the timed call, which costs it 7 µs; and a machine that slows down in between would change a ratio.
"""

import ctypes
import math
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.bench.checks import reason

Calls = Mapping[str, Callable[[], Any]]
FLUSH = 2**28
"""Bytes read between two timings: five times the L2 cache of an H200."""
HEAD_START = 2**24
"""Cycles that a GPU idles before a call with `ahead`, about 8 ms: by then all of its kernels are launched."""
WITH_LAUNCHES = "no CUDA graph could capture it: timed with its launches, so left out of speedups"


class Times(NamedTuple):
    """Seconds, or ratios of seconds: the median and the quantiles that hold three fifths."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> dict[str, float]:
        return self._asdict()

    @property
    def milliseconds(self) -> dict[str, float]:
        return {name: 1e3 * value for name, value in self._asdict().items()}


def quantiles(values: Sequence[float]) -> Times:
    """Return the median and the quantiles that hold three fifths.

    >>> quantiles([5.0, 1.0, 2.0, 3.0, 4.0])
    Times(median=3.0, low=2.0, high=4.0)
    """
    ordered = sorted(values)
    fifth = len(ordered) // 5
    return Times(statistics.median(ordered), ordered[fifth], ordered[-1 - fifth])


def ratio(seconds: Sequence[float], peer: Sequence[float]) -> Times:
    """Return the ratios of times of the same round, which are free of drift.

    >>> ratio([1.0, 10.0], [2.0, 20.0]).median
    0.5
    """
    return quantiles([ours / theirs for ours, theirs in zip(seconds, peer, strict=True)])


def in_turn(
    calls: Calls, *, repeats: int, device: str, warm_up: int = 1, ahead: bool = False
) -> dict[str, list[float]]:
    """Time each call once in every round, in a new random order. On a GPU use events, and flush the L2 cache before.

    Args:
        ahead: give the processor a head start, so that a GPU's work is timed and no wait for launches. Otherwise the
            GPU is idle when a call begins.

    >>> found = in_turn({"one": lambda: sum(range(10)), "other": lambda: None}, repeats=3, device="cpu")
    >>> {name: len(seconds) for name, seconds in found.items()}
    {'one': 3, 'other': 3}
    """
    for _ in range(warm_up):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    if not device.startswith("cuda"):
        for order in drawn_orders(calls, repeats):
            for name in order:
                seconds[name].append(measure_once(calls[name], device))
        return seconds
    flush: Callable[[], Tensor] = torch.zeros(FLUSH // 4, dtype=torch.float32, device=device).sum
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for order in drawn_orders(calls, repeats):
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if ahead:
                torch.cuda._sleep(HEAD_START)
            else:
                torch.cuda.synchronize(device)
            flush()
            begin.record()
            calls[name]()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize(device)
    return {name: [begin.elapsed_time(end) / 1e3 for begin, end in found] for name, found in events.items()}


def drawn_orders(names: Iterable[str], rounds: int) -> list[list[str]]:
    """Draw an order for each round, from the same seed each time.

    A GPU at its limit of power is slower after a call that asked much of it. A fixed order has cost up to 5%.
    """
    drawn, each = random.Random(0), list(names)
    return [drawn.sample(each, len(each)) for _ in range(rounds)]


class Timed(NamedTuple):
    """Candidates that ran, and why others did not."""

    seconds: dict[str, list[float]]
    peaks: dict[str, int]
    """Bytes that a call needs beyond what was held before."""
    missing: dict[str, str]
    graphs: set[str]
    """Those replayed from a CUDA graph."""

    def fair(self, name: str) -> set[str]:
        """Return whom to compare with a candidate: those timed as it was. The others go to `missing`."""
        same = {other for other in self.seconds if (other in self.graphs) == (name in self.graphs)}
        self.missing.update(dict.fromkeys(self.seconds.keys() - same, WITH_LAUNCHES))
        return same


def time_candidates(
    calls: Calls, *, repeats: int, device: str, required: Collection[str] = (), graph: bool = False, ahead: bool = False
) -> Timed:
    """Time candidates in turn. One that fails is missing, with its reason, unless it is `required`.

    With `graph` a GPU replays a CUDA graph of each call that can be captured. All graphs hold their memory at once, so
    every call is tried again when all of them exist.
    """
    ready: dict[str, Callable[[], Any]] = {}
    found = Timed({}, {}, {}, set())
    for name, call in calls.items():
        try:
            found.peaks[name] = peak_bytes(call, device)
        except RuntimeError as error:
            if name in required:
                raise
            found.missing[name] = reason(error)
            continue
        ready[name] = call
        if graph and device.startswith("cuda"):
            with suppress(RuntimeError):
                ready[name] = captured(call)
                found.graphs.add(name)
    for name in list(ready) if found.graphs else []:
        try:
            ready[name]()
        except RuntimeError as error:
            if name in required:
                raise
            found.missing[name] = reason(error)
            del ready[name]
    found.seconds.update(in_turn(ready, repeats=repeats, device=device, warm_up=0, ahead=ahead))
    return found


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """Capture a call in a CUDA graph, to be replayed; the call runs once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_speed(device: str, size: int) -> float:
    """Return the terabytes per second, read and written, of a copy of `size` bytes: what moves memory has no more.

    The faster of a kernel that multiplies by one, and the driver's copy.
    """
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copies = {"mul": lambda: torch.mul(source, 1.0, out=target), "copy": lambda: target.copy_(source)}
    found = in_turn(copies, repeats=20, device=device, ahead=True)
    return 2 * size / min(statistics.median(seconds) for seconds in found.values()) / 1e12


def measure_once(call: Callable[[], Any], device: str) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """Run a call, and return the most memory that it took beyond what was held before."""
    before = _reset_peak(device)
    call()
    _wait(device)
    return max(0, _peak(device) - before)  # the kernel counts pages lazily, and may see fewer than a moment ago


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _reset_peak(device: str) -> int:
    if device.startswith("cuda"):
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if platform.system() == "Linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # freed memory that is kept for later would hide a peak
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        return _status("VmRSS")
    return _peak(device)


def _peak(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if platform.system() == "Linux":
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def best(seconds: Mapping[str, Sequence[float]], names: Iterable[str]) -> str | None:
    """Return the candidate with the least median among those that ran.

    >>> best({"a": [2.0], "b": [1.0], "c": [0.5]}, ["a", "b", "gone"])
    'b'
    """
    medians = {name: statistics.median(seconds[name]) for name in names if name in seconds}
    return min(medians, key=lambda name: medians[name], default=None)


def memory_ratio(theirs: int, ours: int) -> float:
    """Return theirs / ours; infinite if ours was too small to see in memory that was free already."""
    return theirs / ours if ours else math.inf
