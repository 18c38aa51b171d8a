"""Rounding, products and memory layout shared by all kernels."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspan.ops.device import power_of_2

INTERFACE = 3  # changes with the arguments of the ops; exported models compare it


@triton.jit
def _nearest_bfloat16(x):
    """Round float32 to 8 bits of significand, ties to even, as the hardware does."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


# Triton's interpreter truncates bfloat16 instead of rounding, and multiplies it as if its bits were integers.
INTERPRETED = tl.constexpr(not isinstance(_nearest_bfloat16, triton.JITFunction))


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Convert float32 to a dtype, rounding to nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        x = _nearest_bfloat16(x)
    return x.to(dtype)


@triton.jit
def load_tile(x, where, column, live, WIDTH: tl.constexpr):
    """Load rows of x that start at `where`; zeros where not live, whatever memory holds there."""
    return tl.load(x + where[:, None] + column[None, :], mask=live[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def product(x, y, add):
    """Compute add + x·y on tensor cores with float32 sums; float32 operands keep all their bits."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, add, input_precision="ieee")


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; 1 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded(width: int) -> int:
    """Return the tile width for `width` numbers: a power of two, at least 16 as `tl.dot` requires.

    >>> padded(3), padded(48)
    (16, 64)
    """
    return max(16, power_of_2(width))


def row_major(x: Tensor) -> Tensor:
    """Return x with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_stride(x: Tensor | None) -> int:
    """Return the stride of the batch axis; 0 where all rows share one."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


class Buffer(NamedTuple):
    """Contiguous memory for a result, and whether it is laid out (b, n, h, d) instead of (b, h, n, d)."""

    memory: Tensor
    heads_inside: bool

    @classmethod
    def like(cls, x: Tensor, shape: Sequence[int]) -> "Buffer":
        """Allocate (b, h, n, d) in the layout of x; the transposed output of a projection has its heads inside."""
        b, h, n, d = shape
        heads_inside = x.stride(1) < x.stride(2)
        return cls(x.new_empty((b, n, h, d) if heads_inside else (b, h, n, d)), heads_inside)

    @property
    def view(self) -> Tensor:
        """(b, h, n, d)"""
        return self.memory.transpose(1, 2) if self.heads_inside else self.memory
