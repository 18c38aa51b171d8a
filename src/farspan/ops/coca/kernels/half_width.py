"""Prefill on un-rotated t, read once at half width; and what the kernels for decoding share with it.

score(n) = Σ_j t_j (A_j cos nθ_j + B_j sin nθ_j). Keys come in tiles, n = n₀ + r. The waves of r = 0 … BLOCK_N-1 are the
same in every tile and stay in registers; those of n₀ turn on by BLOCK_N·θ from tile to tile. That rounds a little each
time (4e-5 after a thousand tiles), so every ANCHOR tiles they are found from the position again, or another program
goes on. Many queries leave the turn by n₀θ to the keys; few (decoding) take it themselves. Where that would show
(DIRECT: keys placed freely, or float32), each key's waves are found from its own position.
"""

import triton
import triton.language as tl

from farspan.ops.coca.kernels.angles import cos_sin, places, waves
from farspan.ops.kernels.narrow import narrow, product

ANCHOR = tl.constexpr(1024)
"""Tiles from one exact base angle to the next."""


@triton.jit(
    do_not_specialize=[
        "n", "m", "first", "behind", "window", "splits", "sums_b", "sums_h", "sums_n", "t_scale_b", "t_scale_g"
    ]
)  # fmt: skip
def half_width_kernel(
    q, t, t_scale, v, out, sums, step, lengths, firsts, query_positions, key_positions, padding, pages,
    scale, n, m, first, behind, window, splits,
    q_b, q_h, q_n, t_b, t_g, t_m, t_scale_b, t_scale_g, t_scale_m, v_b, v_g, v_m,
    out_b, out_h, out_n, out_s, sums_b, sums_h, sums_n,
    step_b, query_positions_b, key_positions_b, padding_b, pages_b,
    EXACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_POSITION: tl.constexpr, DIRECT: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows (query × head of a group) of one key head against one split of the keys.

    `scale` carries log2(e), because 2^x is what the hardware has. With `t_scale`, t holds codes of eight bits, exact in
    q's dtype, which is that of the products; each key's scores are multiplied by its scale.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1) % splits
    key_head = (tl.program_id(1) // splits).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    query = rows // GROUP
    head = key_head * GROUP + rows % GROUP
    live = query < n
    pair = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_V)
    near = tl.arange(0, BLOCK_N)

    length = m
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + row), m).to(tl.int32)  # beyond m lies another row's cache
    if firsts is not None:
        first = tl.load(firsts + row).to(tl.int64)
    lead = length - n - behind  # index of query 0 among the keys
    index = lead + query
    asks = live
    if not BY_POSITION:
        asks = live & (index >= 0)  # a query before the first key is written, as zeros
    low, high = key_range(lead, n, length, window, tl.program_id(0), CAUSAL, WINDOW, BY_POSITION, GROUP, BLOCK_M)
    tiles = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), splits)
    begin = low + split * tiles * BLOCK_N
    end = tl.minimum(high, begin + tiles * BLOCK_N)

    where_q = q + row * q_b + head * q_h + query.to(tl.int64) * q_n
    inside = live[:, None] & (pair < HALF)[None, :]
    a = tl.load(where_q[:, None] + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(where_q[:, None] + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    if step is not None:
        turn = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
        if query_positions is None:
            at = (first + index).to(tl.int64)
        else:
            at = places(query_positions, query_positions_b, row, query, live, first)
        query_cos, query_sin = cos_sin(at[:, None] * turn[None, :])
        left, right = waves(a, b, query_cos, query_sin, EXACT)
        near_cos, near_sin = cos_sin(near.to(tl.int64)[:, None] * turn[None, :])
    else:
        left = a * a + b * b
        right = left
    left = left * scale
    right = right * scale
    if q.dtype.element_ty == tl.float16:  # squares leave float16's range: give each row a size of its own
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(left), tl.abs(right)), axis=1), 1e-30)
        left = left * (1024.0 / largest)[:, None]
        right = right * (1024.0 / largest)[:, None]
    fixed_left = narrow(left, q.dtype.element_ty)
    fixed_right = narrow(right, q.dtype.element_ty)

    if step is not None and not DIRECT:
        base_cos, base_sin = cos_sin((first + begin).to(tl.int64) * turn)
        on_cos, on_sin = cos_sin(BLOCK_N * turn)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + near
        keep = key < end
        if padding is not None:
            keep = keep & (tl.load(padding + row * padding_b + key, mask=keep, other=0) != 0)
        block, slot = key_slots(pages, pages_b, row, key, end, PAGE)
        where_t = block * t_b + key_head * t_g + slot * t_m
        where_v = block * v_b + key_head * v_g + slot * v_m
        coefficient = tile(t, where_t, pair, keep, HALF)
        value = tile(v, where_v, column, keep, WIDTH)
        if t_scale is not None:
            where_scale = block * t_scale_b + key_head * t_scale_g + slot * t_scale_m
            unit = tl.load(t_scale + where_scale, mask=keep, other=0.0)

        if step is None:
            score = product(fixed_left, tl.trans(exactly(coefficient, q.dtype.element_ty)), nothing)
        else:
            wide = coefficient.to(tl.float32)
            if t.dtype.element_ty == tl.float16:  # and each tile of t; codes are never large
                ceiling = tl.maximum(tl.max(tl.max(tl.abs(wide), axis=1), axis=0), 1e-30)
                wide = wide * (1024.0 / ceiling)
            if DIRECT:
                key_at = places(key_positions, key_positions_b, row, key, keep, first)
                key_cos, key_sin = cos_sin(key_at[:, None] * turn[None, :])
            else:
                key_cos = base_cos[None, :] * near_cos - base_sin[None, :] * near_sin
                key_sin = base_sin[None, :] * near_cos + base_cos[None, :] * near_sin
            even = narrow(wide * key_cos, q.dtype.element_ty)
            odd = narrow(wide * key_sin, q.dtype.element_ty)
            score = product(fixed_left, tl.trans(even), nothing)
            score = product(fixed_right, tl.trans(odd), score)
            if not DIRECT:
                if anchored(start + BLOCK_N - begin, BLOCK_N):
                    base_cos, base_sin = cos_sin((first + start + BLOCK_N).to(tl.int64) * turn)
                else:
                    base_cos, base_sin = base_cos * on_cos - base_sin * on_sin, base_sin * on_cos + base_cos * on_sin
            if t.dtype.element_ty == tl.float16:
                score = score * (ceiling * (1.0 / 1024.0))
        if q.dtype.element_ty == tl.float16:
            score = score * (largest * (1.0 / 1024.0))[:, None]
        if t_scale is not None:
            score = score * unit[None, :]

        if BY_POSITION:
            asker = places(query_positions, query_positions_b, row, query, live, first)
            asked = places(key_positions, key_positions_b, row, key, keep, first)
            seen = sees(asker[:, None] - asked[None, :], window, CAUSAL, WINDOW)
        else:
            seen = sees(index[:, None] - key[None, :], window, CAUSAL, WINDOW)
        score = tl.where(seen & asks[:, None] & keep[None, :], score, float("-inf"))

        peak = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)  # a row that has seen nothing yet
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weight, axis=1)
        mixed = product(narrow(weight, v.dtype.element_ty), value, mixed * fade[:, None])
        top = peak

    sighted = total > 0
    mixed = mixed * tl.where(sighted, 1.0 / tl.where(sighted, total, 1.0), 0.0)[:, None]
    where_out = out + row * out_b + head * out_h + query.to(tl.int64) * out_n + split * out_s
    tl.store(
        where_out[:, None] + column[None, :],
        narrow(mixed, out.dtype.element_ty),
        mask=live[:, None] & (column < WIDTH)[None, :],
    )
    if sums is not None:
        where_sums = sums + row * sums_b + head * sums_h + query.to(tl.int64) * sums_n + 2 * split
        tl.store(where_sums, top, mask=live)
        tl.store(where_sums + 1, tl.where(sighted, total, 0.0), mask=live)


@triton.jit
def anchored(done, BLOCK_N: tl.constexpr):
    """Whether the next tile, after `done` keys, finds its base angle from its position."""
    return done % (ANCHOR * BLOCK_N) == 0


@triton.jit
def turned(left, right, cos, sin):
    """Waves of queries (…, d/2), for keys counted from elsewhere."""
    return left * cos + right * sin, right * cos - left * sin


@triton.jit
def key_slots(pages, pages_b, row, key, end, PAGE: tl.constexpr):
    """Where keys lie: (row, index), or with a block table (page, place in it)."""
    if PAGE > 0:
        return tl.load(pages + row * pages_b + key // PAGE, mask=key < end, other=0).to(tl.int64), key % PAGE
    else:
        return row, key.to(tl.int64)


@triton.jit
def tile(x, where, column, keep, WIDTH: tl.constexpr):
    """Rows of x that start at `where`; zeros for those not kept, whatever memory holds there."""
    return tl.load(x + where[:, None] + column[None, :], mask=keep[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def exactly(coefficient, dtype: tl.constexpr):
    """A tile of t in the products' dtype: as it is, or its codes, whole numbers up to 255, which every dtype holds."""
    if coefficient.dtype != dtype:
        coefficient = narrow(coefficient.to(tl.float32), dtype)
    return coefficient


@triton.jit
def sees(distance, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a query sees a key that lies `distance` back."""
    seen = distance == distance
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW:
        seen = seen & (distance < window) & (distance > -window)
    return seen


@triton.jit
def key_range(
    lead, n, length, window, block,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_POSITION: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Keys low … high-1 that some query of the block can see, from the index alone."""
    low = 0
    high = length
    if not BY_POSITION:
        foremost = lead + block * BLOCK_M // GROUP
        last = lead + tl.minimum(n - 1, (block * BLOCK_M + BLOCK_M - 1) // GROUP)
        if WINDOW:
            low = tl.maximum(0, foremost - window + 1)
            high = tl.minimum(high, last + window)
        if CAUSAL:
            high = tl.minimum(high, last + 1)
    return low, high


@triton.jit(do_not_specialize=["n", "splits", "sums_b", "sums_h", "sums_n"])
def merge_kernel(
    parts, sums, out, n, splits, part_b, part_h, part_n, part_s, sums_b, sums_h, sums_n, out_b, out_h, out_n,
    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: the splits of one query and head, weighted by what each has seen: its largest score, and the sum of
    its weights beside that. One logarithm of both would be rounded at the size of the scores."""
    query = (tl.program_id(0) % n).to(tl.int64)
    head = (tl.program_id(0) // n).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_V)
    where_sums = sums + row * sums_b + head * sums_h + query * sums_n + 2 * split
    top = tl.load(where_sums, mask=split < splits, other=float("-inf"))
    size = tl.load(where_sums + 1, mask=split < splits, other=0.0)
    peak = tl.max(top, axis=0)
    weight = size * tl.exp2(top - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight, axis=0)
    part = tl.load(
        parts + row * part_b + head * part_h + query * part_n + split[:, None] * part_s + column[None, :],
        mask=(split < splits)[:, None] & (column < WIDTH)[None, :],
        other=0.0,
    )
    mixed = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out + row * out_b + head * out_h + query * out_n + column,
        narrow(mixed, out.dtype.element_ty),
        mask=column < WIDTH,
    )
