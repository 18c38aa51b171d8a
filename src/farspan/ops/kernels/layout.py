"""How tensors lie in memory, and what a launch makes of it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.ops.launch import power_of_2


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded(width: int) -> int:
    """The width of a tile that holds `width` numbers: a power of two, as Triton wants, and enough for its products.

    >>> padded(3), padded(48)
    (16, 64)
    """
    return max(16, power_of_2(width))


def row_major(x: Tensor) -> Tensor:
    """x, with the numbers along its last axis side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_stride(x: Tensor | None) -> int:
    """The stride from one row of the batch to the next; none where all rows share one."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


class Room(NamedTuple):
    """Where a result goes: memory of its own, and whether the heads lie inside the positions there."""

    memory: Tensor
    folded: bool

    @classmethod
    def like(cls, x: Tensor, shape: Sequence[int]) -> "Room":
        """Room for (b, h, n, d), laid out as x is: the output of a projection, transposed, is folded."""
        b, h, n, d = shape
        folded = x.stride(1) < x.stride(2)
        return cls(x.new_empty((b, n, h, d) if folded else (b, h, n, d)), folded)

    @property
    def view(self) -> Tensor:
        """(b, h, n, d)"""
        return self.memory.transpose(1, 2) if self.folded else self.memory
