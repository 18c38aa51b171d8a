"""One function over many items in several processes: results in order, whatever the number of processes."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, *, remedy: str
) -> Iterator[Result]:
    """function(item) of each item in their order, from `workers` processes; at most 2 × workers are in memory.

    Args:
        function: travels to each process once; must not hold threads or a GPU, which a fork would lose.
        workers: 1 = this process.
        remedy: what to do when a process ends by itself, for the error that then says so.

    >>> list(in_order(abs, range(-3, 1), 1, remedy="try again"))
    [3, 2, 1, 0]
    """
    if workers == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[Result]] = deque()
    try:
        with _pool(function, workers) as pool:
            for item in items:
                waiting.append(pool.submit(_call, item))
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise OSError(
            f"workers must survive, got one of {workers} that ended by itself, perhaps out of memory; {remedy}"
        ) from error


@contextmanager
def _pool(function: Callable[[Any], Any], workers: int) -> Iterator[ProcessPoolExecutor]:
    # Forked where that is possible: a fresh interpreter would spend seconds on importing torch, and a fork only
    # calls the function. The variable is for the fork's sake: a tokenizer's own threads do not survive it.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    variable = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(variable)
    os.environ[variable] = "false"
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(function,))
    try:
        with _interrupt_later():
            pool.submit(os.getpid).result()  # starts them all
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextmanager
def _interrupt_later() -> Iterator[None]:
    """Hold Ctrl-C back while a pool starts: one that has processes but no manager yet would never end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python raises KeyboardInterrupt in the main thread only
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        signal.raise_signal(signal.SIGINT)


_FUNCTION: Callable[[Any], Any] | None = None
"""Set once in each process of the pool, so that it does not travel with every item."""


def _start(function: Callable[[Any], Any]) -> None:
    global _FUNCTION
    _FUNCTION = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Nobody tells a pool that its parent was killed: without this its processes would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(item: Any) -> Any:
    assert _FUNCTION is not None
    return _FUNCTION(item)
