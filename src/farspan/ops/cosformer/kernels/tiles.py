"""What the kernels of linear attention share: tiles, features, row factors, products.

Every weight is (a_i·t_j)·κ(i-j) with κ = still + wave·cos θ(i-j), and that is a product of row factors:

    κ = still·1  +  wave cos θi · cos θj  +  wave sin θi · sin θj        (a query's times a key's)

Factors multiply rows, and rows can be multiplied after a product as well as before it. So features of width 2d or 3d
exist nowhere: tiles of q and k enter the tensor cores as they are read, and the factors come in float32.
"""

import triton
import triton.language as tl

from farspan.ops.kernels.narrow import INTERPRETED, narrow


@triton.jit
def locate(blocks, heads):
    """Which of `blocks` blocks of which head and row a program does.

    All lie along one axis of the grid: CUDA has room for 65 535 programs on the others, and a batch may be larger.
    """
    program = tl.program_id(0)
    row = program // (blocks * heads)
    head = program // blocks - row * heads
    return program % blocks, head.to(tl.int64), row.to(tl.int64)


@triton.jit
def load_tile(x, where, column, live, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """Rows of x that start at `where`, as DOT; zeros where not live, whatever memory holds there."""
    inside = live[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + where[:, None] + column[None, :], mask=inside, other=0.0).to(DOT)


@triton.jit
def load_features(x, where, column, live, RELU: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """The same after the activation: ReLU, or elu + 1."""
    wide = load_tile(x, where, column, live, WIDTH, tl.float32)
    if RELU:
        wide = tl.where(wide <= 0.0, 0.0, wide)  # unlike a maximum, this keeps a NaN
    else:
        inside = live[:, None] & (column < WIDTH)[None, :]
        wide = tl.where(inside, tl.where(wide > 0.0, wide + 1.0, tl.exp(wide)), 0.0)
    return narrow(wide, DOT)


@triton.jit
def through_activation(gradient, x, where, column, live, RELU: tl.constexpr, WIDTH: tl.constexpr):
    """The gradient of x, given that of its features."""
    wide = load_tile(x, where, column, live, WIDTH, tl.float32)
    if RELU:
        return tl.where(wide > 0.0, gradient, 0.0)
    else:
        return tl.where(wide > 0.0, gradient, gradient * tl.exp(wide))


@triton.jit
def load_angles(angles, angles_b, angles_s, row, index, live, WAVE: tl.constexpr):
    """cos and sin of θ·position. To find them here would be found again in each of the layouts they are used in."""
    cos = index.to(tl.float32)
    sin = cos
    if WAVE:
        cos = tl.load(angles + row * angles_b + index, mask=live, other=0.0)
        sin = tl.load(angles + row * angles_b + angles_s + index, mask=live, other=0.0)
    return cos, sin


@triton.jit
def load_scale(denominators, where, live, epsilon):
    """1 / max(denominator, ε): by it a query's factors are multiplied in the backward pass."""
    return 1.0 / tl.maximum(tl.load(denominators + where, mask=live, other=1.0), epsilon)


@triton.jit
def multiply(x, y, PRECISION: tl.constexpr):
    """x·y on tensor cores; y is rounded to the dtype of x, and the sum is float32."""
    if y.dtype != x.dtype:
        y = narrow(y, x.dtype)
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def weighed(x, weight):
    """weight_i·x_i, in float32."""
    return x.to(tl.float32) * weight[:, None]


@triton.jit
def column_sums(x, weight):
    """Σ_i weight_i·x_i."""
    return tl.sum(weighed(x, weight), axis=0)
