"""One kernel for the output of linear attention and for all three gradients: they are the same sum.

With κ from row factors (see tiles), D the denominators, g the output's gradient, δ_i = -(g_i·o_i) or 0 where ε holds D:

    o_i D_i = Σ_{j≤i} κ (a_i·t_j)        v_j        x, y, z = a, t, v
    da_i    = Σ_{j≤i} κ (g_i·v_j + δ_i)  t_j / D_i            g, v, t      (GRADED)
    dt_j    = Σ_{i≥j} κ (v_j·g_i + δ_i)  a_i / D_i            v, g, a      (GRADED, REVERSE)
    dv_j    = Σ_{i≥j} κ (t_j·a_i)        g_i / D_i            t, a, g      (REVERSE)

Each is Σ κ (x·y) z over one side of the diagonal. Pairs within a segment of the text are weighed one by one; all that
lies behind comes from the sum Σ y⊗z before the segment. That sum is the same for o and da, and for dt and dv: it lies
(dv, d), so that the tensor cores read v or g transposed, as it came from memory, and the features as they left the
activation.
"""

import triton
import triton.language as tl

from farspan.ops.cosformer.kernels.tiles import (
    load_angles,
    load_features,
    load_scale,
    load_tile,
    locate,
    multiply,
    through_activation,
)
from farspan.ops.kernels.narrow import narrow


@triton.jit(do_not_specialize=["n", "x_heads", "segment", "held"])
def pairs_kernel(
    x, y, z, source, out, states, sums, denominators, deltas, angles, padding, documents,
    still, wave, epsilon, n, x_heads, segment, held,
    x_b, x_h, x_n, y_b, y_h, y_n, z_b, z_h, z_n, source_b, source_h, source_n, out_b, out_h, out_n,
    angles_b, angles_s, padding_b, documents_b,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, GRADED: tl.constexpr, RELU: tl.constexpr, STILL: tl.constexpr,
    WAVE: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head of x, which lie in one segment (of so many tokens).

    `states` and `sums` hold the sums before each of `held` segments (1: the same for all), or are None.
    `source` is what the activation was applied to, where its derivative is needed.
    """
    OUT: tl.constexpr = not (REVERSE or GRADED)
    TIMES: tl.constexpr = GROUP if REVERSE else 1
    block, head, row = locate(tl.cdiv(n, BLOCK_M), x_heads)
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
        left = load_tile(x, where_x, column, keep if REVERSE else live, WIDTH, DOT)
    else:
        left = load_features(x, where_x, column, keep if REVERSE else live, RELU, WIDTH, DOT)
    cos, sin = load_angles(angles, angles_b, angles_s, row, index, live, WAVE)
    where_row = (row * x_heads + head) * n + wide
    delta = tl.full([BLOCK_M], 1.0, tl.float32)
    if GRADED and not REVERSE:
        delta = tl.load(deltas + where_row, mask=live, other=0.0)
    x_0, x_c, x_s, x_d = _factors(
        denominators, where_row, live, cos, sin, still, wave, epsilon, not REVERSE, GRADED, BLOCK_M
    )

    # What lies behind the segment, through the sums before it.
    document, enters = _entering(documents, documents_b, row, index, live, part, segment, n, REVERSE)
    mixed = tl.zeros([BLOCK_M, BLOCK_Z], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    at = (row * heads + y_head) * held + tl.minimum(part, held - 1)
    if sums is not None and (OUT or GRADED):
        feature = into if GRADED else column
        D: tl.constexpr = OUT_WIDTH if GRADED else WIDTH
        sum_0, sum_c, sum_s = _load_sums(sums, at, feature, STILL, WAVE, SHARED, D)
        if OUT:
            total = _recalled(left, x_0, x_c, x_s, sum_0, sum_c, sum_s, STILL, WAVE, SHARED) * enters
        else:
            mixed = _shifted(delta * enters, x_0, x_c, x_s, x_d, sum_0, sum_c, sum_s, STILL, WAVE, SHARED)
    if states is not None:
        PARTS: tl.constexpr = STILL + 2 * WAVE
        for wave_part in range(PARTS):  # a loop, so that one after the other goes from memory to the tensor cores
            factor = x_0
            if WAVE:
                factor = tl.where(wave_part == STILL, x_c, tl.where(wave_part == STILL + 1, x_s, x_0))
            state = _load_state(states, at * PARTS + wave_part, column, into, GRADED, WIDTH, OUT_WIDTH)
            mixed += multiply(left, state, PRECISION) * (factor * enters)[:, None]

    # Pairs within the segment.
    if CAUSAL:
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
                right = load_tile(y, where_y, column, y_keep, WIDTH, DOT)
                value = load_features(z, where_z, into, y_keep, RELU, OUT_WIDTH, DOT)
            else:
                right = load_features(y, where_y, column, y_keep, RELU, WIDTH, DOT)
                value = load_tile(z, where_z, into, y_keep, OUT_WIDTH, DOT)
            y_cos, y_sin = load_angles(angles, angles_b, angles_s, row, other, y_live, WAVE)
            where_other = (row * x_heads * TIMES + which) * n + far
            y_0, y_c, y_s, y_d = _factors(
                denominators,
                where_other,
                y_live,
                y_cos,
                y_sin,
                still,
                wave,
                epsilon,
                REVERSE,
                GRADED or REVERSE,
                BLOCK_N,
            )

            score = multiply(left, tl.trans(right), PRECISION)
            kappa, plain = _kappa(x_0, x_c, x_s, x_d, y_0, y_c, y_s, y_d, STILL, WAVE, SHARED)
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
            mixed += multiply(weights, value, PRECISION)

    if OUT:
        mixed = mixed / tl.maximum(total, epsilon)[:, None]
        tl.store(denominators + where_row, total, mask=live)
    if GRADED:
        where_source = row * source_b + head * source_h + wide * source_n
        mixed = through_activation(mixed, source, where_source, into, keep if REVERSE else live, RELU, OUT_WIDTH)
    if REVERSE:
        mixed = tl.where(keep[:, None], mixed, 0.0)
    to = out + (row * out_b + head * out_h + wide * out_n)[:, None] + into[None, :]
    tl.store(to, narrow(mixed, out.dtype.element_ty), mask=live[:, None] & (into < OUT_WIDTH)[None, :])


@triton.jit
def _kept(padding, padding_b, row, index, live):
    """Which keys count."""
    if padding is not None:
        live = live & (tl.load(padding + row * padding_b + index, mask=live, other=0) != 0)
    return live


@triton.jit
def _factors(
    denominators, where, live, cos, sin, still, wave, epsilon,
    QUERY: tl.constexpr, GRADED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's factors of κ: a key's are 1, cos, sin; a query's have the weights, and in a gradient its denominator."""
    one = tl.full([BLOCK], 1.0, tl.float32)
    if QUERY:
        if GRADED:
            one = load_scale(denominators, where, live, epsilon)
        wave = one * wave
        return one * still, wave * cos, wave * sin, one
    else:
        return one, cos, sin, one


@triton.jit
def _entering(documents, documents_b, row, index, live, part, segment, n, REVERSE: tl.constexpr):
    """The documents of tokens, and 1 for those that meet what lies behind their segment, else 0."""
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
    """One sum Σ y⊗z, for x to go through; it lies (dv, d), and x is of width dv in a gradient (GRADED), else of d."""
    of = states + at * WIDTH * OUT_WIDTH
    if GRADED:
        inside = (column < WIDTH)[:, None] & (into < OUT_WIDTH)[None, :]
        return tl.load(of + column[:, None] * OUT_WIDTH + into[None, :], mask=inside, other=0.0)
    else:
        inside = (into < OUT_WIDTH)[:, None] & (column < WIDTH)[None, :]
        return tl.trans(tl.load(of + into[:, None] * WIDTH + column[None, :], mask=inside, other=0.0))


@triton.jit
def _shifted(
    delta, x_0, x_c, x_s, x_d, sum_0, sum_c, sum_s, STILL: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """The part of a gradient that came through the denominators: δ times the sums Σ y."""
    if not SHARED:
        return (delta * x_d)[:, None] * sum_0[None, :]
    elif STILL and WAVE:
        return delta[:, None] * (
            x_0[:, None] * sum_0[None, :] + x_c[:, None] * sum_c[None, :] + x_s[:, None] * sum_s[None, :]
        )
    elif WAVE:
        return delta[:, None] * (x_c[:, None] * sum_c[None, :] + x_s[:, None] * sum_s[None, :])
    else:
        return (delta * x_0)[:, None] * sum_0[None, :]


@triton.jit
def _kappa(
    x_0, x_c, x_s, x_d, y_0, y_c, y_s, y_d, STILL: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """κ of all pairs of two blocks, above and below the fraction."""
    if STILL and WAVE:
        kappa = x_0[:, None] * y_0[None, :] + x_c[:, None] * y_c[None, :] + x_s[:, None] * y_s[None, :]
    elif WAVE:
        kappa = x_c[:, None] * y_c[None, :] + x_s[:, None] * y_s[None, :]
    else:
        kappa = x_0[:, None] * y_0[None, :]
    plain = kappa
    if not SHARED:
        plain = x_d[:, None] * y_d[None, :]
    return kappa, plain


@triton.jit
def _recalled(left, x_0, x_c, x_s, sum_0, sum_c, sum_s, STILL: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr):
    """The part of the denominators that the sums before the segment hold."""
    left = left.to(tl.float32)
    total = x_0 * 0.0
    if not SHARED:
        total += tl.sum(left * sum_0[None, :], axis=1)
    if SHARED and STILL:
        total += x_0 * tl.sum(left * sum_0[None, :], axis=1)
    if SHARED and WAVE:
        total += x_c * tl.sum(left * sum_c[None, :], axis=1) + x_s * tl.sum(left * sum_s[None, :], axis=1)
    return total


@triton.jit
def _load_sums(sums, at, feature, STILL: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr):
    """The sums Σ ψ before a segment; those that there are not are never used."""
    COUNT: tl.constexpr = (STILL + 2 * WAVE) if SHARED else 1
    where = sums + at * COUNT * D + feature
    first = tl.load(where, mask=feature < D, other=0.0)
    sum_c = first
    sum_s = first
    if WAVE and SHARED:
        sum_c = tl.load(where + STILL * D, mask=feature < D, other=0.0)
        sum_s = tl.load(where + (STILL + 1) * D, mask=feature < D, other=0.0)
    return first, sum_c, sum_s


@triton.jit(do_not_specialize=["n", "heads"])
def delta_kernel(
    out, gradient, denominators, deltas, epsilon, n, heads,
    out_b, out_h, out_n, gradient_b, gradient_h, gradient_n,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """δ_i = -(g_i·o_i), and 0 where the denominator is held at ε and has no gradient."""
    block, head, row = locate(tl.cdiv(n, BLOCK), heads)
    index = block * BLOCK + tl.arange(0, BLOCK)
    live = index < n
    wide = index.to(tl.int64)
    column = tl.arange(0, BLOCK_V)
    mean = load_tile(out, row * out_b + head * out_h + wide * out_n, column, live, WIDTH, tl.float32)
    slope = load_tile(
        gradient, row * gradient_b + head * gradient_h + wide * gradient_n, column, live, WIDTH, tl.float32
    )
    where = (row * heads + head) * n + wide
    free = tl.load(denominators + where, mask=live, other=0.0) >= epsilon
    tl.store(deltas + where, tl.where(free, -tl.sum(mean * slope, axis=1), 0.0), mask=live)
