"""The causal cosFormer of the paper: one forward and one backward op on three kernels.

A weight is (a_i·t_j)·κ(i-j), with a = ReLU(q), t = ReLU(k) and κ = cos θi · cos θj + sin θi · sin θj: products of row
factors. Rows can be multiplied after a matrix product as well as before it. So no features of width 2d exist: tiles of
q and k enter the tensor cores as they are loaded, and the factors are applied in float32.

The output and all three gradients are the same sum, computed by `pairs_kernel`. With denominators D, the output's
gradient g, and δ_i = -(g_i·o_i), or 0 where ε replaces D:

    o_i D_i = Σ_{j≤i} κ (a_i·t_j)        v_j        x, y, z = a, t, v
    da_i    = Σ_{j≤i} κ (g_i·v_j + δ_i)  t_j / D_i            g, v, t      (GRADED)
    dt_j    = Σ_{i≥j} κ (v_j·g_i + δ_i)  a_i / D_i            v, g, a      (GRADED, REVERSE)
    dv_j    = Σ_{i≥j} κ (t_j·a_i)        g_i / D_i            t, a, g      (REVERSE)

The sequence is cut into segments. Pairs within a segment are weighted one by one; everything before it comes from the
sum Σ y⊗z before the segment. `totals_kernel` sums each segment, and `prefix_kernel` adds up the segments before each.
The sum is the same for o and da, and for dt and dv. It is laid out (dv, d), so that the tensor cores read v or g
transposed, as loaded, and the features as the ReLU left them.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspan.ops.device import cdiv
from farspan.ops.triton.support import INTERPRETED, Buffer, load_tile, narrow, padded, row_major, row_stride


@triton.jit
def _locate(blocks, heads):
    """Return the block, head and batch row of a program, with `blocks` blocks per head."""
    # One axis of the grid for all: the others are limited to 65,535 programs, and a batch may be larger.
    program = tl.program_id(0)
    row = program // (blocks * heads)
    head = program // blocks - row * heads
    return program % blocks, head.to(tl.int64), row.to(tl.int64)


@triton.jit
def _load_features(x, where, column, live, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """Load rows of x and apply the ReLU."""
    wide = load_tile(x, where, column, live, WIDTH).to(tl.float32)
    return narrow(tl.where(wide <= 0.0, 0.0, wide), DOT)  # unlike a maximum, this keeps a NaN


@triton.jit
def _load_factors(angles, angles_s, index, denominators, where, live, epsilon, SCALED: tl.constexpr):
    """Load cos and sin of θ·position; those of a query in a gradient are divided by its denominator."""
    # Computed here, the angles would be computed again in each layout that uses them.
    cos = tl.load(angles + index, mask=live, other=0.0)
    sin = tl.load(angles + angles_s + index, mask=live, other=0.0)
    if SCALED:
        scale = 1.0 / tl.maximum(tl.load(denominators + where, mask=live, other=1.0), epsilon)
        cos *= scale
        sin *= scale
    return cos, sin


@triton.jit
def _multiply(x, y):
    """Compute x·y on tensor cores; y is rounded to the dtype of x, and the sum is float32."""
    if y.dtype != x.dtype:
        y = narrow(y, x.dtype)
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _weighted(x, weight):
    """Return weight_i·x_i in float32."""
    return x.to(tl.float32) * weight[:, None]


@triton.jit(do_not_specialize=["n", "heads", "segment"])
def totals_kernel(
    y, z, states, sums, denominators, deltas, angles, epsilon, n, heads, segment,
    y_b, y_h, y_n, z_b, z_h, z_n, angles_b, angles_s,
    QUERIES: tl.constexpr, TIMES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Sum one segment of one key head, for BLOCK_Z of the DV columns.

    Of keys and values, Σ φ(t_j)⊗v_j and Σ φ(t_j), for the forward direction. With QUERIES, of queries and the output's
    gradients g over the TIMES heads of a group, Σ φ(a_i)⊗g_i/D_i and Σ φ(a_i) δ_i/D_i, for the backward direction.
    """
    DOT: tl.constexpr = tl.bfloat16 if y.dtype.element_ty == tl.bfloat16 else tl.float32
    parts = tl.cdiv(n, segment)
    block, head, row = _locate(parts * tl.cdiv(DV, BLOCK_Z), heads)
    part = block % parts
    split = block // parts
    column = tl.arange(0, BLOCK_D)
    into = split * BLOCK_Z + tl.arange(0, BLOCK_Z)
    state_c = tl.zeros([BLOCK_Z, BLOCK_D], tl.float32)
    state_s = tl.zeros([BLOCK_Z, BLOCK_D], tl.float32)
    sum_c = tl.zeros([BLOCK_D], tl.float32)
    sum_s = tl.zeros([BLOCK_D], tl.float32)
    angles += row * angles_b
    begin = part * segment
    end = tl.minimum(begin + segment, n)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        live = index < end
        wide = index.to(tl.int64)
        for time in range(TIMES):
            which = head * TIMES + time
            where = (row * heads * TIMES + which) * n + wide
            cos, sin = _load_factors(angles, angles_s, index, denominators, where, live, epsilon, QUERIES)
            feature = _load_features(y, row * y_b + which * y_h + wide * y_n, column, live, D, DOT)
            value = tl.trans(load_tile(z, row * z_b + which * z_h + wide * z_n, into, live, DV).to(DOT))
            state_c += _multiply(value, _weighted(feature, cos))
            state_s += _multiply(value, _weighted(feature, sin))
            if QUERIES:
                delta = tl.load(deltas + where, mask=live, other=0.0)
                cos *= delta
                sin *= delta
            sum_c += tl.sum(_weighted(feature, cos), axis=0)
            sum_s += tl.sum(_weighted(feature, sin), axis=0)
    at = ((row * heads + head) * parts + part) * 2 * D
    to = states + at * DV + into[:, None] * D + column[None, :]
    inside = (into < DV)[:, None] & (column < D)[None, :]
    tl.store(to, state_c, mask=inside)
    tl.store(to + D * DV, state_s, mask=inside)
    if split == 0:
        tl.store(sums + at + column, sum_c, mask=column < D)
        tl.store(sums + at + D + column, sum_s, mask=column < D)


@triton.jit(do_not_specialize=["parts", "size", "heads"])
def prefix_kernel(totals, before, final, parts, size, heads, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the totals of all segments before each of `parts` segments (REVERSE: after it), and of all segments; for
    BLOCK numbers of one row and head."""
    block, head, row = _locate(tl.cdiv(size, BLOCK), heads)
    at = block * BLOCK + tl.arange(0, BLOCK)
    head += row * heads
    inside = at < size
    running = tl.zeros([BLOCK], tl.float32)
    for step in range(0, parts):
        part = step
        if REVERSE:
            part = parts - 1 - step
        where = (head * parts + part) * size + at
        tl.store(before + where, narrow(running, before.dtype.element_ty), mask=inside)
        running += tl.load(totals + where, mask=inside, other=0.0)
    tl.store(final + head * size + at, running, mask=inside)


@triton.jit(do_not_specialize=["n", "x_heads", "segment"])
def pairs_kernel(
    x, y, z, source, attended, out, states, sums, denominators, deltas, angles, epsilon, n, x_heads, segment,
    x_b, x_h, x_n, y_b, y_h, y_n, z_b, z_h, z_n, source_b, source_h, source_n,
    attended_b, attended_h, attended_n, out_b, out_h, out_n, angles_b, angles_s,
    REVERSE: tl.constexpr, GRADED: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Compute Σ κ (x·y) z for BLOCK_M rows of one head of x, which lie in one segment of `segment` tokens.

    `states` and `sums` hold the sums before each segment. `source` is the input of the ReLU, where its derivative is
    needed. The gradient of queries reads the output `attended` and writes `deltas`, which the other gradients read.
    """
    DOT: tl.constexpr = states.dtype.element_ty
    OUT: tl.constexpr = not (REVERSE or GRADED)
    TIMES: tl.constexpr = GROUP if REVERSE else 1
    SCALED: tl.constexpr = GRADED and not REVERSE
    block, head, row = _locate(tl.cdiv(n, BLOCK_M), x_heads)
    heads = x_heads
    y_head = head
    if not REVERSE:
        y_head = head // GROUP
        heads = heads // GROUP
    column = tl.arange(0, BLOCK_X)
    into = tl.arange(0, BLOCK_Z)
    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    part = block * BLOCK_M // segment
    live = index < n
    wide = index.to(tl.int64)
    where_x = row * x_b + head * x_h + wide * x_n
    if GRADED:
        left = load_tile(x, where_x, column, live, WIDTH).to(DOT)
    else:
        left = _load_features(x, where_x, column, live, WIDTH, DOT)
    where_row = (row * x_heads + head) * n + wide
    angles += row * angles_b
    x_c, x_s = _load_factors(angles, angles_s, index, denominators, where_row, live, epsilon, SCALED)
    delta = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALED:
        where_mean = row * attended_b + head * attended_h + wide * attended_n
        mean = load_tile(attended, where_mean, column, live, WIDTH).to(tl.float32)
        free = tl.load(denominators + where_row, mask=live, other=0.0) >= epsilon
        delta = tl.where(free, -tl.sum(mean * left.to(tl.float32), axis=1), 0.0)
        tl.store(deltas + where_row, delta, mask=live)

    # Everything outside the segment, through the sums before it.
    mixed = tl.zeros([BLOCK_M, BLOCK_Z], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    at = ((row * heads + y_head) * tl.cdiv(n, segment) + part) * 2
    if OUT or GRADED:
        feature = into if GRADED else column
        D: tl.constexpr = OUT_WIDTH if GRADED else WIDTH
        sum_c = tl.load(sums + at * D + feature, mask=feature < D, other=0.0)[None, :]
        sum_s = tl.load(sums + at * D + D + feature, mask=feature < D, other=0.0)[None, :]
        if OUT:
            features = left.to(tl.float32)
            total = x_c * tl.sum(features * sum_c, axis=1) + x_s * tl.sum(features * sum_s, axis=1)
        else:
            mixed = delta[:, None] * (x_c[:, None] * sum_c + x_s[:, None] * sum_s)
    for wave_part in range(2):  # a loop, so that one after the other goes from memory to the tensor cores
        factor = tl.where(wave_part == 0, x_c, x_s)
        state = _load_state(states, at + wave_part, column, into, GRADED, WIDTH, OUT_WIDTH)
        mixed += _multiply(left, state) * factor[:, None]

    # Pairs within the segment.
    low = part * segment
    high = tl.minimum((block + 1) * BLOCK_M, n)
    if REVERSE:
        low = block * BLOCK_M
        high = tl.minimum((part + 1) * segment, n)
    blocks = tl.cdiv(high - low, BLOCK_N)
    for step in range(blocks * TIMES):
        other = low + step % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        y_live = other < high
        which = y_head
        if REVERSE:
            which = y_head * TIMES + step // blocks
        far = other.to(tl.int64)
        where_y = row * y_b + which * y_h + far * y_n
        where_z = row * z_b + which * z_h + far * z_n
        if GRADED:
            right = load_tile(y, where_y, column, y_live, WIDTH).to(DOT)
            value = _load_features(z, where_z, into, y_live, OUT_WIDTH, DOT)
        else:
            right = _load_features(y, where_y, column, y_live, WIDTH, DOT)
            value = load_tile(z, where_z, into, y_live, OUT_WIDTH).to(DOT)
        where_far = (row * x_heads * TIMES + which) * n + far
        y_c, y_s = _load_factors(angles, angles_s, other, denominators, where_far, y_live, epsilon, REVERSE)
        score = _multiply(left, tl.trans(right))
        seen = index[:, None] <= other[None, :] if REVERSE else index[:, None] >= other[None, :]
        if GRADED:
            if REVERSE:
                score += tl.load(deltas + where_far, mask=y_live, other=0.0)[None, :]
            else:
                score += delta[:, None]
        score *= x_c[:, None] * y_c[None, :] + x_s[:, None] * y_s[None, :]
        weights = narrow(tl.where(seen, score, 0.0), DOT)
        if OUT:  # as rounded: a mean of few values is then among them, and its gradient cancels
            total += tl.sum(weights.to(tl.float32), axis=1)
        mixed += _multiply(weights, value)

    if OUT:
        mixed = mixed / tl.maximum(total, epsilon)[:, None]
        tl.store(denominators + where_row, total, mask=live)
    if GRADED:
        where_source = row * source_b + head * source_h + wide * source_n
        mixed = tl.where(load_tile(source, where_source, into, live, OUT_WIDTH).to(tl.float32) > 0.0, mixed, 0.0)
    to = out + (row * out_b + head * out_h + wide * out_n)[:, None] + into[None, :]
    tl.store(to, narrow(mixed, out.dtype.element_ty), mask=live[:, None] & (into < OUT_WIDTH)[None, :])


@triton.jit
def _load_state(states, at, column, into, GRADED: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr):
    """Load one sum Σ y⊗z to multiply x by; it is stored (dv, d), and x has width dv with GRADED, else d."""
    of = states + at * WIDTH * OUT_WIDTH
    if GRADED:
        inside = (column < WIDTH)[:, None] & (into < OUT_WIDTH)[None, :]
        return tl.load(of + column[:, None] * OUT_WIDTH + into[None, :], mask=inside, other=0.0)
    else:
        inside = (into < OUT_WIDTH)[:, None] & (column < WIDTH)[None, :]
        return tl.trans(tl.load(of + into[:, None] * WIDTH + column[None, :], mask=inside, other=0.0))


PREFIX = 512  # numbers of the sums that a program of prefix_kernel adds up


Sums = tuple[Tensor, Tensor]
"""Σ φ(y)⊗z and Σ φ(y), (b, g, …, 2, dv, d) and (b, g, …, 2, d), the two parts being those of cos and sin."""


class Cut(NamedTuple):
    """Tile sizes of a launch: tokens of x and of y per tile (of sums: tokens, and columns of values)."""

    rows: int
    columns: int
    warps: int
    stages: int


# In bfloat16, by the widest head that the entry is for: the fastest of `farspan bench cosformer --tune` on an H200,
# kernel by kernel, or near it. The gradient of the queries needs more registers than the other pairs.
PAIRS = {64: Cut(64, 64, 4, 1), 128: Cut(64, 64, 4, 2)}
QUERY_PAIRS = {64: Cut(64, 64, 4, 2), 128: Cut(128, 64, 8, 3)}
TOTALS = {64: Cut(128, 64, 4, 3), 128: Cut(128, 128, 8, 2)}
PRECISE = Cut(32, 32, 8, 1)  # in float32, whose tiles are twice as large
# Tokens per segment: shorter segments have fewer pairs, longer ones less memory for their sums. In width 128, 256 would
# be 10% faster and need 1.25 times the memory of inputs, outputs and gradients.
SEGMENT = {64: 256, 128: 512}


def widest(d: int, width: int) -> int:
    """Return the key of the tables for features of width d and values of `width`."""
    return 64 if max(d, width) <= 64 else 128


def choose_cut(table: dict[int, Cut], x: Tensor, width: int) -> Cut:
    """Return a table's entry for rows x and values of `width`."""
    return table[widest(x.shape[-1], width)] if x.dtype == torch.bfloat16 else PRECISE


def segment_of(k: Tensor, v: Tensor) -> int:
    """Return the tokens per segment for keys (…, d) and values (…, dv), in any order: a multiple of 64."""
    return SEGMENT[widest(k.shape[-1], v.shape[-1])]


def empty_sums(k: Tensor, v: Tensor, *segments: int, dtype: torch.dtype = torch.float32) -> Sums:
    """Allocate sums of keys k (b, g, m, d) and values v (b, g, m, dv), those with values in `dtype`."""
    (b, g, _, d), dv = k.shape, v.shape[-1]
    states = k.new_empty((b, g, *segments, 2, dv, d), dtype=dtype)
    return states, k.new_empty((b, g, *segments, 2, d), dtype=torch.float32)


def empty_results(k: Tensor, v: Tensor) -> tuple[Sums, Sums]:
    """Allocate the sums before each segment, with values in the dtype of their products, and those of everything."""
    dtype = torch.bfloat16 if k.dtype == torch.bfloat16 else torch.float32
    return empty_sums(k, v, cdiv(k.shape[2], segment_of(k, v)), dtype=dtype), empty_sums(k, v)


def mix(
    x: Tensor, y: Tensor, z: Tensor, out: Tensor, angles: Tensor, epsilon: float, before: Sums, denominators: Tensor,
    deltas: Tensor | None, *, reverse: bool = False, source: Tensor | None = None, attended: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `out` with Σ κ (x·y) z, or with a gradient, that of `source`; angles (b|1, 2, n) are cos and sin."""
    (b, heads, n, width), into, segment = x.shape, z.shape[-1], segment_of(x, z)
    group = y.shape[1] // heads if reverse else heads // y.shape[1]
    cut = choose_cut(PAIRS if attended is None else QUERY_PAIRS, x, into)
    rows = math.gcd(cut.rows, segment)  # a block lies in one segment
    tensors = (x, y, z, source, attended, out)
    strides = [s for tensor in tensors for s in ((0, 0, 0) if tensor is None else tensor.stride()[:3])]
    with torch.cuda.device_of(x):
        pairs_kernel[(cdiv(n, rows) * heads * b,)](
            *tensors, *before, denominators, deltas, angles, epsilon, n, heads, segment,
            *strides, row_stride(angles), angles.stride(1),
            REVERSE=reverse, GRADED=source is not None, GROUP=group, WIDTH=width, OUT_WIDTH=into,
            BLOCK_M=rows, BLOCK_N=cut.columns, BLOCK_X=padded(width), BLOCK_Z=padded(into),
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip


def add_up(
    y: Tensor, z: Tensor, g: int, angles: Tensor, epsilon: float, denominators: Tensor | None, deltas: Tensor | None
) -> tuple[Sums, Sums]:
    """Return the sums before each segment, and those of everything, for g key heads.

    Of keys and values; or, given `denominators` and `deltas`, of queries and gradients, from the end of the sequence.
    """
    (b, heads, n, d), dv, segment = y.shape, z.shape[-1], segment_of(y, z)
    queries, cut = denominators is not None, choose_cut(TOTALS, y, dv)
    columns, parts = min(cut.columns, padded(dv)), cdiv(n, segment)
    totals, (before, final) = empty_sums(y[:, :g], z, parts), empty_results(y[:, :g], z)
    with torch.cuda.device_of(y):
        totals_kernel[(parts * cdiv(dv, columns) * g * b,)](
            y, z, *totals, denominators, deltas, angles, epsilon, n, g, segment,
            *y.stride()[:3], *z.stride()[:3], row_stride(angles), angles.stride(1),
            QUERIES=queries, TIMES=heads // g, D=d, DV=dv,
            BLOCK=cut.rows, BLOCK_D=padded(d), BLOCK_Z=columns, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        for total, left, whole in zip(totals, before, final, strict=True):
            size = whole[0, 0].numel()
            prefix_kernel[(cdiv(size, PREFIX) * g * b,)](
                total, left, whole, parts, size, g, REVERSE=queries, BLOCK=PREFIX
            )
    return before, final


@torch.library.custom_op("farspan::linear_attention", mutates_args=())
def linear_attention_op(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attend from n queries to n keys at angles (b|1, 2, n), cos and sin, with denominators of at least epsilon.

    Return the output (b, h, n, dv), denominators (b, h, n), the :data:`Sums` before each segment for the backward pass,
    and those after the last key, which have no gradients.
    """
    q, k, v = (row_major(x) for x in (q, k, v))
    before, final = add_up(k, v, k.shape[1], angles, epsilon, None, None)
    out, denominators = _outputs(q, v)
    mix(q, k, v, out, angles, epsilon, before, denominators, None)
    return out, denominators, *before, *final


@linear_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    q, k, v = (row_major(x) for x in (q, k, v))
    before, final = empty_results(k, v)
    return *_outputs(q, v), *before, *final


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return Buffer.like(q, (*q.shape[:3], v.shape[-1])).view, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("farspan::linear_attention_backward", mutates_args=())
def linear_attention_backward_op(
    gradient: Tensor, out: Tensor, denominators: Tensor, states: Tensor, sums: Tensor,
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v, given that of the output."""
    q, k, v, out, gradient = (row_major(x) for x in (q, k, v, out, gradient))
    rest = (denominators, torch.empty_like(denominators))
    dq = Buffer.like(q, q.shape).view
    mix(gradient, v, k, dq, angles, epsilon, (states, sums), *rest, source=q, attended=out)
    after, _ = add_up(q, gradient, k.shape[1], angles, epsilon, *rest)
    dk, dv = (Buffer.like(x, x.shape).view for x in (k, v))  # allocated last: the totals of add_up are free again
    mix(v, gradient, q, dk, angles, epsilon, after, *rest, reverse=True, source=k)
    mix(k, q, gradient, dv, angles, epsilon, after, *rest, reverse=True)
    return dq, dk, dv


@linear_attention_backward_op.register_fake
def _(*saved: Any) -> tuple[Tensor, ...]:
    return tuple(Buffer.like(row_major(x), x.shape).view for x in saved[5:8])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.epsilon = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[:4], *tensors)


def _backward(ctx: Any, gradient: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    out, *saved = ctx.saved_tensors
    gradient = torch.zeros_like(out) if gradient is None else gradient
    return *linear_attention_backward_op(gradient, out, *saved, ctx.epsilon), None, None


linear_attention_op.register_autograd(_backward, setup_context=_save)
