"""Decoding with a few queries a key head (grouped heads, several new tokens): keys on the long side of the products.

A tensor core takes its first operand, 64 rows of it, from registers: t is read there, multiplied by the waves of
r = 0 … BLOCK_N-1, which are the same in every tile n = n₀ + r, and used where it is. The queries, few, take the turn by
n₀θ themselves. All that crosses shared memory on the way is they, one maximum a tile and row, and the weights. So
that rounding them costs nothing, queries go in as two numbers of their dtype; and so do weights, while there are at
most eight of them: sixteen columns cost little more.
"""

import triton
import triton.language as tl

from farspan.ops.coca.kernels.angles import cos_sin, places, waves
from farspan.ops.coca.kernels.half_width import exactly, key_range, key_slots, sees, tile, turned
from farspan.ops.kernels.narrow import narrow, product


@triton.jit(
    do_not_specialize=[
        "n", "m", "first", "behind", "window", "splits", "sums_b", "sums_h", "sums_n", "t_scale_b", "t_scale_g"
    ]
)  # fmt: skip
def few_queries_kernel(
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

    Arguments are those of `half_width_kernel`. Scores and results stand transposed: keys or width first, rows second.
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
    left = a * a + b * b
    right = left
    if step is not None:
        turn = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
        if query_positions is None:
            at = (first + index).to(tl.int64)
        else:
            at = places(query_positions, query_positions_b, row, query, live, first)
        query_cos, query_sin = cos_sin(at[:, None] * turn[None, :])
        left, right = waves(a, b, query_cos, query_sin, EXACT)
        if not DIRECT:
            near_cos, near_sin = near_waves(turn, splits < 0, q.dtype.element_ty, BLOCK_N)
            on_cos, on_sin = cos_sin(BLOCK_N * turn)
            base_cos, base_sin = cos_sin((first + begin).to(tl.int64) * turn)
    left = left * scale
    right = right * scale
    if q.dtype.element_ty == tl.float16:  # squares leave float16's range: give each row a size of its own
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(left), tl.abs(right)), axis=1), 1e-30)
        left = left * (1024.0 / largest)[:, None]
        right = right * (1024.0 / largest)[:, None]
    now_left = left
    now_right = right
    if step is not None and not DIRECT:  # a split has at most ANCHOR tiles: turned on from here, they stay exact
        now_left, now_right = turned(left, right, base_cos[None, :], base_sin[None, :])

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # sums over keys stay apart until the end
    spare: tl.constexpr = BLOCK_M < 16 and v.dtype.element_ty != tl.float32
    mixed = tl.zeros([BLOCK_V, 2 * BLOCK_M if spare else BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + near
        keep = key < end
        if padding is not None:
            keep = keep & (tl.load(padding + row * padding_b + key, mask=keep, other=0) != 0)
        block, slot = key_slots(pages, pages_b, row, key, end, PAGE)
        coefficient = tile(t, block * t_b + key_head * t_g + slot * t_m, pair, keep, HALF)
        value = tile(v, block * v_b + key_head * v_g + slot * v_m, column, keep, WIDTH)
        if t_scale is not None:
            where_scale = block * t_scale_b + key_head * t_scale_g + slot * t_scale_m
            unit = tl.load(t_scale + where_scale, mask=keep, other=0.0)

        if step is None:
            coefficient = exactly(coefficient, q.dtype.element_ty)
            score = score_product(coefficient, two_parts(left, q.dtype.element_ty), BLOCK_M)
        elif DIRECT:
            key_at = places(key_positions, key_positions_b, row, key, keep, first)
            key_cos, key_sin = cos_sin(key_at[:, None] * turn[None, :])
            score = turned_scores(coefficient, key_cos, key_sin, left, right, q.dtype.element_ty)
        else:
            score = turned_scores(coefficient, near_cos, near_sin, now_left, now_right, q.dtype.element_ty)
            now_left, now_right = turned(now_left, now_right, on_cos[None, :], on_sin[None, :])
        if q.dtype.element_ty == tl.float16:
            score = score * (largest * (1.0 / 1024.0))[None, :]
        if t_scale is not None:
            score = score * unit[:, None]

        if BY_POSITION:
            asker = places(query_positions, query_positions_b, row, query, live, first)
            asked = places(key_positions, key_positions_b, row, key, keep, first)
            seen = sees(asker[None, :] - asked[:, None], window, CAUSAL, WINDOW)
        else:
            seen = sees(index[None, :] - key[:, None], window, CAUSAL, WINDOW)
        score = tl.where(seen & asks[None, :] & keep[:, None], score, float("-inf"))

        peak = tl.maximum(top, tl.max(score, axis=0))
        safe = tl.where(peak == float("-inf"), 0.0, peak)  # a row that has seen nothing yet
        weight = tl.exp2(score - safe[None, :])
        fade = tl.exp2(top - safe)
        total = total * fade[None, :] + weight
        mixed = split_product(tl.trans(value), weight, scaled(mixed, fade), spare)
        top = peak

    whole = tl.sum(total, axis=0)
    sighted = whole > 0
    whole = tl.where(sighted, whole, 1.0)
    where_out = out + row * out_b + head * out_h + query.to(tl.int64) * out_n + split * out_s
    tl.store(
        where_out[None, :] + column[:, None],
        narrow(joined(mixed, BLOCK_M) / whole[None, :], out.dtype.element_ty),
        mask=(column < WIDTH)[:, None] & live[None, :],
    )
    if sums is not None:
        where_sums = sums + row * sums_b + head * sums_h + query.to(tl.int64) * sums_n + 2 * split
        tl.store(where_sums, top, mask=live)
        tl.store(where_sums + 1, tl.where(sighted, whole, 0.0), mask=live)


@triton.jit
def near_waves(turn, never, dtype: tl.constexpr, BLOCK_N: tl.constexpr):
    """cos and sin (BLOCK_N, d/2) of the keys of a tile, lying in registers as a product leaves its result.

    That is how the next product takes t. Made from nothing, they would wait in shared memory and be read again for
    each tile; hence a product, of zeros that the compiler cannot know to be zeros.
    """
    zeros = tl.full([BLOCK_N, 16], 0.0, tl.float32) + tl.where(never, 1.0, 0.0)
    ones = tl.full([16, turn.shape[0]], 1.0, tl.float32)
    zero = product(zeros.to(dtype), ones.to(dtype), tl.zeros([BLOCK_N, turn.shape[0]], tl.float32))
    near = tl.arange(0, BLOCK_N)[:, None] + zero.to(tl.int32)
    return cos_sin(near.to(tl.int64) * turn[None, :])


@triton.jit
def turned_scores(coefficient, cos, sin, left, right, dtype: tl.constexpr):
    """Scores (keys, rows) of keys t (keys, d/2) that stand at (cos, sin), and waves (rows, d/2) of queries."""
    wide = coefficient.to(tl.float32)
    if coefficient.dtype == tl.float16:  # as with the queries: each tile has a size of its own; codes are never large
        ceiling = tl.maximum(tl.max(tl.max(tl.abs(wide), axis=1), axis=0), 1e-30)
        wide = wide * (1024.0 / ceiling)
    keys = beside(narrow(wide * cos, dtype), narrow(wide * sin, dtype))
    # Side by side last: then they are stored, and read by the product, along the width.
    if dtype == tl.float32:  # summed apart: one chain of d additions rounds off twice as much as two
        wave = above(beside(left, tl.zeros_like(left)), beside(tl.zeros_like(right), right))
    else:
        wave = beside(two_parts(left, dtype), two_parts(right, dtype))
    score = score_product(keys, wave, left.shape[0])
    if coefficient.dtype == tl.float16:
        score = score * (ceiling * (1.0 / 1024.0))
    return score


@triton.jit
def two_parts(wave, dtype: tl.constexpr):
    """float32 waves (rows, ·) in a dtype: rounded, and below them (2·rows, ·) what rounding lost, if anything."""
    near = narrow(wave, dtype)
    if dtype != tl.float32:
        near = above(near, narrow(wave - near.to(tl.float32), dtype))
    return near


@triton.jit
def score_product(keys, wave, ROWS: tl.constexpr):
    """Scores (keys, rows) of keys (·, d) and waves in parts, which are summed."""
    return joined(product(keys, tl.trans(wave), tl.zeros([keys.shape[0], wave.shape[0]], tl.float32)), ROWS)


@triton.jit
def split_product(x, y, add, SPLIT: tl.constexpr):
    """add + x·y for float32 y (·, rows), or with SPLIT add + x·[y, what rounding it lost], which `joined` adds up."""
    near = narrow(y, x.dtype)
    if SPLIT:
        near = beside(near, narrow(y - near.to(tl.float32), x.dtype))
    if x.dtype == tl.float32:  # one chain of all keys' additions would round off more. A plain sum Triton would take
        # for what the product is to be added to, and make that chain of it; `joined` (of one part) is in its way
        return add + joined(product(x, near, tl.zeros_like(add)), y.shape[1])
    return product(x, near, add)


@triton.jit
def joined(x, ROWS: tl.constexpr):
    """(·, rows) from a split product."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // ROWS, ROWS]), axis=1)


@triton.jit
def scaled(x, by):
    """A split product, each row of queries times a number of its own."""
    rows: tl.constexpr = by.shape[0]
    parts = tl.reshape(x, [x.shape[0], x.shape[1] // rows, rows])
    return tl.reshape(parts * by[None, None, :], [x.shape[0], x.shape[1]])


@triton.jit
def beside(x, y):
    """Two tiles (r, c) as one (r, 2c)."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def above(x, y):
    """Two tiles (r, c) as one (2r, c), x on top."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])
