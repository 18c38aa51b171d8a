"""One kernel for the output of linear attention and for all three gradients: they are the same sum.

With κ from row factors (see tiles), D the denominators, g the output's gradient, δ_i = -(g_i·o_i) or 0 where ε holds D:

    o_i D_i = Σ_{j≤i} κ (a_i·t_j)        v_j        x, y, z = a, t, v
    da_i    = Σ_{j≤i} κ (g_i·v_j + δ_i)  t_j / D_i            g, v, t      (GRADED)
    dt_j    = Σ_{i≥j} κ (v_j·g_i + δ_i)  a_i / D_i            v, g, a      (GRADED, REVERSE)
    dv_j    = Σ_{i≥j} κ (t_j·a_i)        g_i / D_i            t, a, g      (REVERSE)

Each is Σ κ (x·y) z over one side of the diagonal. A program walks a segment chunk by chunk: pairs within a chunk are
weighed directly, all that lies behind comes from the running sum Σ y⊗z, which stays in registers. The sum is the same
for o and da, and for dt and dv: it lies (dv, d), so that the tensor cores read v or g transposed, as it came from
memory, and the features as they left the activation.
"""

import triton
import triton.language as tl

from farspan.ops.coca.kernels.narrow import narrow
from farspan.ops.cosformer.kernels.tiles import (
    column_sums,
    load_angles,
    load_features,
    load_scale,
    load_tile,
    locate,
    multiply,
    through_activation,
    weighed,
)


@triton.jit(do_not_specialize=["n", "x_heads", "segment", "parts", "held"])
def walk_kernel(
    x, y, z, source, out, states, sums, denominators, deltas, angles, padding, documents,
    still, wave, epsilon, n, x_heads, segment, parts, held,
    x_b, x_h, x_n, y_b, y_h, y_n, z_b, z_h, z_n, source_b, source_h, source_n, out_b, out_h, out_n,
    angles_b, angles_s, padding_b, documents_b,
    CAUSAL: tl.constexpr, REVERSE: tl.constexpr, GRADED: tl.constexpr, RELU: tl.constexpr, STILL: tl.constexpr,
    WAVE: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """One program: one of the `parts` segments of one head of x, and BLOCK_Z columns of z and of the output.

    `states` and `sums` hold the running sums before each of `held` segments (1: the same for all), or are None.
    `source` is what the activation was applied to, where its derivative is needed.
    """
    OUT: tl.constexpr = not (REVERSE or GRADED)
    TIMES: tl.constexpr = GROUP if REVERSE else 1
    block, head, row = locate(parts * tl.cdiv(OUT_WIDTH, BLOCK_Z), x_heads)
    part = block % parts
    split = block // parts
    heads = x_heads
    state_head = head
    if not REVERSE:
        state_head = head // GROUP
        heads = heads // GROUP
    column = tl.arange(0, BLOCK_X)
    into = split * BLOCK_Z + tl.arange(0, BLOCK_Z)
    near = tl.arange(0, BLOCK)

    at = (row * heads + state_head) * held + tl.minimum(part, held - 1)
    if GRADED:
        state_0, state_c, state_s = _load_states(
            states, at, column, into, STILL, WAVE, WIDTH, OUT_WIDTH, BLOCK_X, BLOCK_Z
        )
        sum_0, sum_c, sum_s = _load_sums(sums, at, into, STILL, WAVE, SHARED, OUT_WIDTH, BLOCK_Z)
    else:
        state_0, state_c, state_s = _load_states(
            states, at, into, column, STILL, WAVE, OUT_WIDTH, WIDTH, BLOCK_Z, BLOCK_X
        )
        sum_0, sum_c, sum_s = _load_sums(sums, at, column, STILL, WAVE, SHARED, WIDTH, BLOCK_X)

    begin = part * segment
    end = tl.minimum(begin + segment, tl.cdiv(n, BLOCK))
    for step in range(begin, end):
        chunk = step
        if REVERSE:
            chunk = begin + end - 1 - step
        index = chunk * BLOCK + near
        wide = index.to(tl.int64)
        live = index < n
        keep = live
        if padding is not None:
            keep = live & (tl.load(padding + row * padding_b + index, mask=live, other=0) != 0)
        x_live = live
        y_live = keep
        if REVERSE:
            x_live = keep
            y_live = live
        cos, sin = load_angles(angles, angles_b, angles_s, row, index, live, WAVE)
        one = tl.full([BLOCK], 1.0, tl.float32)
        document, enters, stays, goes_on = _documents(
            documents, documents_b, row, index, live, chunk, n, REVERSE, BLOCK
        )

        # What lies behind the chunk, through the running sums.
        where_x = row * x_b + head * x_h + wide * x_n
        if GRADED:
            left = load_tile(x, where_x, column, x_live, WIDTH, DOT)
        else:
            left = load_features(x, where_x, column, x_live, RELU, WIDTH, DOT)
        x_0 = one
        x_c = cos
        x_s = sin
        x_d = one
        delta = one
        if not REVERSE:
            scale = one
            where_row = (row * x_heads + head) * n + wide
            if GRADED:
                scale = load_scale(denominators, where_row, live, epsilon)
                delta = tl.load(deltas + where_row, mask=live, other=0.0)
            x_0 = scale * still
            x_c = scale * wave * cos
            x_s = scale * wave * sin
            x_d = scale
        mixed = tl.zeros([BLOCK, BLOCK_Z], tl.float32)
        if STILL:
            mixed += _through(left, state_0, GRADED, PRECISION) * (x_0 * enters)[:, None]
        if WAVE:
            mixed += _through(left, state_c, GRADED, PRECISION) * (x_c * enters)[:, None]
            mixed += _through(left, state_s, GRADED, PRECISION) * (x_s * enters)[:, None]
        total = tl.zeros([BLOCK], tl.float32)
        if OUT:
            total = _recalled(left, x_0, x_c, x_s, sum_0, sum_c, sum_s, STILL, WAVE, SHARED) * enters
        if GRADED:
            factor = delta * enters
            if not SHARED:
                mixed += (factor * x_d)[:, None] * sum_0[None, :]
            if SHARED and STILL:
                mixed += (factor * x_0)[:, None] * sum_0[None, :]
            if SHARED and WAVE:
                mixed += (factor * x_c)[:, None] * sum_c[None, :] + (factor * x_s)[:, None] * sum_s[None, :]

        if CAUSAL:
            if documents is not None:
                if STILL:
                    state_0 = state_0 * goes_on
                if WAVE:
                    state_c = state_c * goes_on
                    state_s = state_s * goes_on
                sum_0 = sum_0 * goes_on
                sum_c = sum_c * goes_on
                sum_s = sum_s * goes_on
            seen = near[:, None] <= near[None, :] if REVERSE else near[:, None] >= near[None, :]
            if documents is not None:
                seen = seen & (document[:, None] == document[None, :])
            for time in range(TIMES):
                which = head * TIMES + time
                if not REVERSE:
                    which = state_head
                where_y = row * y_b + which * y_h + wide * y_n
                where_z = row * z_b + which * z_h + wide * z_n
                if GRADED:
                    right = load_tile(y, where_y, column, y_live, WIDTH, DOT)
                    value = load_features(z, where_z, into, y_live, RELU, OUT_WIDTH, DOT)
                else:
                    right = load_features(y, where_y, column, y_live, RELU, WIDTH, DOT)
                    value = load_tile(z, where_z, into, y_live, OUT_WIDTH, DOT)
                y_0 = one
                y_c = cos
                y_s = sin
                y_d = one
                if REVERSE:
                    where_row = (row * x_heads * TIMES + which) * n + wide
                    y_d = load_scale(denominators, where_row, live, epsilon)
                    y_0 = y_d * still
                    y_c = y_d * wave * cos
                    y_s = y_d * wave * sin
                    delta = tl.load(deltas + where_row, mask=live, other=0.0)

                # Pairs within the chunk.
                score = multiply(left, tl.trans(right), PRECISION)
                kappa, plain = _kappa(x_0, x_c, x_s, x_d, y_0, y_c, y_s, y_d, STILL, WAVE, SHARED)
                if OUT:
                    total += tl.sum(tl.where(seen, score * plain, 0.0), axis=1)
                if GRADED:
                    extra = delta[None, :] if REVERSE else delta[:, None]
                    score = (score + extra) * kappa if SHARED else score * kappa + extra * plain
                else:
                    score = score * kappa
                mixed += multiply(narrow(tl.where(seen, score, 0.0), DOT), value, PRECISION)

                # The chunk joins the running sums.
                raw = value
                feature = right
                if GRADED:
                    raw = right
                    feature = value
                raw = tl.trans(raw)
                if STILL:
                    state_0 += multiply(raw, weighed(feature, y_0 * stays), PRECISION)
                if WAVE:
                    state_c += multiply(raw, weighed(feature, y_c * stays), PRECISION)
                    state_s += multiply(raw, weighed(feature, y_s * stays), PRECISION)
                if OUT or GRADED:
                    weight = stays
                    if REVERSE:
                        weight = stays * delta
                    if not SHARED:
                        sum_0 += column_sums(feature, weight * y_d)
                    if SHARED and STILL:
                        sum_0 += column_sums(feature, weight * y_0)
                    if SHARED and WAVE:
                        sum_c += column_sums(feature, weight * y_c)
                        sum_s += column_sums(feature, weight * y_s)

        if OUT:
            mixed = mixed / tl.maximum(total, epsilon)[:, None]
            where_row = (row * x_heads + head) * n + wide
            if split == 0:
                tl.store(denominators + where_row, total, mask=live)
        if GRADED:
            where_source = row * source_b + head * source_h + wide * source_n
            mixed = through_activation(mixed, source, where_source, into, x_live, RELU, OUT_WIDTH)
        if REVERSE:
            mixed = tl.where(keep[:, None], mixed, 0.0)
        to = out + (row * out_b + head * out_h + wide * out_n)[:, None] + into[None, :]
        tl.store(to, narrow(mixed, out.dtype.element_ty), mask=live[:, None] & (into < OUT_WIDTH)[None, :])


@triton.jit
def _documents(documents, documents_b, row, index, live, chunk, n, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The documents of a chunk; 1 for tokens that meet what lies behind it, for those that reach its far end, and for
    sums that do; else 0."""
    document = index
    enters = tl.full([BLOCK], 1.0, tl.float32)
    stays = enters
    goes_on = 1.0
    if documents is not None:
        of = documents + row * documents_b
        document = tl.load(of + index, mask=live, other=-1)
        if REVERSE:
            before = tl.load(of + tl.minimum((chunk + 1) * BLOCK, n - 1))
            after = tl.load(of + chunk * BLOCK)
        else:
            before = tl.load(of + tl.maximum(chunk * BLOCK - 1, 0))
            after = tl.load(of + tl.minimum((chunk + 1) * BLOCK, n) - 1)
        enters = (document == before).to(tl.float32)
        stays = (document == after).to(tl.float32)
        goes_on = (before == after).to(tl.float32)
    return document, enters, stays, goes_on


@triton.jit
def _kappa(
    x_0, x_c, x_s, x_d, y_0, y_c, y_s, y_d, STILL: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """κ of all pairs of a chunk, above and below the fraction."""
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
    """The part of the denominators that the running sums hold."""
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
def _through(left, state, GRADED: tl.constexpr, PRECISION: tl.constexpr):
    """x through the running sums, which lie (dv, d)."""
    state = narrow(state, left.dtype)
    if not GRADED:
        state = tl.trans(state)
    return multiply(left, state, PRECISION)


@triton.jit
def _load_states(
    states, at, row, column, STILL: tl.constexpr, WAVE: tl.constexpr, DV: tl.constexpr, D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sums Σ y⊗z with factors 1, cos, sin: `row` of the DV numbers that are no features, `column` of D features."""
    state_0 = tl.zeros([BLOCK_V, BLOCK_D], tl.float32)
    state_c = tl.zeros([BLOCK_V, BLOCK_D], tl.float32)
    state_s = tl.zeros([BLOCK_V, BLOCK_D], tl.float32)
    if states is not None:
        SIZE: tl.constexpr = DV * D
        where = states + at * (STILL + 2 * WAVE) * SIZE + row[:, None] * D + column[None, :]
        inside = (row < DV)[:, None] & (column < D)[None, :]
        if STILL:
            state_0 = tl.load(where, mask=inside, other=0.0)
        if WAVE:
            state_c = tl.load(where + STILL * SIZE, mask=inside, other=0.0)
            state_s = tl.load(where + (STILL + 1) * SIZE, mask=inside, other=0.0)
    return state_0, state_c, state_s


@triton.jit
def _load_sums(
    sums, at, column, STILL: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums Σ ψ before a segment."""
    sum_0 = tl.zeros([BLOCK], tl.float32)
    sum_c = tl.zeros([BLOCK], tl.float32)
    sum_s = tl.zeros([BLOCK], tl.float32)
    if sums is not None:
        COUNT: tl.constexpr = (STILL + 2 * WAVE) if SHARED else 1
        where = sums + at * COUNT * D + column
        if STILL or not SHARED:
            sum_0 = tl.load(where, mask=column < D, other=0.0)
        if WAVE and SHARED:
            sum_c = tl.load(where + STILL * D, mask=column < D, other=0.0)
            sum_s = tl.load(where + (STILL + 1) * D, mask=column < D, other=0.0)
    return sum_0, sum_c, sum_s


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
