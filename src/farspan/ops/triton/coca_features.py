"""Features (q, t) → (q̃, k̃) of CoCA and of polar attention in one pass, forward and backward.

Squares and angles are float32, and there is no table of angles in memory.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from farspan.ops.device import cdiv, is_traced
from farspan.ops.triton.angles import cos_sin, positions_of, query_features
from farspan.ops.triton.support import INTERPRETED, Buffer, narrow, padded, row_major, row_stride

HEADS = 4
"""Heads that share the angles of one program."""
TILE = 2048
"""Pairs of one head that a program holds at a time."""

# torch.compile looks into a `triton_op`, so that the launch comes from compiled code. There is nothing to look into
# where the interpreter runs. Registering one imports Inductor, some seconds at the first use of this module.
#
# The ops name their kernel themselves: torch.compile's cache on disk looks for it in their source, and would not notice
# a change of one that is named elsewhere.
register = custom_op if INTERPRETED else triton_op


@triton.jit
def prepare_kernel(
    q, t, q_out, k_out, q_gradient, k_gradient, phase, phase_gradient, step, query_positions, key_positions,
    h, g, n, m, query_first, key_first,
    q_b, q_h, q_n, t_b, t_g, t_m, q_out_b, q_out_h, q_out_n, k_out_b, k_out_g, k_out_m,
    q_gradient_b, q_gradient_h, q_gradient_n, k_gradient_b, k_gradient_g, k_gradient_m,
    step_b, query_positions_b, key_positions_b,
    POLAR: tl.constexpr, EXACT: tl.constexpr, BACKWARD: tl.constexpr, FACTOR: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Prepare a block of positions of a few heads of q, or of t.

    Backward, the gradients of q̃ and k̃ come in, and `q_out` and `k_out` are those of q and t. `phase_gradient`
    (b, blocks, h, r) gets what each block of queries adds to the gradient of `phase`.
    """
    # FACTOR is no argument: torch.compile passes a float as float64, and all that it meets would be float64 too.
    # Queries and keys are two calls of a function: in branches of one, sizes of different widths would be one variable.
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    q_programs = tl.cdiv(n, BLOCK_N) * tl.cdiv(h, HEADS)
    if program < q_programs:
        _prepare(
            program, row, q, q_out, q_gradient, phase, phase_gradient, step, query_positions, h, n, query_first,
            q_b, q_h, q_n, q_out_b, q_out_h, q_out_n, q_gradient_b, q_gradient_h, q_gradient_n,
            step_b, query_positions_b, not POLAR, EXACT, BACKWARD, FACTOR, HALF, HEADS, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        _prepare(
            program - q_programs, row, t, k_out, k_gradient, None, None, step, key_positions, g, m, key_first,
            t_b, t_g, t_m, k_out_b, k_out_g, k_out_m, k_gradient_b, k_gradient_g, k_gradient_m,
            step_b, key_positions_b, False, EXACT, BACKWARD, FACTOR, HALF, HEADS, BLOCK_N, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _prepare(
    program, row, x, out, gradient, phase, phase_gradient, step, positions, heads, count, first,
    x_b, x_h, x_n, out_b, out_h, out_n, gradient_b, gradient_h, gradient_n, step_b, positions_b,
    PAIRS: tl.constexpr, EXACT: tl.constexpr, BACKWARD: tl.constexpr, FACTOR: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Prepare pairs x = q, or numbers x = t: k̃ = t·(cos, sin), or t·(cos - sin, cos + sin) for slack.

    Polar queries are numbers too, at angles that `phase` (h, r) shifts.
    """
    blocks = tl.cdiv(count, BLOCK_N)
    index = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK_D)
    theta = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
    position = positions_of(positions, positions_b, row, index, index < count, first)
    cos, sin = cos_sin(position[:, None] * theta[None, :])
    cos = cos * FACTOR
    sin = sin * FACTOR
    left = cos
    right = sin
    if not EXACT:
        left = cos - sin
        right = cos + sin
    pair = pair[None, :]
    inside = (index < count)[:, None] & (pair < HALF)
    index = index.to(tl.int64)[:, None]
    start = (program // blocks) * HEADS
    for head in range(start, tl.minimum(start + HEADS, heads)):
        which = tl.zeros([1, 1], tl.int64) + head  # offsets may pass 2³¹
        at = row * x_b + which * x_h + index * x_n + pair
        to = out + row * out_b + which * out_h + index * out_n + pair
        if BACKWARD:
            of = row * gradient_b + which * gradient_h + index * gradient_n + pair
            up = tl.load(gradient + of, mask=inside, other=0.0).to(tl.float32)
            down = tl.load(gradient + of + HALF, mask=inside, other=0.0).to(tl.float32)
        shifted_left = left
        shifted_right = right
        if phase is not None:
            shift = tl.load(phase + which * HALF + pair, mask=pair < HALF, other=0.0)
            shifted_left = left * tl.cos(shift) - right * tl.sin(shift)
            shifted_right = left * tl.sin(shift) + right * tl.cos(shift)
        if PAIRS:
            a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
            if BACKWARD:
                first_half, second_half = _query_gradient(a, b, up, down, cos, sin, EXACT)
            else:
                first_half, second_half = query_features(a, b, cos, sin, EXACT)
        elif BACKWARD:  # t has half the width
            first_half = up * shifted_left + down * shifted_right
            if phase_gradient is not None:
                size = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
                added = tl.sum(size * (down * shifted_left - up * shifted_right), 0)[None, :]
                of = ((row * blocks + program % blocks) * heads + which) * HALF + pair
                tl.store(phase_gradient + of, added, mask=pair < HALF)
        else:
            size = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            first_half = size * shifted_left
            second_half = size * shifted_right
        tl.store(to, narrow(first_half, out.dtype.element_ty), mask=inside)
        if PAIRS or not BACKWARD:
            tl.store(to + HALF, narrow(second_half, out.dtype.element_ty), mask=inside)


@triton.jit
def _query_gradient(a, b, up, down, cos, sin, EXACT: tl.constexpr):
    """Return the gradient of (a, b), given that of their q̃."""
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
    phase: Tensor | None,
    step: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_first: int,
    key_first: int,
    form: str,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Return q̃ (b, h, n, d) and k̃ (b, g, m, d) of q (b, h, n, d) and t (b, g, m, d/2).

    They are those of :func:`farspan.ops.coca_features`. In form "polar" q is (b, h, n, d/2), `phase` float32 (h, d/2),
    and they are those of :func:`farspan.ops.coca.polar_features`. Query i is at position query_first + i, or where
    query_positions (b|1, n) says; keys likewise.
    """
    q_, k_ = (Buffer.like(x, (*x.shape[:3], 2 * t.shape[-1])) for x in (q, t))
    where = (query_positions, key_positions, query_first, key_first)
    kernel = prepare_kernel if INTERPRETED else wrap_triton(prepare_kernel)
    _launch(kernel, (q, t, None, None), (q_, k_), (phase, None), step, where, form, factor)
    return q_.view, k_.view


@register("farspan::coca_prepare_backward", mutates_args=())
def prepare_backward_op(
    q: Tensor,
    q_gradient: Tensor,
    k_gradient: Tensor,
    phase: Tensor | None,
    step: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    query_first: int,
    key_first: int,
    form: str,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q and t in the layout of q, and what each block adds to that of `phase`.

    The latter is (b, blocks, h, d/2).
    """
    half = k_gradient.shape[-1] // 2
    dq, dt = Buffer.like(q, q.shape), Buffer.like(q, (*k_gradient.shape[:3], half))
    shares = q.new_empty(_phase_shape(q, phase), dtype=torch.float32)
    where = (query_positions, key_positions, query_first, key_first)
    kernel = prepare_kernel if INTERPRETED else wrap_triton(prepare_kernel)
    phases = (phase, None if phase is None else shares)
    _launch(kernel, (q, None, q_gradient, k_gradient), (dq, dt), phases, step, where, form, factor)
    return dq.view, dt.view, shares


def _block(half: int) -> int:
    """Return the positions of one program."""
    return max(1, TILE // padded(half))


def _phase_shape(q: Tensor, phase: Tensor | None) -> tuple[int, ...]:
    return (0,) if phase is None else (q.shape[0], cdiv(q.shape[2], _block(int(q.shape[-1]))), *phase.shape)


def _launch(
    kernel: Any,
    inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    outputs: tuple[Buffer, Buffer],
    phases: tuple[Tensor | None, Tensor | None],
    step: Tensor,
    where: tuple[Tensor | None, Tensor | None, int, int],
    form: str,
    factor: float,
) -> None:
    """Launch the kernel on q, t and the gradients of q̃ and k̃, at the positions and first positions of `where`."""
    given = [x if x is None else row_major(x) for x in inputs]
    positions, firsts = [x if x is None else row_major(x) for x in where[:2]], where[2:]
    (b, h, n, d), (q_out, k_out) = inputs[0].shape, outputs
    g, m = k_out.view.shape[1:3]
    half = int(d) if form == "polar" else int(d) // 2  # a constant of the kernel, even where torch.compile lets it vary
    block = _block(half)
    programs = cdiv(n, block) * cdiv(h, HEADS) + cdiv(m, block) * cdiv(g, HEADS)
    strided = (*given[:2], q_out.view, k_out.view, *given[2:])
    strides = [stride for x in strided for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
    rows = [row_stride(x) for x in (step, *positions)]
    with nullcontext() if is_traced() else torch.cuda.device_of(inputs[0]):  # compiled code sets the device itself
        kernel[(programs, b)](
            *given[:2], q_out.memory, k_out.memory, *given[2:], *phases, step, *positions, h, g, n, m, *firsts,
            *strides, *rows,
            POLAR=form == "polar", EXACT=form != "slack", BACKWARD=given[2] is not None, FACTOR=float(factor),
            HALF=half, HEADS=HEADS, BLOCK_N=block, BLOCK_D=padded(half),
        )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, _, phase, step, query_positions, key_positions, *ctx.rest = inputs
    ctx.save_for_backward(q, phase, step, query_positions, key_positions)


def _backward(ctx: Any, q_gradient: Tensor, k_gradient: Tensor) -> tuple[Any, ...]:
    q, phase, step, query_positions, key_positions = ctx.saved_tensors
    where = (step, query_positions, key_positions, *ctx.rest)
    dq, dt, shares = prepare_backward_op(q, q_gradient, k_gradient, phase, *where)
    return dq, dt, None if phase is None else shares.sum((0, 1)), *(None,) * 7


prepare_op.register_autograd(_backward, setup_context=_save)

if INTERPRETED:  # a `triton_op` describes itself

    @prepare_op.register_fake
    def _(q: Tensor, t: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return tuple(Buffer.like(x, (*x.shape[:3], 2 * t.shape[-1])).view for x in (q, t))  # type: ignore[return-value]

    @prepare_backward_op.register_fake
    def _(
        q: Tensor, q_gradient: Tensor, k_gradient: Tensor, phase: Tensor | None, *rest: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        dt = Buffer.like(q, (*k_gradient.shape[:3], k_gradient.shape[-1] // 2)).view
        return Buffer.like(q, q.shape).view, dt, q.new_empty(_phase_shape(q, phase), dtype=torch.float32)
