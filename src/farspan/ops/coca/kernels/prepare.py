"""(q, t) → (q̃, k̃) in one pass, forward and backward: squares and angles in float32, no table of angles in memory."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspan.ops.coca.kernels.angles import cos_sin, places
from farspan.ops.coca.kernels.attention import padded, row_major
from farspan.ops.coca.kernels.narrow import narrow
from farspan.ops.launch import cdiv

HEADS = 4
"""Heads that share the angles of one program."""
TILE = 2048
"""Pairs of one head that a program holds at a time."""


@triton.jit
def _tile(
    block, count, step, positions, step_b, positions_b, row, first, factor,
    HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Indices, mask and factor·(cos, sin) of one block of positions."""
    index = block * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK_D)
    inside = (index < count)[:, None] & (pair < HALF)[None, :]
    turn = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
    at = places(positions, positions_b, row, index, index < count, first)
    cos, sin = cos_sin(at[:, None] * turn[None, :])
    return index.to(tl.int64)[:, None], pair[None, :], inside, cos * factor, sin * factor


@triton.jit
def prepare_kernel(
    q, t, q_out, k_out, q_gradient, k_gradient, step, query_positions, key_positions,
    factor, h, g, n, m, query_first, key_first, q_programs, q_blocks, k_blocks,
    q_b, q_h, q_n, t_b, t_g, t_m, q_out_b, q_out_h, q_out_n, k_out_b, k_out_g, k_out_m,
    q_gradient_b, q_gradient_h, q_gradient_n, k_gradient_b, k_gradient_g, k_gradient_m,
    step_b, query_positions_b, key_positions_b,
    EXACT: tl.constexpr, BACKWARD: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a block of positions of a few heads of q, or of t. Backward, the gradients of q̃ and k̃ come in and
    those of q and t go out, by `q_out` and `k_out`."""
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if program < q_programs:
        index, pair, inside, cos, sin = _tile(
            program % q_blocks, n, step, query_positions, step_b, query_positions_b, row, query_first, factor,
            HALF, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        start = (program // q_blocks) * HEADS
        for head in range(start, tl.minimum(start + HEADS, h)):
            which = tl.zeros([1, 1], tl.int64) + head  # offsets may pass 2³¹
            at = row * q_b + which * q_h + index * q_n + pair
            a = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(q + at + HALF, mask=inside, other=0.0).to(tl.float32)
            if BACKWARD:
                of = row * q_gradient_b + which * q_gradient_h + index * q_gradient_n + pair
                up = tl.load(q_gradient + of, mask=inside, other=0.0).to(tl.float32)
                down = tl.load(q_gradient + of + HALF, mask=inside, other=0.0).to(tl.float32)
                x, y = _query_gradient(a, b, up, down, cos, sin, EXACT)
            else:
                x, y = _query(a, b, cos, sin, EXACT)
            to = q_out + row * q_out_b + which * q_out_h + index * q_out_n + pair
            tl.store(to, narrow(x, q_out.dtype.element_ty), mask=inside)
            tl.store(to + HALF, narrow(y, q_out.dtype.element_ty), mask=inside)
    else:
        program -= q_programs
        index, pair, inside, cos, sin = _tile(
            program % k_blocks, m, step, key_positions, step_b, key_positions_b, row, key_first, factor,
            HALF, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        left = cos
        right = sin
        if not EXACT:
            left = cos - sin
            right = cos + sin
        start = (program // k_blocks) * HEADS
        for head in range(start, tl.minimum(start + HEADS, g)):
            which = tl.zeros([1, 1], tl.int64) + head
            to = k_out + row * k_out_b + which * k_out_g + index * k_out_m + pair
            if BACKWARD:
                of = row * k_gradient_b + which * k_gradient_g + index * k_gradient_m + pair
                up = tl.load(k_gradient + of, mask=inside, other=0.0).to(tl.float32)
                down = tl.load(k_gradient + of + HALF, mask=inside, other=0.0).to(tl.float32)
                tl.store(to, narrow(up * left + down * right, k_out.dtype.element_ty), mask=inside)
            else:
                at = row * t_b + which * t_g + index * t_m + pair
                size = tl.load(t + at, mask=inside, other=0.0).to(tl.float32)
                tl.store(to, narrow(size * left, k_out.dtype.element_ty), mask=inside)
                tl.store(to + HALF, narrow(size * right, k_out.dtype.element_ty), mask=inside)


@triton.jit
def _query(a, b, cos, sin, EXACT: tl.constexpr):
    """q̃ of the pair (a, b): ‖q_j‖²·(cos, sin) or q∘f(q, m)."""
    if EXACT:
        size = a * a + b * b
        x = size * cos
        y = size * sin
    else:
        x = a * (a * cos - b * sin)
        y = b * (a * sin + b * cos)
    return x, y


@triton.jit
def _query_gradient(a, b, up, down, cos, sin, EXACT: tl.constexpr):
    """The gradient of (a, b), given that of their q̃."""
    if EXACT:
        size = 2.0 * (up * cos + down * sin)
        x = a * size
        y = b * size
    else:
        x = up * (2.0 * a * cos - b * sin) + down * b * sin
        y = down * (2.0 * b * cos + a * sin) - up * a * sin
    return x, y


@torch.library.custom_op("farspan::coca_prepare", mutates_args=())
def prepare_op(
    q: Tensor,
    t: Tensor,
    step: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_first: int,
    key_first: int,
    form: str,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """q (b, h, n, d), t (b, g, m, d/2) → q̃ (b, h, n, d), k̃ (b, g, m, d), those of :func:`farspan.ops.coca_features`.

    Query i stands at query_first + i, or where query_positions (b|1, n) says; keys likewise.
    """
    (b, h, n, d), (g, m) = q.shape, t.shape[1:3]
    q_, k_ = _like(q, (b, h, n, d)), _like(t, (b, g, m, d))
    _launch(q, t, q_, k_, None, None, step, query_positions, key_positions, query_first, key_first, form, factor)
    return q_, k_


@torch.library.custom_op("farspan::coca_prepare_backward", mutates_args=())
def prepare_backward_op(
    q: Tensor,
    q_gradient: Tensor,
    k_gradient: Tensor,
    step: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_first: int,
    key_first: int,
    form: str,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of q and t, given those of q̃ and k̃."""
    b, g, m, d = k_gradient.shape
    dq, dt = _like(q, q.shape), _like(k_gradient, (b, g, m, d // 2))
    places = (query_positions, key_positions, query_first, key_first)
    _launch(q, None, dq, dt, q_gradient, k_gradient, step, *places, form, factor)
    return dq, dt


def _launch(
    q: Tensor,
    t: Tensor | None,
    q_out: Tensor,
    k_out: Tensor,
    q_gradient: Tensor | None,
    k_gradient: Tensor | None,
    step: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_first: int,
    key_first: int,
    form: str,
    factor: float,
) -> None:
    (b, h, n, d), (g, m) = q.shape, k_out.shape[1:3]
    q, t, q_gradient, k_gradient = (  # type: ignore[assignment]
        x if x is None else row_major(x) for x in (q, t, q_gradient, k_gradient)
    )
    query_positions, key_positions = (x if x is None else row_major(x) for x in (query_positions, key_positions))
    width = padded(d // 2)
    block = max(1, TILE // width)
    q_blocks, k_blocks = cdiv(n, block), cdiv(m, block)
    q_programs, k_programs = q_blocks * cdiv(h, HEADS), k_blocks * cdiv(g, HEADS)
    strides = [s for x in (q, t, q_out, k_out, q_gradient, k_gradient) for s in _strides(x)]
    rows = [0 if x is None or x.shape[0] == 1 else x.stride(0) for x in (step, query_positions, key_positions)]
    with torch.cuda.device_of(q):
        prepare_kernel[(q_programs + k_programs, b)](
            q, t, q_out, k_out, q_gradient, k_gradient, step, query_positions, key_positions,
            factor, h, g, n, m, query_first, key_first, q_programs, q_blocks, k_blocks, *strides, *rows,
            EXACT=form == "exact", BACKWARD=q_gradient is not None, HALF=d // 2, HEADS=HEADS,
            BLOCK_N=block, BLOCK_D=width, num_warps=4,
        )  # fmt: skip


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _like(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Empty, of the given shape; heads inside positions where x has them so (a projection's output, transposed)."""
    b, h, n, d = shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((b, n, h, d)).transpose(1, 2)
    return x.new_empty((b, h, n, d))


@prepare_op.register_fake
def _(q: Tensor, t: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _like(q, q.shape), _like(t, (*t.shape[:3], q.shape[-1]))


@prepare_backward_op.register_fake
def _(q: Tensor, q_gradient: Tensor, k_gradient: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _like(q, q.shape), _like(k_gradient, (*k_gradient.shape[:3], q.shape[-1] // 2))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, step, query_positions, key_positions, *ctx.rest = inputs
    ctx.save_for_backward(q, step, query_positions, key_positions)


def _backward(ctx: Any, q_gradient: Tensor, k_gradient: Tensor) -> tuple[Any, ...]:
    q, step, query_positions, key_positions = ctx.saved_tensors
    dq, dt = prepare_backward_op(q, q_gradient, k_gradient, step, query_positions, key_positions, *ctx.rest)
    return dq, dt, *(None,) * 7


prepare_op.register_autograd(_backward, setup_context=_remember)
