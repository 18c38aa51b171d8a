"""Examples as one table of whole numbers a split: written whole, mapped into memory, shuffled without a state."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farspan.data.encoding import end_with_parent, interrupt_later
from farspan.errors import require

DTYPE = np.uint16


def write_table(path: Path, rows: NDArray[Any]) -> None:
    """Save rows (examples, width) of numbers below 65 536, whole or not at all."""
    require(
        rows.ndim == 2 and len(rows) > 0 and rows.min() >= 0 and rows.max() < 2**16,
        f"rows must be a table of numbers in 0 … 65535, got {rows.dtype} of shape {rows.shape}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may make the same table
    with part.open("wb") as file:
        np.save(file, rows.astype(DTYPE))
    os.replace(part, path)


class TableRows:
    """A table's rows in an order shuffled anew in each epoch, as batches for the training loop.

    Row r of step s is number s · batch_size + r of an endless sequence of epochs; the order of epoch e is a function of
    (seed, e). So a resumed run and any number of processes see the same rows.
    """

    def __init__(self, path: Path, batch_size: int, seed: int) -> None:
        self.table = np.load(path, mmap_mode="r")
        self.batch_size, self.seed = batch_size, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """Rows of one process at one step (batch_size / world, width), int64."""
        require(
            self.batch_size % world == 0,
            f"batch_size must be a multiple of the number of processes, got {self.batch_size} for {world}",
        )
        share = self.batch_size // world
        first = step * self.batch_size + rank * share
        picked = [self._place(number) for number in range(first, first + share)]
        return torch.from_numpy(self.table[picked].astype(np.int64))

    def _place(self, number: int) -> int:
        epoch, within = divmod(number, len(self.table))
        if epoch != self._epoch:
            # Raw numbers: what numpy's own shuffle makes of them may change from one release to the next.
            raw = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(len(self.table))
            self._epoch, self._order = epoch, np.argsort(raw, kind="stable")
        return int(self._order[within])


def whole_table(path: Path) -> Tensor:
    """All rows in their order, int64."""
    return torch.from_numpy(np.load(path).astype(np.int64))


def in_parallel(make: Callable[[int], NDArray[Any]], pieces: range) -> Iterator[NDArray[Any]]:
    """make(piece) for each piece in order, in as many processes as there are cores, or pieces."""
    workers = min(os.cpu_count() or 1, len(pieces))
    if workers <= 1:
        yield from map(make, pieces)
        return
    # Forked where that is possible: a fresh interpreter would spend seconds on importing torch.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(make,))
    try:
        with interrupt_later():
            waiting = deque([pool.submit(_make, pieces[0])])
        for piece in pieces[1:]:
            waiting.append(pool.submit(_make, piece))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_FUNCTION: Callable[[int], NDArray[Any]] | None = None
"""Set once in each process of the pool."""


def _start(make: Callable[[int], NDArray[Any]]) -> None:
    global _FUNCTION
    _FUNCTION = make
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=end_with_parent, daemon=True).start()


def _make(piece: int) -> NDArray[Any]:
    assert _FUNCTION is not None
    return _FUNCTION(piece)
