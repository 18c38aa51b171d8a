"""Decoding with one query a key head: memory is all that counts, so everything but memory is float32.

Tensor cores would want sixteen queries, and t rounded after its turn. Here each weight A_j cos nθ_j + B_j sin nθ_j is
made where it is used, and t is read as it is cached. Sums over keys stay apart until the end: one maximum a tile is
all that its threads have to agree on.
"""

import triton
import triton.language as tl

from farspan.ops.coca.kernels.angles import cos_sin, places, waves
from farspan.ops.coca.kernels.half_width import anchored, key_range, key_slots, sees, tile, turned
from farspan.ops.kernels.narrow import narrow


@triton.jit(
    do_not_specialize=["m", "first", "behind", "window", "splits", "sums_b", "sums_h", "t_scale_b", "t_scale_g"]
)
def one_query_kernel(
    q, t, t_scale, v, out, sums, step, lengths, firsts, query_positions, key_positions, padding, pages,
    scale, m, first, behind, window, splits,
    q_b, q_h, t_b, t_g, t_m, t_scale_b, t_scale_g, t_scale_m, v_b, v_g, v_m, out_b, out_h, out_s, sums_b, sums_h,
    step_b, query_positions_b, key_positions_b, padding_b, pages_b,
    EXACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BY_POSITION: tl.constexpr, DIRECT: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: one head's query against one split of its keys; arguments as in `half_width_kernel`."""
    split = tl.program_id(1) % splits
    head = (tl.program_id(1) // splits).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    pair = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_V)
    near = tl.arange(0, BLOCK_N)

    length = m
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + row), m).to(tl.int32)
    if firsts is not None:
        first = tl.load(firsts + row).to(tl.int64)
    index = length - 1 - behind
    low, high = key_range(index, 1, length, window, 0, CAUSAL, WINDOW, BY_POSITION, 1, 1)
    if not BY_POSITION:
        high = tl.where(index < 0, low, high)  # a query before the first key is written, as zeros
    tiles = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), splits)
    begin = low + split * tiles * BLOCK_N
    end = tl.minimum(high, begin + tiles * BLOCK_N)

    where_q = q + row * q_b + head * q_h
    a = tl.load(where_q + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    b = tl.load(where_q + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    left = a * a + b * b
    right = left
    if step is not None:
        turn = tl.load(step + row * step_b + pair, mask=pair < HALF, other=0)
        at = places(query_positions, query_positions_b, row, 0, True, first + index)
        query_cos, query_sin = cos_sin(at * turn)
        left, right = waves(a, b, query_cos, query_sin, EXACT)
        if not DIRECT:
            near_cos, near_sin = cos_sin(near.to(tl.int64)[:, None] * turn[None, :])
            base_cos, base_sin = cos_sin((first + begin).to(tl.int64) * turn)
            on_cos, on_sin = cos_sin(BLOCK_N * turn)
    left = left * scale
    right = right * scale
    now_left = left
    now_right = right
    if step is not None and not DIRECT:
        now_left, now_right = turned(left, right, base_cos, base_sin)

    top = float("-inf")
    total = tl.zeros([BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        key = start + near
        keep = key < end
        if padding is not None:
            keep = keep & (tl.load(padding + row * padding_b + key, mask=keep, other=0) != 0)
        block, slot = key_slots(pages, pages_b, row, key, end, PAGE)
        where_t = block * t_b + head * t_g + slot * t_m
        where_v = block * v_b + head * v_g + slot * v_m
        coefficient = tile(t, where_t, pair, keep, HALF).to(tl.float32)
        value = tile(v, where_v, column, keep, WIDTH).to(tl.float32)
        if t_scale is not None:
            where_scale = block * t_scale_b + head * t_scale_g + slot * t_scale_m
            unit = tl.load(t_scale + where_scale, mask=keep, other=0.0)

        if step is None:
            weight = left[None, :]
        elif DIRECT:
            key_at = places(key_positions, key_positions_b, row, key, keep, first)
            key_cos, key_sin = cos_sin(key_at[:, None] * turn[None, :])
            weight = left[None, :] * key_cos + right[None, :] * key_sin
        else:
            weight = now_left[None, :] * near_cos + now_right[None, :] * near_sin
            if anchored(start + BLOCK_N - begin, BLOCK_N):
                base_cos, base_sin = cos_sin((first + start + BLOCK_N).to(tl.int64) * turn)
                now_left, now_right = turned(left, right, base_cos, base_sin)
            else:
                now_left, now_right = turned(now_left, now_right, on_cos, on_sin)
        score = tl.sum(coefficient * weight, axis=1)
        if t_scale is not None:
            score = score * unit

        if BY_POSITION:
            asker = places(query_positions, query_positions_b, row, 0, True, first)
            asked = places(key_positions, key_positions_b, row, key, keep, first)
            seen = sees(asker - asked, window, CAUSAL, WINDOW)
        else:
            seen = sees(index - key, window, CAUSAL, WINDOW)
        score = tl.where(seen & keep, score, float("-inf"))

        peak = tl.maximum(top, tl.max(score, axis=0))
        safe = tl.where(peak == float("-inf"), 0.0, peak)  # nothing seen yet
        share = tl.exp2(score - safe)
        fade = tl.exp2(top - safe)
        total = total * fade + share
        mixed = mixed * fade + share[:, None] * value
        top = peak

    whole = tl.sum(total, axis=0)
    result = tl.sum(mixed, axis=0) / tl.where(whole > 0, whole, 1.0)
    where_out = out + row * out_b + head * out_h + split * out_s
    tl.store(where_out + column, narrow(result, out.dtype.element_ty), mask=column < WIDTH)
    if sums is not None:
        where_sums = sums + row * sums_b + head * sums_h + 2 * split
        tl.store(where_sums, top)
        tl.store(where_sums + 1, whole)
