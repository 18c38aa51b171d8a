"""Linear attention: one forward and one backward op on three kernels.

Every weight is (a_i·t_j)·κ(i-j) of features a of queries and t of keys, with κ = 1 or, with WAVE, κ = cos θ(i-j). That
is a sum of products of row factors, a query's times a key's: cos θi · cos θj + sin θi · sin θj. Rows can be multiplied
after a matrix product as well as before it. So no features of width 2d exist: tiles of q and k enter the tensor cores
as they are loaded, and the factors are applied in float32. Denominators have the same κ if SHARED, else 1.

The output and all three gradients are the same sum, computed by `pairs_kernel`. With denominators D, the output's
gradient g, and δ_i = -(g_i·o_i), or 0 where ε replaces D:

    o_i D_i = Σ_{j≤i} κ (a_i·t_j)        v_j        x, y, z = a, t, v
    da_i    = Σ_{j≤i} κ (g_i·v_j + δ_i)  t_j / D_i            g, v, t      (GRADED)
    dt_j    = Σ_{i≥j} κ (v_j·g_i + δ_i)  a_i / D_i            v, g, a      (GRADED, REVERSE)
    dv_j    = Σ_{i≥j} κ (t_j·a_i)        g_i / D_i            t, a, g      (REVERSE)

Each is Σ κ (x·y) z over one side of the diagonal. The sequence is cut into segments. Pairs within a segment are
weighted one by one; everything before it comes from the sum Σ y⊗z before the segment. `totals_kernel` sums each
segment, and `prefix_kernel` adds up the segments before each. The sum is the same for o and da, and for dt and dv. It
is laid out (dv, d), so that the tensor cores read v or g transposed, as loaded, and the features as the activation
left them.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspan.ops.device import cdiv
from farspan.ops.triton.support import INTERPRETED, Buffer, narrow, padded, row_major, row_stride


@triton.jit
def _locate(blocks, heads):
    """Return the block, head and batch row of a program, with `blocks` blocks per head."""
    # One axis of the grid for all: the others are limited to 65,535 programs, and a batch may be larger.
    program = tl.program_id(0)
    row = program // (blocks * heads)
    head = program // blocks - row * heads
    return program % blocks, head.to(tl.int64), row.to(tl.int64)


@triton.jit
def _load_tile(x, where, column, live, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """Load rows of x that start at `where`, as DOT; zeros where not live, whatever memory holds there."""
    inside = live[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + where[:, None] + column[None, :], mask=inside, other=0.0).to(DOT)


@triton.jit
def _load_features(x, where, column, live, RELU: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """Load rows of x and apply the activation: ReLU, or elu + 1."""
    wide = _load_tile(x, where, column, live, WIDTH, tl.float32)
    if RELU:
        wide = tl.where(wide <= 0.0, 0.0, wide)  # unlike a maximum, this keeps a NaN
    else:
        inside = live[:, None] & (column < WIDTH)[None, :]
        wide = tl.where(inside, tl.where(wide > 0.0, wide + 1.0, tl.exp(wide)), 0.0)
    return narrow(wide, DOT)


@triton.jit
def _through_activation(gradient, x, where, column, live, RELU: tl.constexpr, WIDTH: tl.constexpr):
    """Return the gradient of x, given that of its features."""
    wide = _load_tile(x, where, column, live, WIDTH, tl.float32)
    if RELU:
        return tl.where(wide > 0.0, gradient, 0.0)
    else:
        return tl.where(wide > 0.0, gradient, gradient * tl.exp(wide))


@triton.jit
def _load_angles(angles, angles_b, angles_s, row, index, live, WAVE: tl.constexpr):
    """Load cos and sin of θ·position; computed here, they would be computed again in each layout that uses them."""
    cos = index.to(tl.float32)
    sin = cos
    if WAVE:
        cos = tl.load(angles + row * angles_b + index, mask=live, other=0.0)
        sin = tl.load(angles + row * angles_b + angles_s + index, mask=live, other=0.0)
    return cos, sin


@triton.jit
def _load_scale(denominators, where, live, epsilon):
    """Load 1 / max(denominator, ε), which multiplies a query's factors in the backward pass."""
    return 1.0 / tl.maximum(tl.load(denominators + where, mask=live, other=1.0), epsilon)


@triton.jit
def _multiply(x, y, PRECISION: tl.constexpr):
    """Compute x·y on tensor cores; y is rounded to the dtype of x, and the sum is float32."""
    if y.dtype != x.dtype:
        y = narrow(y, x.dtype)
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def _weighted(x, weight):
    """Return weight_i·x_i in float32."""
    return x.to(tl.float32) * weight[:, None]


@triton.jit
def _column_sums(x, weight):
    """Return Σ_i weight_i·x_i."""
    return tl.sum(_weighted(x, weight), axis=0)


@triton.jit(do_not_specialize=["n", "heads", "segment", "parts"])
def totals_kernel(
    y, z, states, sums, denominators, deltas, angles, padding, documents, epsilon, n, heads, segment, parts,
    y_b, y_h, y_n, z_b, z_h, z_n, angles_b, angles_s, padding_b, documents_b,
    QUERIES: tl.constexpr, RELU: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr,
    TIMES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Sum one segment of one key head, for BLOCK_Z of the DV columns.

    Of keys and values, Σ φ(t_j)⊗v_j and Σ ψ(t_j), for the forward direction. With QUERIES, of queries and the output's
    gradients g over the TIMES heads of a group, Σ φ(a_i)⊗g_i/D_i and Σ ψ(a_i) δ_i/D_i, for the backward direction. Only
    the document at the segment's far end continues, so only that is summed.
    """
    block, head, row = _locate(parts * tl.cdiv(DV, BLOCK_Z), heads)
    part = block % parts
    split = block // parts
    column = tl.arange(0, BLOCK_D)
    into = split * BLOCK_Z + tl.arange(0, BLOCK_Z)
    state_c = tl.zeros([BLOCK_Z, BLOCK_D], tl.float32)  # without a wave, the only ones
    state_s = tl.zeros([BLOCK_Z, BLOCK_D], tl.float32)
    sum_c = tl.zeros([BLOCK_D], tl.float32)
    sum_s = tl.zeros([BLOCK_D], tl.float32)
    begin = part * segment
    end = tl.minimum(begin + segment, n)
    last = end - 1
    if QUERIES:
        last = begin
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        live = index < end
        wide = index.to(tl.int64)
        if padding is not None and not QUERIES:
            live = live & (tl.load(padding + row * padding_b + index, mask=live, other=0) != 0)
        if documents is not None:
            far = tl.load(documents + row * documents_b + last)
            live = live & (tl.load(documents + row * documents_b + index, mask=live, other=-1) == far)
        cos, sin = _load_angles(angles, angles_b, angles_s, row, index, live, WAVE)
        for time in range(TIMES):
            which = head * TIMES + time
            feature = _load_features(y, row * y_b + which * y_h + wide * y_n, column, live, RELU, D, DOT)
            value = _load_tile(z, row * z_b + which * z_h + wide * z_n, into, live, DV, DOT)
            one = tl.full([BLOCK], 1.0, tl.float32)
            delta = one
            weight = one
            if QUERIES:
                where = (row * heads * TIMES + which) * n + wide
                weight = _load_scale(denominators, where, live, epsilon)
                delta = tl.load(deltas + where, mask=live, other=0.0)
            if WAVE:
                state_c += _outer(feature, value, weight * cos, PRECISION)
                state_s += _outer(feature, value, weight * sin, PRECISION)
            else:
                state_c += _outer(feature, value, weight, PRECISION)
            weight = weight * delta
            if WAVE and SHARED:
                sum_c += _column_sums(feature, weight * cos)
                sum_s += _column_sums(feature, weight * sin)
            else:
                sum_c += _column_sums(feature, weight)
    PARTS: tl.constexpr = 2 if WAVE else 1
    SUMS: tl.constexpr = PARTS if SHARED else 1
    at = (row * heads + head) * parts + part
    to = states + at * PARTS * D * DV + into[:, None] * D + column[None, :]
    inside = (into < DV)[:, None] & (column < D)[None, :]
    tl.store(to, state_c, mask=inside)
    if WAVE:
        tl.store(to + D * DV, state_s, mask=inside)
    to_sum = sums + at * SUMS * D + column
    if split == 0:
        tl.store(to_sum, sum_c, mask=column < D)
        if WAVE and SHARED:
            tl.store(to_sum + D, sum_s, mask=column < D)


@triton.jit
def _outer(feature, value, weight, PRECISION: tl.constexpr):
    return _multiply(tl.trans(value), _weighted(feature, weight), PRECISION)


@triton.jit(do_not_specialize=["n", "segment", "parts", "size", "heads"])
def prefix_kernel(
    totals, initial, before, final, documents, n, segment, parts, size, heads, documents_b,
    REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the totals of all segments before each segment (REVERSE: after it), starting from `initial`, and of all
    segments; for BLOCK numbers of one row and head."""
    block, head, row = _locate(tl.cdiv(size, BLOCK), heads)
    at = block * BLOCK + tl.arange(0, BLOCK)
    head += row * heads
    inside = at < size
    running = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        running = tl.load(initial + head * size + at, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, parts):
        part = step
        if REVERSE:
            part = parts - 1 - step
        where = (head * parts + part) * size + at
        if before is not None:
            tl.store(before + where, narrow(running, before.dtype.element_ty), mask=inside)
        if documents is not None:
            if REVERSE:
                near = tl.minimum((part + 1) * segment, n - 1)
                far = part * segment
            else:
                near = tl.maximum(part * segment - 1, 0)
                far = tl.minimum((part + 1) * segment, n) - 1
            of = documents + row * documents_b
            running = tl.where(tl.load(of + near) == tl.load(of + far), running, 0.0)
        running += tl.load(totals + where, mask=inside, other=0.0)
    if final is not None:
        tl.store(final + head * size + at, running, mask=inside)


@triton.jit(do_not_specialize=["n", "x_heads", "segment", "held"])
def pairs_kernel(
    x, y, z, source, out, states, sums, denominators, deltas, angles, padding, documents,
    epsilon, n, x_heads, segment, held,
    x_b, x_h, x_n, y_b, y_h, y_n, z_b, z_h, z_n, source_b, source_h, source_n, out_b, out_h, out_n,
    angles_b, angles_s, padding_b, documents_b,
    REVERSE: tl.constexpr, GRADED: tl.constexpr, RELU: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr,
    GROUP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Compute Σ κ (x·y) z for BLOCK_M rows of one head of x, which lie in one segment of `segment` tokens.

    `states` and `sums` hold the sums before each of `held` segments (1: the same for all), or are None. `source` is the
    input of the activation, where its derivative is needed.
    """
    OUT: tl.constexpr = not (REVERSE or GRADED)
    TIMES: tl.constexpr = GROUP if REVERSE else 1
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
    keep = _kept(padding, padding_b, row, index, live)
    wide = index.to(tl.int64)
    where_x = row * x_b + head * x_h + wide * x_n
    if GRADED:
        left = _load_tile(x, where_x, column, keep if REVERSE else live, WIDTH, DOT)
    else:
        left = _load_features(x, where_x, column, keep if REVERSE else live, RELU, WIDTH, DOT)
    cos, sin = _load_angles(angles, angles_b, angles_s, row, index, live, WAVE)
    where_row = (row * x_heads + head) * n + wide
    delta = tl.full([BLOCK_M], 1.0, tl.float32)
    if GRADED and not REVERSE:
        delta = tl.load(deltas + where_row, mask=live, other=0.0)
    x_0, x_c, x_s = _factors(denominators, where_row, live, cos, sin, epsilon, GRADED and not REVERSE, BLOCK_M)

    # Everything outside the segment, through the sums before it.
    document, enters = _entering(documents, documents_b, row, index, live, part, segment, n, REVERSE)
    mixed = tl.zeros([BLOCK_M, BLOCK_Z], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    at = (row * heads + y_head) * held + tl.minimum(part, held - 1)
    if sums is not None and (OUT or GRADED):
        feature = into if GRADED else column
        D: tl.constexpr = OUT_WIDTH if GRADED else WIDTH
        sum_c, sum_s = _load_sums(sums, at, feature, WAVE and SHARED, D)
        if OUT:
            total = _recalled(left, x_0, x_c, x_s, sum_c, sum_s, WAVE and SHARED) * enters
        else:
            mixed = _shifted(delta * enters, x_0, x_c, x_s, sum_c, sum_s, WAVE and SHARED)
    if states is not None:
        PARTS: tl.constexpr = 2 if WAVE else 1
        for wave_part in range(PARTS):  # a loop, so that one after the other goes from memory to the tensor cores
            factor = x_0
            if WAVE:
                factor = tl.where(wave_part == 0, x_c, x_s)
            state = _load_state(states, at * PARTS + wave_part, column, into, GRADED, WIDTH, OUT_WIDTH)
            mixed += _multiply(left, state, PRECISION) * (factor * enters)[:, None]

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
        y_keep = _kept(padding, padding_b, row, other, y_live)
        which = y_head
        if REVERSE:
            which = y_head * TIMES + step // blocks
            y_keep = y_live
        far = other.to(tl.int64)
        where_y = row * y_b + which * y_h + far * y_n
        where_z = row * z_b + which * z_h + far * z_n
        if GRADED:
            right = _load_tile(y, where_y, column, y_keep, WIDTH, DOT)
            value = _load_features(z, where_z, into, y_keep, RELU, OUT_WIDTH, DOT)
        else:
            right = _load_features(y, where_y, column, y_keep, RELU, WIDTH, DOT)
            value = _load_tile(z, where_z, into, y_keep, OUT_WIDTH, DOT)
        y_cos, y_sin = _load_angles(angles, angles_b, angles_s, row, other, y_live, WAVE)
        where_other = (row * x_heads * TIMES + which) * n + far
        y_0, y_c, y_s = _factors(denominators, where_other, y_live, y_cos, y_sin, epsilon, REVERSE, BLOCK_N)

        score = _multiply(left, tl.trans(right), PRECISION)
        plain = x_0[:, None] * y_0[None, :]
        kappa = plain
        if WAVE:
            kappa = x_c[:, None] * y_c[None, :] + x_s[:, None] * y_s[None, :]
        if SHARED:
            plain = kappa
        seen = index[:, None] <= other[None, :] if REVERSE else index[:, None] >= other[None, :]
        if documents is not None:
            theirs = tl.load(documents + row * documents_b + other, mask=y_live, other=-1)
            seen = seen & (document[:, None] == theirs[None, :])
        if OUT and not SHARED:
            total += tl.sum(tl.where(seen, score * plain, 0.0), axis=1)
        if GRADED:
            extra = delta[:, None]
            if REVERSE:
                extra = tl.load(deltas + where_other, mask=y_live, other=0.0)[None, :]
            score = (score + extra) * kappa if SHARED else score * kappa + extra * plain
        else:
            score = score * kappa
        weights = narrow(tl.where(seen, score, 0.0), DOT)
        if OUT and SHARED:  # as rounded: a mean of few values is then among them, and its gradient cancels
            total += tl.sum(weights.to(tl.float32), axis=1)
        mixed += _multiply(weights, value, PRECISION)

    if OUT:
        mixed = mixed / tl.maximum(total, epsilon)[:, None]
        tl.store(denominators + where_row, total, mask=live)
    if GRADED:
        where_source = row * source_b + head * source_h + wide * source_n
        mixed = _through_activation(mixed, source, where_source, into, keep if REVERSE else live, RELU, OUT_WIDTH)
    if REVERSE:
        mixed = tl.where(keep[:, None], mixed, 0.0)
    to = out + (row * out_b + head * out_h + wide * out_n)[:, None] + into[None, :]
    tl.store(to, narrow(mixed, out.dtype.element_ty), mask=live[:, None] & (into < OUT_WIDTH)[None, :])


@triton.jit
def _kept(padding, padding_b, row, index, live):
    """Return which keys are not padding."""
    if padding is not None:
        live = live & (tl.load(padding + row * padding_b + index, mask=live, other=0) != 0)
    return live


@triton.jit
def _factors(denominators, where, live, cos, sin, epsilon, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's factors of κ: 1, cos and sin; those of a query in a gradient are divided by its denominator."""
    one = tl.full([BLOCK], 1.0, tl.float32)
    if SCALED:
        one = _load_scale(denominators, where, live, epsilon)
    return one, one * cos, one * sin


@triton.jit
def _entering(documents, documents_b, row, index, live, part, segment, n, REVERSE: tl.constexpr):
    """Return the documents of tokens, and 1 for those whose document continues from outside the segment, else 0."""
    document = index
    enters = live.to(tl.float32)
    if documents is not None:
        of = documents + row * documents_b
        document = tl.load(of + index, mask=live, other=-1)
        if REVERSE:
            behind = tl.load(of + tl.minimum((part + 1) * segment, n - 1))
        else:
            behind = tl.load(of + tl.maximum(part * segment - 1, 0))
        enters = (document == behind).to(tl.float32)
    return document, enters


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


@triton.jit
def _shifted(delta, x_0, x_c, x_s, sum_c, sum_s, WAVE: tl.constexpr):
    """Return the part of a gradient that came through the denominators: δ times the sums Σ y."""
    if WAVE:
        return delta[:, None] * (x_c[:, None] * sum_c[None, :] + x_s[:, None] * sum_s[None, :])
    else:
        return (delta * x_0)[:, None] * sum_c[None, :]


@triton.jit
def _recalled(left, x_0, x_c, x_s, sum_c, sum_s, WAVE: tl.constexpr):
    """Return the part of the denominators that the sums before the segment hold."""
    left = left.to(tl.float32)
    if WAVE:
        return x_c * tl.sum(left * sum_c[None, :], axis=1) + x_s * tl.sum(left * sum_s[None, :], axis=1)
    else:
        return x_0 * tl.sum(left * sum_c[None, :], axis=1)


@triton.jit
def _load_sums(sums, at, feature, WAVE: tl.constexpr, D: tl.constexpr):
    """Load the sums Σ ψ before a segment; the second exists only with a wave."""
    COUNT: tl.constexpr = 2 if WAVE else 1
    where = sums + at * COUNT * D + feature
    first = tl.load(where, mask=feature < D, other=0.0)
    second = first
    if WAVE:
        second = tl.load(where + D, mask=feature < D, other=0.0)
    return first, second


@triton.jit(do_not_specialize=["n", "heads"])
def delta_kernel(
    out, gradient, denominators, deltas, epsilon, n, heads,
    out_b, out_h, out_n, gradient_b, gradient_h, gradient_n,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute δ_i = -(g_i·o_i), and 0 where ε replaces the denominator, which then has no gradient."""
    block, head, row = _locate(tl.cdiv(n, BLOCK), heads)
    index = block * BLOCK + tl.arange(0, BLOCK)
    live = index < n
    wide = index.to(tl.int64)
    column = tl.arange(0, BLOCK_V)
    mean = _load_tile(out, row * out_b + head * out_h + wide * out_n, column, live, WIDTH, tl.float32)
    slope = _load_tile(
        gradient, row * gradient_b + head * gradient_h + wide * gradient_n, column, live, WIDTH, tl.float32
    )
    where = (row * heads + head) * n + wide
    free = tl.load(denominators + where, mask=live, other=0.0) >= epsilon
    tl.store(deltas + where, tl.where(free, -tl.sum(mean * slope, axis=1), 0.0), mask=live)


PREFIX = 512  # numbers of the sums that a program of prefix_kernel adds up
DELTAS = 64  # rows per program of delta_kernel


class Weight(NamedTuple):
    """κ = cos θΔ if `wave`, else 1; the same in the denominator if `shared`, else 1. Features by ReLU or elu + 1."""

    wave: bool
    shared: bool
    relu: bool
    epsilon: float

    def like(self, k: Tensor, v: Tensor, held: int, dtype: torch.dtype = torch.float32) -> "Sums":
        """Allocate `held` sums of keys k (b, g, m, d) and values v (b, g, m, dv), those with values in `dtype`."""
        (b, g, _, d), dv, parts = k.shape, v.shape[-1], 2 if self.wave else 1
        states = k.new_empty((b, g, held, parts, dv, d), dtype=dtype)
        return Sums(states, k.new_empty((b, g, held, parts if self.shared else 1, d), dtype=torch.float32))

    def flags(self) -> dict[str, bool]:
        return {"RELU": self.relu, "WAVE": self.wave, "SHARED": self.shared}


class Tokens(NamedTuple):
    """Angles, padding and documents of tokens; None means no angles, no padding, one document."""

    angles: Tensor | None
    """(b|1, 2, n), cos and sin."""
    padding: Tensor | None
    """(b|1, n)"""
    documents: Tensor | None

    @classmethod
    def of(cls, angles: Tensor | None, padding: Tensor | None, documents: Tensor | None) -> "Tokens":
        padding = None if padding is None else padding.view(torch.uint8)
        return cls(*(x if x is None else row_major(x) for x in (angles, padding, documents)))

    @property
    def strides(self) -> list[int]:
        """Return batch strides, 0 where all rows share one; after that of the angles, the stride from cos to sin."""
        angles, *rest = (row_stride(x) for x in self)
        return [angles, 0 if self.angles is None else self.angles.stride(1), *rest]


class Sums(NamedTuple):
    """Sums before segments, (b, g, held, parts, dv, d) and (b, g, held, sums, d); None means zero."""

    states: Tensor | None
    sums: Tensor | None

    @property
    def held(self) -> int:
        return 1 if self.states is None else self.states.shape[2]


NOTHING = Sums(None, None)


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
# In float16 and float32, whose tiles are twice as large.
PRECISE_PAIRS = {64: Cut(32, 32, 4, 1), 128: Cut(32, 32, 8, 1)}
PRECISE_TOTALS = {64: Cut(32, 64, 8, 1), 128: Cut(32, 32, 8, 1)}
# Tokens per segment of causal attention: shorter segments have fewer pairs, longer ones less memory for their sums. In
# width 128, 256 would be 10% faster and need 1.25 times the memory of inputs, outputs and gradients.
SEGMENT = {64: 256, 128: 512}


def choose_cut(table: dict[int, Cut], precise: dict[int, Cut], d: int, width: int, dtype: torch.dtype) -> Cut:
    """Return a table's entry for features of width d and values of `width`."""
    return (table if dtype == torch.bfloat16 else precise)[widest(d, width)]


def widest(d: int, width: int) -> int:
    """Return the key of the tables for features of width d and values of `width`."""
    return 64 if max(d, width) <= 64 else 128


def segment_of(q: Tensor, v: Tensor) -> int:
    """Return the tokens per segment for queries (b, h, n, d) and values (b, g, n, dv)."""
    return SEGMENT[widest(q.shape[-1], v.shape[-1])]


def products(dtype: torch.dtype) -> dict[str, Any]:
    """Multiply bfloat16 as it is, float16 as tf32 because sums leave its range, and float32 as three tf32 products."""
    return {
        "DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "tf32" if dtype == torch.float16 else "tf32x3",
    }


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums before segments: that of their products."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def mix(
    x: Tensor, y: Tensor, z: Tensor, out: Tensor, weight: Weight, tokens: Tokens, before: Sums, denominators: Tensor,
    deltas: Tensor | None, segment: int, *, reverse: bool = False, source: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `out` with Σ κ (x·y) z, or with a gradient, that of `source`."""
    (b, heads, n, width), into = x.shape, z.shape[-1]
    group = y.shape[1] // heads if reverse else heads // y.shape[1]
    table = QUERY_PAIRS if source is not None and not reverse else PAIRS
    cut = choose_cut(table, PRECISE_PAIRS, width, into, x.dtype)
    rows = math.gcd(cut.rows, segment)  # a block lies in one segment
    origin = x if source is None else source
    strides = [s for tensor in (x, y, z, origin, out) for s in tensor.stride()[:3]]
    with torch.cuda.device_of(x):
        pairs_kernel[(cdiv(n, rows) * heads * b,)](
            x, y, z, source, out, before.states, before.sums, denominators, deltas, *tokens,
            weight.epsilon, n, heads, segment, before.held, *strides, *tokens.strides,
            REVERSE=reverse, GRADED=source is not None, **weight.flags(), **products(x.dtype),
            GROUP=group, WIDTH=width, OUT_WIDTH=into, BLOCK_M=rows, BLOCK_N=cut.columns,
            BLOCK_X=padded(width), BLOCK_Z=padded(into), num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip


def add_up(
    y: Tensor, z: Tensor, weight: Weight, tokens: Tokens, denominators: Tensor | None, deltas: Tensor | None,
    segment: int, groups: int, initial: Sums, *, whole: bool,
) -> tuple[Sums, Sums]:  # fmt: skip
    """Return the sums before each segment, and those of everything (if `whole`; held once, float32).

    Of keys and values; or, given `denominators` and `deltas`, of queries and gradients, from the end of the sequence.
    """
    (b, heads, n, d), dv = y.shape, z.shape[-1]
    g, queries = heads // groups, denominators is not None
    cut, parts = choose_cut(TOTALS, PRECISE_TOTALS, d, dv, y.dtype), cdiv(n, segment)
    columns = min(cut.columns, padded(dv))
    totals = weight.like(y[:, :g], z, parts)
    finals = weight.like(y[:, :g], z, 1) if whole else NOTHING
    before = weight.like(y[:, :g], z, parts, held_dtype(y.dtype))
    with torch.cuda.device_of(y):
        totals_kernel[(parts * cdiv(dv, columns) * g * b,)](
            y, z, *totals, denominators, deltas, *tokens, weight.epsilon, n, g, segment, parts,
            *y.stride()[:3], *z.stride()[:3], *tokens.strides,
            QUERIES=queries, **weight.flags(), **products(y.dtype), TIMES=groups, D=d, DV=dv,
            BLOCK=cut.rows, BLOCK_D=padded(d), BLOCK_Z=columns, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        for total, start, left, final in zip(totals, initial, before, finals, strict=True):
            assert total is not None
            size = total[0, 0, 0].numel()
            prefix_kernel[(cdiv(size, PREFIX) * g * b,)](
                total, start, left, final, tokens.documents, n, segment, parts, size, g, tokens.strides[3],
                REVERSE=queries, BLOCK=PREFIX,
            )  # fmt: skip
    return before, finals


def find_deltas(out: Tensor, gradient: Tensor, denominators: Tensor, weight: Weight) -> Tensor:
    """Return δ (b, h, n), the effect of the denominators on the gradient."""
    b, h, n, width = out.shape
    deltas = torch.empty_like(denominators)
    with torch.cuda.device_of(out):
        delta_kernel[(cdiv(n, DELTAS) * h * b,)](
            out, gradient, denominators, deltas, weight.epsilon, n, h, *out.stride()[:3], *gradient.stride()[:3],
            WIDTH=width, BLOCK=DELTAS, BLOCK_V=padded(width),
        )  # fmt: skip
    return deltas


class LinearKernelCall(NamedTuple):
    """One call of the forward op: causal attention of n queries to n keys."""

    q: Tensor  # (b, h, n, d)
    k: Tensor  # (b, g, n, d)
    v: Tensor  # (b, g, n, dv)
    initial: Tensor | None  # sums to continue from, (b, g, parts·d, dv)
    initial_sum: Tensor | None  # (b, g, sums·d)
    angles: Tensor | None  # cos and sin (b|1, 2, n); None without a wave
    padding: Tensor | None  # (b, n) bool, True = keep
    documents: Tensor | None  # (b, n)
    shared: bool
    relu: bool
    epsilon: float
    segment: int  # a multiple of 64; 0 chooses one

    @property
    def weight(self) -> Weight:
        return Weight(self.angles is not None, self.shared, self.relu, self.epsilon)


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? initial, Tensor? initial_sum, Tensor? angles, Tensor? padding, "
    "Tensor? documents, bool shared, bool relu, float epsilon, int segment"
)


@torch.library.custom_op(
    "farspan::linear_attention",
    mutates_args=(),
    schema=f"({SCHEMA}, bool remember) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_attention_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Run a :class:`LinearKernelCall`, given field by field, and whether to return its final sums.

    Return the output (b, h, n, dv), denominators (b, h, n), the sums before each segment for the backward pass, and the
    sums of the whole sequence. Results that do not exist are empty.
    """
    *fields, remember = arguments
    call = LinearKernelCall(*fields)
    weight, segment = call.weight, call.segment or segment_of(call.q, call.v)
    q, k, v = (row_major(x) for x in (call.q, call.k, call.v))
    tokens = Tokens.of(call.angles, call.padding, call.documents)
    before, total, kept = _held(call.initial, call.initial_sum, weight, k, v), NOTHING, NOTHING
    if remember or k.shape[2] > segment:
        before, total = add_up(k, v, weight, tokens, None, None, segment, 1, before, whole=remember)
        kept = before
    out = Buffer.like(q, (*q.shape[:3], v.shape[-1])).view
    denominators = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    mix(q, k, v, out, weight, tokens, before, denominators, None, segment)
    return out, denominators, *_or_empty(kept, q), *_flat(total, q)


@torch.library.custom_op(
    "farspan::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor? final, Tensor? final_sum, Tensor out, Tensor denominators, Tensor states, "
    f"Tensor sums, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_attention_backward_op(
    gradient: Tensor,
    final: Tensor | None,
    final_sum: Tensor | None,
    out: Tensor,
    denominators: Tensor,
    states: Tensor,
    sums: Tensor,
    *fields: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and the initial sums, given those of the output and the final sums."""
    call = LinearKernelCall(*fields)
    weight, segment = call.weight, call.segment or segment_of(call.q, call.v)
    q, k, v, out, gradient = (row_major(x) for x in (call.q, call.k, call.v, out, gradient))
    queries = Tokens.of(call.angles, None, call.documents)
    keys = Tokens.of(call.angles, call.padding, call.documents)
    deltas = find_deltas(out, gradient, denominators, weight)
    rest = (denominators, deltas, segment)
    before = Sums(states, sums) if states.numel() else _held(call.initial, call.initial_sum, weight, k, v)
    dq = Buffer.like(q, q.shape).view
    mix(gradient, v, k, dq, weight, keys, before, *rest, source=q)
    after, total, whole = _held(final, final_sum, weight, k, v), NOTHING, call.initial is not None
    if whole or k.shape[2] > segment:
        groups = q.shape[1] // k.shape[1]
        after, total = add_up(q, gradient, weight, queries, *rest, groups, after, whole=whole)
    dk, dv = (Buffer.like(x, x.shape).view for x in (k, v))  # allocated last: the totals of add_up are free again
    mix(v, gradient, q, dk, weight, keys, after, *rest, reverse=True, source=k)
    mix(k, q, gradient, dv, weight, keys, after, *rest, reverse=True)
    return dq, dk, dv, *_flat(total, q)


def _held(states: Tensor | None, sums: Tensor | None, weight: Weight, k: Tensor, v: Tensor) -> Sums:
    """Convert sums of a state, (b, g, parts·d, dv) and (b, g, sums·d); where only one is given, the other is zero."""
    if states is None and sums is None:
        return NOTHING
    held = weight.like(k, v, 1)
    assert held.states is not None
    assert held.sums is not None
    held.states.zero_() if states is None else held.states.copy_(states.reshape(held.states.mT.shape).mT)
    held.sums.zero_() if sums is None else held.sums.copy_(sums.reshape(held.sums.shape))
    return held


def _flat(total: Sums, x: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `_held`, for sums held once."""
    states, sums = _or_empty(total, x)
    return (states[:, :, 0].mT.flatten(2, 3), sums[:, :, 0].flatten(2, 3)) if states.numel() else (states, sums)


def _or_empty(sums: Sums, x: Tensor) -> tuple[Tensor, Tensor]:
    states, sums_ = (x.new_empty(0, dtype=torch.float32) if y is None else y for y in sums)
    return states, sums_


@linear_attention_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    *fields, remember = arguments
    call = LinearKernelCall(*fields)
    q, k, v = (row_major(x) for x in (call.q, call.k, call.v))
    segment = call.segment or segment_of(q, v)
    kept = final = NOTHING
    if remember or k.shape[2] > segment:
        kept = call.weight.like(k, v, cdiv(k.shape[2], segment), held_dtype(q.dtype))
        final = call.weight.like(k, v, 1) if remember else NOTHING
    out = Buffer.like(q, (*q.shape[:3], v.shape[-1])).view
    return out, q.new_empty(q.shape[:3], dtype=torch.float32), *_or_empty(kept, q), *_flat(final, q)


@linear_attention_backward_op.register_fake
def _(gradient: Tensor, final: Any, final_sum: Any, *saved: Any) -> tuple[Tensor, ...]:
    call = LinearKernelCall(*saved[4:])
    q, k, v = (row_major(x) for x in (call.q, call.k, call.v))
    start = NOTHING if call.initial is None else call.weight.like(k, v, 1)
    return *(Buffer.like(x, x.shape).view for x in (q, k, v)), *_flat(start, q)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.numbers = inputs[:8], inputs[8:12]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[:4], *tensors)


def _backward(ctx: Any, gradient: Tensor | None, *rest: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(saved[0])
    *_, final, final_sum = rest
    dq, dk, dv, initial, initial_sum = linear_attention_backward_op(gradient, final, final_sum, *saved, *ctx.numbers)
    has_initial = saved[7] is not None
    return dq, dk, dv, *((initial, initial_sum) if has_initial else (None, None)), *(None,) * 8


linear_attention_op.register_autograd(_backward, setup_context=_save)
