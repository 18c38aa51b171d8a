"""Rounding and products in the tensors' own dtype, also where the interpreter gets bfloat16 wrong."""

import triton
import triton.language as tl


@triton.jit
def _nearest_bfloat16(x):
    """float32 rounded to 8 bits of significand, ties to even, as the hardware rounds."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


INTERPRETED = tl.constexpr(not isinstance(_nearest_bfloat16, triton.JITFunction))
"""Triton's interpreter cuts bfloat16 off instead of rounding, and multiplies it as if its bits were integers."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 → dtype, rounded to nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        x = _nearest_bfloat16(x)
    return x.to(dtype)


@triton.jit
def product(x, y, add):
    """add + x·y on tensor cores, summed in float32; float32 operands are not shortened."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, add, input_precision="ieee")
