"""Time and peak memory of one function, each in a fresh process so that no earlier allocation hides a peak."""

import math
import multiprocessing
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Measurement:
    """Seconds of each repetition, and the largest memory beyond what was held before."""

    seconds: list[float]
    peak_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else math.nan


def measure(call: Callable[[], Any], *, repeats: int, device: str) -> Measurement:
    """Run `call` once to warm up and find the peak, then `repeats` times (perhaps none) for the clock."""
    before = _reset_peak(device)
    call()
    _wait(device)
    peak = max(0, _peak(device) - before)  # the kernel counts pages lazily, and may see fewer than a moment ago
    return Measurement([measure_once(call, device) for _ in range(repeats)], peak)


def in_turn(calls: Mapping[str, Callable[[], Any]], *, repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn: what the machine does meanwhile meets all alike.

    The i-th figures of two calls come from one round, so that the ratios of pairs are free of drift.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for order in drawn_orders(calls, repeats):
        for name in order:
            seconds[name].append(measure_once(calls[name], device))
    return seconds


def drawn_orders(names: Iterable[str], rounds: int) -> list[list[str]]:
    """An order of its own for each round, drawn from the same seed each time.

    A GPU at its limit of power is slower right after a call that asked much of it, and no call should always have the
    same one before it: a fixed order has cost up to 5%.

    >>> all(sorted(order) == ["a", "b", "c"] for order in drawn_orders(["a", "b", "c"], 4))
    True
    """
    drawn, each = random.Random(0), list(names)
    return [drawn.sample(each, len(each)) for _ in range(rounds)]


def measure_once(call: Callable[[], Any], device: str) -> float:
    """The seconds of one call."""
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module-level function in a new process; errors come back as they were raised.

    A process that is killed, as for taking too much memory, is an error too; whoever stops waiting for one ends it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()  # the process has its own: when that is gone, there will be no answer
    try:
        done, answer = receiver.recv()
    except EOFError:
        raise ChildProcessError(
            f"the process of {function.__name__}{arguments} died, perhaps for want of memory; try shorter lengths"
        ) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if not done:
        raise answer
    return answer


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:
        sender.send((False, error))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _reset_peak(device: str) -> int:
    if device.startswith("cuda"):
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if platform.system() == "Linux":
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
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")
