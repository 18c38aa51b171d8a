"""Examples as one table of whole numbers a split: written whole, mapped into memory, shuffled without a state."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
