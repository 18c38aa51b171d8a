"""Time and memory of calls: caches cold, candidates in random order, ratios of the same round.

Not `triton.testing.do_bench`: it times one call after another and empties the cache by writing to it. Dirty lines must
leave the cache during the timed call, which costs it 7 µs. A machine that slows down in between would change a ratio.
"""

import os
import random
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

Calls = Mapping[str, Callable[[], Any]]
FLUSH = 2**28
"""Bytes read between two timings: five times the L2 cache of an H200."""
HEAD_START = 2**24
"""Cycles that a GPU idles before a call with `ahead`, about 8 ms: by then all of its kernels are launched."""


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return the median and the quantiles that hold three fifths, times `scale`.

    >>> spread([5.0, 1.0, 2.0, 3.0, 4.0])
    {'median': 3.0, 'low': 2.0, 'high': 4.0}
    """
    ordered = sorted(values)
    fifth = len(ordered) // 5
    found = {"median": statistics.median(ordered), "low": ordered[fifth], "high": ordered[-1 - fifth]}
    return {name: scale * value for name, value in found.items()}


def ratio(seconds: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Return the spread of ratios of times of the same round, which are free of drift.

    >>> ratio([1.0, 10.0], [2.0, 20.0])["median"]
    0.5
    """
    return spread([ours / theirs for ours, theirs in zip(seconds, peer, strict=True)])


def best(seconds: Mapping[str, Sequence[float]], names: Iterable[str]) -> str | None:
    """Return the candidate with the least median among those that ran.

    >>> best({"a": [2.0], "b": [1.0], "c": [0.5]}, ["a", "b", "gone"])
    'b'
    """
    return min((name for name in names if name in seconds), key=lambda x: statistics.median(seconds[x]), default=None)


def in_turn(calls: Calls, *, repeats: int, device: str, ahead: bool = False) -> dict[str, list[float]]:
    """Time each call once in every round, in a new random order. On a GPU use events, and flush the L2 cache before.

    A GPU at its limit of power is slower after a call that asked much of it: a fixed order has cost up to 5%.

    Args:
        ahead: give the processor a head start, so that a GPU's work is timed and no wait for launches. Otherwise the
            GPU is idle when a call begins.

    >>> found = in_turn({"one": lambda: sum(range(10)), "other": lambda: None}, repeats=3, device="cpu")
    >>> {name: len(seconds) for name, seconds in found.items()}
    {'one': 3, 'other': 3}
    """
    drawn = random.Random(0)
    order = [name for _ in range(repeats) for name in drawn.sample(list(calls), len(calls))]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    if not device.startswith("cuda"):
        for name in order:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
        return seconds
    flush: Callable[[], Tensor] = torch.zeros(FLUSH // 4, dtype=torch.float32, device=device).sum
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
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


def time_candidates(
    calls: Calls,
    missing: dict[str, str],
    *,
    repeats: int,
    device: str,
    required: Collection[str] = (),
    graph: bool = False,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Time candidates in turn; return seconds, and the bytes that a call needs beyond what was held before.

    One that fails is noted in `missing`, unless it is `required`. With `graph` a GPU replays a CUDA graph of each call;
    one that cannot be captured is missing. All graphs hold their memory at once, so every call is tried again when all
    of them exist. Without `graph` the processor has a head start.
    """
    ready: dict[str, Callable[[], Any]] = {}
    peaks: dict[str, int] = {}
    replayed = graph and device.startswith("cuda")
    for name, call in calls.items():
        with optional(name, missing, required):
            peaks[name] = peak_bytes(call, device)
            ready[name] = captured(call) if replayed else call
    for name, call in ready.items() if replayed else ():
        with optional(name, missing, required):
            call()
    ready = {name: call for name, call in ready.items() if name not in missing}
    return in_turn(ready, repeats=repeats, device=device, ahead=not graph), peaks


@contextmanager
def optional(name: str, missing: dict[str, str], required: Collection[str] = ()) -> Iterator[None]:
    """Note in `missing` why a candidate cannot run; raise if it is required."""
    try:
        yield
    except RuntimeError as error:
        if name in required:
            raise
        missing[name] = reason(error)


def reason(error: BaseException) -> str:
    """Return the first line of an error, or the error that torch.compile quotes.

    >>> reason(RuntimeError("out of memory\\nTried to allocate …"))
    'RuntimeError: out of memory'
    >>> reason(RuntimeError("failed\\n  Explanation: Dynamo failed …: got ValueError('no such kernel')"))
    "ValueError('no such kernel')"
    """
    quoted = re.search(r"(?:got|raised exception) (\w+\(['\"].*['\"]\))$", str(error), re.MULTILINE)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return quoted[1] if quoted else f"{type(error).__name__}: {first}"


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


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """Run a call, and return the most memory of tensors that it took beyond what was held before.

    On a CPU what the call frees of that earlier memory is not subtracted.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _silence(), profile(profile_memory=True) as recorded:
        call()
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in changes), initial=0))


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what is written to stderr: the profiler notes there that it starts, stops, and meets older memory."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
