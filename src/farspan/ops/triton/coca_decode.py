"""CoCA attention on a cache of un-rotated t: kernels, tile sizes, launch and torch op.

The score of a key at position p is Σ_j t_j (A_j cos pθ_j + B_j sin pθ_j), where A and B depend on the query alone
(docs/math.md). So the kernels read t once, at half the width of a rotated key. Keys come in tiles, p = p₀ + r:

- cos rθ and sin rθ for r = 0 … BLOCK_N-1 are the same in every tile and stay in registers.
- The angles of p₀ advance by BLOCK_N·θ per tile. Each step rounds a little, 4e-5 after a thousand tiles. So the kernels
  recompute them from the position every ANCHOR tiles.
- DIRECT computes each key's angles from its own position instead: for float32, and for keys at arbitrary positions.

Two kernels rotate the queries by p₀θ, and differ in how they multiply:

- `one_query_kernel`: one query per key head. Memory bandwidth is the only limit, so it computes in float32 without
  tensor cores, which would need sixteen queries and a rounded product of t.
- `few_queries_kernel`: up to eight rows (queries × heads of a group) per key head, on the short side of the products.
  More rows are faster on rotated keys (:mod:`farspan.ops.triton.coca_features` and SDPA).

The keys may be split among programs; `merge_kernel` combines their results.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspan.ops.device import cdiv, has_sound_wgmma, power_of_2
from farspan.ops.triton.angles import amplitudes, cos_sin, positions_of
from farspan.ops.triton.support import load_tile, narrow, padded, processors, product, row_major, row_stride

ANCHOR = tl.constexpr(1024)  # tiles from one exact base angle to the next
# Kernel arguments whose values should not cause another compilation.
VARYING = ["n", "m", "first", "splits", "sums_b", "sums_h", "sums_n"]


@triton.jit
def _locate(lengths, firsts, n, m, first, splits, BLOCK_N: tl.constexpr):
    """Return a program's batch row, key head and split, the position of key 0, the index of query 0 among the keys,
    and the keys to read, begin … end-1."""
    split = tl.program_id(0) % splits
    key_head = (tl.program_id(0) // splits).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    length = m
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + row), m).to(tl.int32)  # beyond m is another row's cache
    if firsts is not None:
        first = tl.load(firsts + row).to(tl.int64)
    tiles = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    begin = split * tiles * BLOCK_N
    return row, key_head, split, first, length - n, begin, tl.minimum(length, begin + tiles * BLOCK_N)


@triton.jit
def _load_amplitudes(where, inside, phase, scale, EXACT: tl.constexpr, HALF: tl.constexpr):
    """Return the amplitudes (A, B) of queries, times the scale; the phases are None without rotation."""
    a = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(where + HALF, mask=inside, other=0.0).to(tl.float32)
    left = a * a + b * b
    right = left
    if phase is not None:
        cos, sin = cos_sin(phase)
        left, right = amplitudes(a, b, cos, sin, EXACT)
    return left * scale, right * scale


@triton.jit
def _kept(padding, padding_b, row, key, end):
    """Return which keys exist and are not padding."""
    keep = key < end
    if padding is not None:
        keep = keep & (tl.load(padding + row * padding_b + key, mask=keep, other=0) != 0)
    return keep


@triton.jit
def _softmax_step(score, top, AXIS: tl.constexpr):
    """Return the weights of a tile, the new maximum of the scores, and the factor for the sums so far."""
    peak = tl.maximum(top, tl.max(score, axis=AXIS))
    safe = tl.where(peak == float("-inf"), 0.0, peak)  # no key so far
    below = safe if len(score.shape) == 1 else tl.expand_dims(safe, AXIS)
    return tl.exp2(score - below), peak, tl.exp2(top - safe)


@triton.jit
def _store_sums(sums, where, top, total, live):
    """Store what `merge_kernel` needs of a split. One logarithm of both would be rounded at the size of the scores."""
    if sums is not None:
        tl.store(sums + where, top, mask=live)
        tl.store(sums + where + 1, total, mask=live)


@triton.jit
def _rotate(left, right, cos, sin):
    """Rotate amplitudes (…, d/2), for keys counted from another position."""
    return left * cos + right * sin, right * cos - left * sin


@triton.jit(do_not_specialize=VARYING)
def one_query_kernel(
    q, t, v, out, sums, step, lengths, firsts, query_positions, key_positions, padding,
    scale, n, m, first, splits,
    q_b, q_h, q_n, t_b, t_g, t_m, v_b, v_g, v_m, out_b, out_h, out_n, out_s, sums_b, sums_h, sums_n,
    step_b, query_positions_b, key_positions_b, padding_b,
    EXACT: tl.constexpr, DIRECT: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend with one head's query to one split of its keys; n = GROUP = BLOCK_M = 1.

    `step` holds the frequencies (b|1, d/2); None means no rotation. `scale` includes log2(e), because the hardware
    computes 2^x. `sums` is None when there is one split. For other arguments see `DecodeCall`. Sums over keys stay
    apart until the end: one maximum per tile is all that its threads have to agree on.
    """
    row, head, split, first, index, begin, end = _locate(lengths, firsts, 1, m, first, splits, BLOCK_N)
    pair = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_V)
    offset = tl.arange(0, BLOCK_N)

    query_at = positions_of(query_positions, query_positions_b, row, 0, True, first + index)
    phase = None
    if step is not None:
        theta = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
        phase = query_at * theta
    left, right = _load_amplitudes(q + row * q_b + head * q_h + pair, pair < HALF, phase, scale, EXACT, HALF)
    now_left = left
    now_right = right
    if step is not None and not DIRECT:
        near_cos, near_sin = cos_sin(offset.to(tl.int64)[:, None] * theta[None, :])
        base_cos, base_sin = cos_sin((first + begin).to(tl.int64) * theta)
        next_cos, next_sin = cos_sin(BLOCK_N * theta)
        now_left, now_right = _rotate(left, right, base_cos, base_sin)

    top = float("-inf")
    total = tl.zeros([BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + offset
        keep = _kept(padding, padding_b, row, key, end)
        key_at = positions_of(key_positions, key_positions_b, row, key, keep, first)
        slot = key.to(tl.int64)
        coefficient = load_tile(t, row * t_b + head * t_g + slot * t_m, pair, keep, HALF).to(tl.float32)
        value = load_tile(v, row * v_b + head * v_g + slot * v_m, column, keep, WIDTH).to(tl.float32)

        if step is None:
            wave = left[None, :]
        elif DIRECT:
            key_cos, key_sin = cos_sin(key_at[:, None] * theta[None, :])
            wave = left[None, :] * key_cos + right[None, :] * key_sin
        else:
            wave = now_left[None, :] * near_cos + now_right[None, :] * near_sin
            if (start + BLOCK_N - begin) % (ANCHOR * BLOCK_N) == 0:
                base_cos, base_sin = cos_sin((first + start + BLOCK_N).to(tl.int64) * theta)
                now_left, now_right = _rotate(left, right, base_cos, base_sin)
            else:
                now_left, now_right = _rotate(now_left, now_right, next_cos, next_sin)
        score = tl.where(keep, tl.sum(coefficient * wave, axis=1), float("-inf"))
        weight, top, fade = _softmax_step(score, top, 0)
        total = total * fade + weight
        mixed = mixed * fade + weight[:, None] * value

    whole = tl.sum(total, axis=0)
    result = tl.sum(mixed, axis=0) / tl.where(whole > 0, whole, 1.0)
    where_out = out + row * out_b + head * out_h + split * out_s
    tl.store(where_out + column, narrow(result, out.dtype.element_ty), mask=column < WIDTH)
    _store_sums(sums, row * sums_b + head * sums_h + 2 * split, top, whole, True)


@triton.jit(do_not_specialize=VARYING)
def few_queries_kernel(
    q, t, v, out, sums, step, lengths, firsts, query_positions, key_positions, padding,
    scale, n, m, first, splits,
    q_b, q_h, q_n, t_b, t_g, t_m, v_b, v_g, v_m, out_b, out_h, out_n, out_s, sums_b, sums_h, sums_n,
    step_b, query_positions_b, key_positions_b, padding_b,
    EXACT: tl.constexpr, DIRECT: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend with all rows (query × head of a group, at most BLOCK_M) of one key head to one split of the keys.

    Arguments are those of `one_query_kernel`. Scores and results are transposed: keys or width first, rows second.

    A tensor core takes its first operand, 64 rows of it, from registers. So t is loaded there, multiplied by the cos
    and sin of r, and used in place; the few queries rotate by p₀θ. Only the queries, one maximum per tile and row, and
    the weights cross shared memory. Queries and weights enter as two numbers of their dtype, so that rounding costs
    nothing.
    """
    row, key_head, split, first, lead, begin, end = _locate(lengths, firsts, n, m, first, splits, BLOCK_N)
    pair = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_V)
    offset = tl.arange(0, BLOCK_N)

    rows = tl.arange(0, BLOCK_M)
    query = rows // GROUP
    head = key_head * GROUP + rows % GROUP
    live = query < n
    index = lead + query  # among the keys
    query_at = positions_of(query_positions, query_positions_b, row, query, live, first + lead)
    phase = None
    if step is not None:
        theta = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
        phase = query_at[:, None] * theta[None, :]
    where = q + row * q_b + head * q_h + query.to(tl.int64) * q_n
    inside = live[:, None] & (pair < HALF)[None, :]
    left, right = _load_amplitudes(where[:, None] + pair[None, :], inside, phase, scale, EXACT, HALF)
    now_left = left
    now_right = right
    if step is not None and not DIRECT:  # a split has at most ANCHOR tiles: advancing from here stays exact
        near_cos, near_sin = _tile_angles(theta, splits < 0, q.dtype.element_ty, BLOCK_N)
        next_cos, next_sin = cos_sin(BLOCK_N * theta)
        base_cos, base_sin = cos_sin((first + begin).to(tl.int64) * theta)
        now_left, now_right = _rotate(left, right, base_cos[None, :], base_sin[None, :])

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # sums over keys stay apart until the end
    spare: tl.constexpr = v.dtype.element_ty != tl.float32
    mixed = tl.zeros([BLOCK_V, 2 * BLOCK_M if spare else BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + offset
        keep = _kept(padding, padding_b, row, key, end)
        key_at = positions_of(key_positions, key_positions_b, row, key, keep, first)
        slot = key.to(tl.int64)
        coefficient = load_tile(t, row * t_b + key_head * t_g + slot * t_m, pair, keep, HALF)
        value = load_tile(v, row * v_b + key_head * v_g + slot * v_m, column, keep, WIDTH)

        if step is None:
            score = _score_product(coefficient, _two_parts(left, q.dtype.element_ty), BLOCK_M)
        elif DIRECT:
            key_cos, key_sin = cos_sin(key_at[:, None] * theta[None, :])
            score = _rotated_scores(coefficient, key_cos, key_sin, left, right)
        else:
            score = _rotated_scores(coefficient, near_cos, near_sin, now_left, now_right)
            now_left, now_right = _rotate(now_left, now_right, next_cos[None, :], next_sin[None, :])
        seen = (index[None, :] >= key[:, None]) & live[None, :] & keep[:, None]
        score = tl.where(seen, score, float("-inf"))
        weight, top, fade = _softmax_step(score, top, 0)
        total = total * fade[None, :] + weight
        mixed = _split_product(tl.trans(value), weight, _scaled(mixed, fade), spare)

    whole = tl.sum(total, axis=0)
    nonempty = whole > 0
    whole = tl.where(nonempty, whole, 1.0)
    where_out = out + row * out_b + head * out_h + query.to(tl.int64) * out_n + split * out_s
    tl.store(
        where_out[None, :] + column[:, None],
        narrow(_joined(mixed, BLOCK_M) / whole[None, :], out.dtype.element_ty),
        mask=(column < WIDTH)[:, None] & live[None, :],
    )
    where_sums = row * sums_b + head * sums_h + query.to(tl.int64) * sums_n + 2 * split
    _store_sums(sums, where_sums, top, tl.where(nonempty, whole, 0.0), live)


@triton.jit
def _tile_angles(theta, never, dtype: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return cos and sin (BLOCK_N, d/2) of the keys of a tile, in registers as a product leaves its result.

    That is how the next product takes t. Computed directly, they would wait in shared memory and be read again for
    each tile. Hence a product, of zeros that the compiler cannot know to be zeros.
    """
    zeros = tl.full([BLOCK_N, 16], 0.0, tl.float32) + tl.where(never, 1.0, 0.0)
    ones = tl.full([16, theta.shape[0]], 1.0, tl.float32)
    zero = product(zeros.to(dtype), ones.to(dtype), tl.zeros([BLOCK_N, theta.shape[0]], tl.float32))
    offset = tl.arange(0, BLOCK_N)[:, None] + zero.to(tl.int32)
    return cos_sin(offset.to(tl.int64) * theta[None, :])


@triton.jit
def _rotated_scores(coefficient, cos, sin, left, right):
    """Return scores (keys, rows) of t (keys, d/2) at angles (cos, sin) and amplitudes (rows, d/2) of queries."""
    dtype: tl.constexpr = coefficient.dtype
    wide = coefficient.to(tl.float32)
    keys = _beside(narrow(wide * cos, dtype), narrow(wide * sin, dtype))
    # Side by side last: then they are stored, and read by the product, along the width.
    if dtype == tl.float32:  # summed apart: one chain of d additions rounds off twice as much as two
        wave = _above(_beside(left, tl.zeros_like(left)), _beside(tl.zeros_like(right), right))
    else:
        wave = _beside(_two_parts(left, dtype), _two_parts(right, dtype))
    return _score_product(keys, wave, left.shape[0])


@triton.jit
def _two_parts(wave, dtype: tl.constexpr):
    """Convert float32 amplitudes (rows, ·) to a dtype: rounded, and below them (2·rows, ·) what rounding lost."""
    near = narrow(wave, dtype)
    if dtype != tl.float32:
        near = _above(near, narrow(wave - near.to(tl.float32), dtype))
    return near


@triton.jit
def _score_product(keys, wave, ROWS: tl.constexpr):
    """Return scores (keys, rows) of keys (·, d) and amplitudes in parts, which are summed."""
    return _joined(product(keys, tl.trans(wave), tl.zeros([keys.shape[0], wave.shape[0]], tl.float32)), ROWS)


@triton.jit
def _split_product(x, y, add, SPLIT: tl.constexpr):
    """Compute add + x·y for float32 y (·, rows); with SPLIT add + x·[y, what rounding it lost], see `_joined`."""
    near = narrow(y, x.dtype)
    if SPLIT:
        near = _beside(near, narrow(y - near.to(tl.float32), x.dtype))
    if x.dtype == tl.float32:
        # One chain of all keys' additions would round off more. Triton would fold a plain sum into the product, and
        # make that chain of it; `_joined` (of one part) prevents that.
        return add + _joined(product(x, near, tl.zeros_like(add)), y.shape[1])
    return product(x, near, add)


@triton.jit
def _joined(x, ROWS: tl.constexpr):
    """Add up the parts of a split product, (·, parts·rows) → (·, rows)."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // ROWS, ROWS]), axis=1)


@triton.jit
def _scaled(x, by):
    """Multiply each row of queries in a split product by its own number."""
    rows: tl.constexpr = by.shape[0]
    parts = tl.reshape(x, [x.shape[0], x.shape[1] // rows, rows])
    return tl.reshape(parts * by[None, None, :], [x.shape[0], x.shape[1]])


@triton.jit
def _beside(x, y):
    """Join two tiles (r, c) to one (r, 2c)."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def _above(x, y):
    """Join two tiles (r, c) to one (2r, c), x on top."""
    return tl.reshape(tl.permute(tl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@triton.jit(do_not_specialize=["n", "splits", "sums_b", "sums_h", "sums_n"])
def merge_kernel(
    parts, sums, out, n, splits, part_b, part_h, part_n, part_s, sums_b, sums_h, sums_n, out_b, out_h, out_n,
    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Average the splits of one query and head, weighted by the largest score of each and its sum of weights."""
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
    where_out = out + row * out_b + head * out_h + query * out_n + column
    tl.store(where_out, narrow(mixed, out.dtype.element_ty), mask=column < WIDTH)


LOG2_E = 1.4426950408889634
# Programs per processor that splitting the keys aims at: enough to even out their ends. Few queries have larger ones.
WAVES, FEW_WAVES = 8, 4
MOST_SPLITS = 128
SPLIT_TILES = 8  # fewest tiles worth a program of their own


class Cut(NamedTuple):
    """Tile sizes of a launch; `rows` is 1 for the kernel of one query."""

    rows: int
    keys: int
    warps: int
    stages: int
    waves: int = 0  # programs per processor that splitting aims at; 0 = the default of the kernel


# By d/2 rounded up to a power of two. For one query, 32 and 64 are the fastest of a sweep on an H200.
ALONE = {16: Cut(1, 64, 1, 2), 32: Cut(1, 16, 1, 4), 64: Cut(1, 16, 1, 3), 128: Cut(1, 16, 2, 2)}
# With fewer than four warps Triton keeps to mma.sync.
FEW = {16: Cut(8, 32, 2, 3), 32: Cut(8, 64, 2, 2), 64: Cut(8, 32, 2, 3), 128: Cut(8, 16, 2, 2)}
# With ptxas 12.9 or later: 12.8 builds the descriptors of this kernel's wgmma from registers
# that hold something else. The fastest of a sweep on an H200 at four waves, nearly twice as fast as FEW; with two
# waves, 64 is faster still in groups of four. Other widths have not been checked on a GPU.
FEW_BY_WGMMA = {32: Cut(8, 64, 4, 3), 64: Cut(8, 64, 4, 3, waves=2)}


def choose_cut(rows: int, half: int, width: int, dtype: torch.dtype) -> Cut:
    """Return the tile sizes for `rows` queries per key head, t of width `half` and values of `width`."""
    size = max(padded(half), padded(width) // 2)
    if rows == 1:
        return ALONE[size]
    cut = FEW_BY_WGMMA[size] if size in FEW_BY_WGMMA and has_sound_wgmma() else FEW[size]
    return Cut(cut.rows, min(cut.keys, 32), cut.warps, 2) if dtype == torch.float32 else cut


def choose_splits(programs: int, keys: int, cut: Cut, processors: int) -> int:
    """Return into how many parts to split the keys, when `programs` cover the queries.

    >>> cut = Cut(8, 64, 4, 3)
    >>> choose_splits(8, 32_768, cut, 132), choose_splits(8, 200, cut, 132), choose_splits(1024, 32_768, cut, 132)
    (64, 1, 1)
    """
    useful = max(1, cdiv(keys, cut.keys) // SPLIT_TILES)
    wanted = processors * (cut.waves or (WAVES if cut.rows == 1 else FEW_WAVES)) // programs
    return max(1, min(wanted, useful, MOST_SPLITS))


class DecodeCall(NamedTuple):
    """One call of the kernels. The queries are the last n of each row's keys, at most eight per key head."""

    q: Tensor  # (b, h, n, d)
    t: Tensor  # (b, g, m, d/2)
    v: Tensor  # (b, g, m, dv)
    step: Tensor | None  # frequencies (b|1, d/2) of farspan.ops.rotary.fixed_point; None = no rotation
    lengths: Tensor | None  # (b), keys per row; None = m
    firsts: Tensor | None  # (b), position of key 0 per row; None = `first`
    query_positions: Tensor | None  # (b|1, n); None = counted from key 0
    key_positions: Tensor | None  # (b|1, m); likewise
    padding: Tensor | None  # (b|1, m) bool, True = keep
    first: int
    form: str  # "exact" or "slack"
    scale: float


def launch(call: DecodeCall, cut: Cut | None = None, splits: int | None = None) -> Tensor:
    """Run the kernels; benchmarks and tests pass tiles and splits of their own."""
    q, t, v = (row_major(x) for x in (call.q, call.t, call.v))
    (b, h, n, d), (g, m), width = q.shape, t.shape[1:3], v.shape[-1]
    cut = cut or choose_cut(n * (h // g), d // 2, width, q.dtype)
    splits = splits or choose_splits(b * g, m, cut, processors(q.device))
    if cut.rows == 1:  # its loop has no product, and Triton pipelines such a loop only where the loop asks for it
        kernel, stages = one_query_kernel, {"STAGES": cut.stages}
    else:  # its kernel computes one base angle per split
        kernel, stages = few_queries_kernel, {"num_stages": cut.stages}
        splits = max(splits, cdiv(cdiv(m, cut.keys), ANCHOR.value))
    out = torch.empty((b, n, h, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    parts: Tensor = out.unsqueeze(3)
    sums: Tensor | None = None
    if splits > 1:
        parts = torch.empty((b, h, n, splits, width), dtype=torch.float32, device=q.device)
        sums = torch.empty((b, h, n, splits, 2), dtype=torch.float32, device=q.device)
    sums_strides = (0, 0, 0) if sums is None else sums.stride()[:3]
    lengths, firsts = (x if x is None else x.contiguous() for x in (call.lengths, call.firsts))
    padding = None if call.padding is None else call.padding.view(torch.uint8)
    given = (call.step, call.query_positions, call.key_positions, padding)
    step, query_positions, key_positions, padding = (x if x is None else row_major(x) for x in given)
    with torch.cuda.device_of(q):
        kernel[(g * splits, b)](
            q, t, v, parts, sums, step, lengths, firsts, query_positions, key_positions, padding,
            call.scale * LOG2_E, n, m, call.first, splits,
            *q.stride()[:3], *t.stride()[:3], *v.stride()[:3], *parts.stride()[:4], *sums_strides,
            *(row_stride(x) for x in (step, query_positions, key_positions, padding)),
            EXACT=call.form == "exact", DIRECT=key_positions is not None or q.dtype == torch.float32,
            GROUP=h // g, HALF=d // 2, WIDTH=width, BLOCK_M=cut.rows, BLOCK_N=cut.keys, BLOCK_D=padded(d // 2),
            BLOCK_V=padded(width), num_warps=cut.warps, **stages,
        )  # fmt: skip
        if sums is not None:
            merge_kernel[(h * n, b)](
                parts, sums, out, n, splits, *parts.stride()[:4], *sums_strides, *out.stride()[:3],
                WIDTH=width, BLOCK_S=power_of_2(splits), BLOCK_V=padded(width), num_warps=4,
            )  # fmt: skip
    return out


@torch.library.custom_op(
    "farspan::half_width_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor t, Tensor v, Tensor? step, Tensor? lengths, Tensor? firsts, Tensor? query_positions, "
    "Tensor? key_positions, Tensor? padding, int first, str form, float scale) -> Tensor",
)
def decode_op(*arguments: Any) -> Tensor:
    """Attend with the queries of a :class:`DecodeCall`, given field by field; return (b, h, n, dv)."""
    return launch(DecodeCall(*arguments))


@decode_op.register_fake
def _(q: Tensor, t: Tensor, v: Tensor, *rest: object) -> Tensor:
    b, h, n, _ = q.shape
    return q.new_empty((b, n, h, v.shape[-1])).transpose(1, 2)
