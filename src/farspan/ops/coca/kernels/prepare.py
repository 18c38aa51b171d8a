"""(q, t) → (q̃, k̃) in one pass, forward and backward: squares and angles in float32, no table of angles in memory."""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from farspan.ops.coca.kernels.angles import cos_sin, places
from farspan.ops.kernels.layout import Room, padded, row_major, row_stride
from farspan.ops.kernels.narrow import INTERPRETED, narrow
from farspan.ops.launch import cdiv, is_traced

HEADS = 4
"""Heads that share the angles of one program."""
TILE = 2048
"""Pairs of one head that a program holds at a time."""

register = custom_op if INTERPRETED else triton_op
"""torch.compile looks into a `triton_op`, so that the launch comes from compiled code; there is nothing to look into
where the interpreter runs. Registering one imports Inductor, some seconds at the first use of this module.

The ops name their kernel themselves: torch.compile's cache on disk looks for it in their source, and would not notice a
change of one that is named elsewhere."""


@triton.jit
def _cos_sin(
    index, count, step, positions, step_b, positions_b, row, first,
    FACTOR: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """FACTOR·(cos, sin) of a block of positions, (BLOCK_N, BLOCK_D).

    Nothing that becomes an address may come from here: torch.compile would take `step` for a place that is written to.
    """
    pair = tl.arange(0, BLOCK_D)
    turn = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
    at = places(positions, positions_b, row, index, index < count, first)
    cos, sin = cos_sin(at[:, None] * turn[None, :])
    return cos * FACTOR, sin * FACTOR


@triton.jit
def prepare_kernel(
    q, t, q_out, k_out, q_gradient, k_gradient, step, query_positions, key_positions,
    h, g, n, m, query_first, key_first,
    q_b, q_h, q_n, t_b, t_g, t_m, q_out_b, q_out_h, q_out_n, k_out_b, k_out_g, k_out_m,
    q_gradient_b, q_gradient_h, q_gradient_n, k_gradient_b, k_gradient_g, k_gradient_m,
    step_b, query_positions_b, key_positions_b,
    EXACT: tl.constexpr, BACKWARD: tl.constexpr, FACTOR: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a block of positions of a few heads of q, or of t. Backward, the gradients of q̃ and k̃ come in and
    those of q and t go out, by `q_out` and `k_out`.

    FACTOR is no argument: torch.compile hands on a float in float64, and all that it meets would be float64 too.
    The two have functions of their own: in branches of one, sizes of different widths would be one variable.
    """
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    q_programs = tl.cdiv(n, BLOCK_N) * tl.cdiv(h, HEADS)
    if program < q_programs:
        _prepare_queries(
            program, row, q, q_out, q_gradient, step, query_positions, h, n, query_first,
            q_b, q_h, q_n, q_out_b, q_out_h, q_out_n, q_gradient_b, q_gradient_h, q_gradient_n,
            step_b, query_positions_b, EXACT, BACKWARD, FACTOR, HALF, HEADS, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        _prepare_keys(
            program - q_programs, row, t, k_out, k_gradient, step, key_positions, g, m, key_first,
            t_b, t_g, t_m, k_out_b, k_out_g, k_out_m, k_gradient_b, k_gradient_g, k_gradient_m,
            step_b, key_positions_b, EXACT, BACKWARD, FACTOR, HALF, HEADS, BLOCK_N, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _prepare_queries(
    program, row, q, q_out, q_gradient, step, positions, h, n, first,
    q_b, q_h, q_n, q_out_b, q_out_h, q_out_n, q_gradient_b, q_gradient_h, q_gradient_n, step_b, positions_b,
    EXACT: tl.constexpr, BACKWARD: tl.constexpr, FACTOR: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n, BLOCK_N)
    index = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    cos, sin = _cos_sin(index, n, step, positions, step_b, positions_b, row, first, FACTOR, HALF, BLOCK_D)
    pair = tl.arange(0, BLOCK_D)[None, :]
    inside = (index < n)[:, None] & (pair < HALF)
    index = index.to(tl.int64)[:, None]
    start = (program // blocks) * HEADS
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


@triton.jit
def _prepare_keys(
    program, row, t, k_out, k_gradient, step, positions, g, m, first,
    t_b, t_g, t_m, k_out_b, k_out_g, k_out_m, k_gradient_b, k_gradient_g, k_gradient_m, step_b, positions_b,
    EXACT: tl.constexpr, BACKWARD: tl.constexpr, FACTOR: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(m, BLOCK_N)
    index = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    cos, sin = _cos_sin(index, m, step, positions, step_b, positions_b, row, first, FACTOR, HALF, BLOCK_D)
    pair = tl.arange(0, BLOCK_D)[None, :]
    inside = (index < m)[:, None] & (pair < HALF)
    index = index.to(tl.int64)[:, None]
    left = cos
    right = sin
    if not EXACT:
        left = cos - sin
        right = cos + sin
    start = (program // blocks) * HEADS
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


@register("farspan::coca_prepare", mutates_args=())
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
    q_, k_ = Room.like(q, q.shape), Room.like(t, (*t.shape[:3], q.shape[-1]))
    where = (query_positions, key_positions, query_first, key_first)
    kernel = prepare_kernel if INTERPRETED else wrap_triton(prepare_kernel)
    _launch(kernel, q, t, q_, k_, None, None, step, *where, form, factor)
    return q_.view, k_.view


@register("farspan::coca_prepare_backward", mutates_args=())
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
    """The gradients of q and t, given those of q̃ and k̃; both laid out as q is, which t most likely was, too."""
    dq, dt = Room.like(q, q.shape), Room.like(q, (*k_gradient.shape[:3], q.shape[-1] // 2))
    where = (query_positions, key_positions, query_first, key_first)
    kernel = prepare_kernel if INTERPRETED else wrap_triton(prepare_kernel)
    _launch(kernel, q, None, dq, dt, q_gradient, k_gradient, step, *where, form, factor)
    return dq.view, dt.view


def _launch(
    kernel: Any,
    q: Tensor,
    t: Tensor | None,
    q_out: Room,
    k_out: Room,
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
    (b, h, n, _), (g, m) = q.shape, k_out.view.shape[1:3]
    half = int(q.shape[-1]) // 2  # a constant of the kernel, also where torch.compile would let it vary
    q, t, q_gradient, k_gradient = (  # type: ignore[assignment]
        x if x is None else row_major(x) for x in (q, t, q_gradient, k_gradient)
    )
    query_positions, key_positions = (x if x is None else row_major(x) for x in (query_positions, key_positions))
    width = padded(half)
    block = max(1, TILE // width)
    programs = cdiv(n, block) * cdiv(h, HEADS) + cdiv(m, block) * cdiv(g, HEADS)
    strides = [s for x in (q, t, q_out.view, k_out.view, q_gradient, k_gradient) for s in _strides(x)]
    rows = [row_stride(x) for x in (step, query_positions, key_positions)]
    with nullcontext() if is_traced() else torch.cuda.device_of(q):  # compiled code sets the device itself
        kernel[(programs, b)](
            q, t, q_out.memory, k_out.memory, q_gradient, k_gradient, step, query_positions, key_positions,
            h, g, n, m, query_first, key_first, *strides, *rows,
            EXACT=form == "exact", BACKWARD=q_gradient is not None, FACTOR=float(factor), HALF=half,
            HEADS=HEADS, BLOCK_N=block, BLOCK_D=width,
        )  # fmt: skip


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, step, query_positions, key_positions, *ctx.rest = inputs
    ctx.save_for_backward(q, step, query_positions, key_positions)


def _backward(ctx: Any, q_gradient: Tensor, k_gradient: Tensor) -> tuple[Any, ...]:
    q, step, query_positions, key_positions = ctx.saved_tensors
    dq, dt = prepare_backward_op(q, q_gradient, k_gradient, step, query_positions, key_positions, *ctx.rest)
    return dq, dt, *(None,) * 7


prepare_op.register_autograd(_backward, setup_context=_remember)

if INTERPRETED:  # a `triton_op` is its own description

    @prepare_op.register_fake
    def _(q: Tensor, t: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return Room.like(q, q.shape).view, Room.like(t, (*t.shape[:3], q.shape[-1])).view

    @prepare_backward_op.register_fake
    def _(q: Tensor, q_gradient: Tensor, k_gradient: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return Room.like(q, q.shape).view, Room.like(q, (*k_gradient.shape[:3], q.shape[-1] // 2)).view
