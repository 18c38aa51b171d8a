"""Sums over a stretch of text: Σ φ_j⊗z_j and Σ ψ_j of each segment, then the sums of all before each of them."""

import triton
import triton.language as tl

from farspan.ops.cosformer.kernels.tiles import (
    column_sums,
    load_angles,
    load_features,
    load_scale,
    load_tile,
    locate,
    multiply,
    weighed,
)
from farspan.ops.kernels.narrow import narrow


@triton.jit(do_not_specialize=["n", "heads", "segment", "parts"])
def totals_kernel(
    y, z, states, sums, denominators, deltas, angles, padding, documents,
    still, wave, epsilon, n, heads, segment, parts,
    y_b, y_h, y_n, z_b, z_h, z_n, angles_b, angles_s, padding_b, documents_b,
    QUERIES: tl.constexpr, RELU: tl.constexpr, STILL: tl.constexpr, WAVE: tl.constexpr, SHARED: tl.constexpr,
    TIMES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """One program: one segment of one key head, and BLOCK_Z of the DV columns.

    Of keys and values, Σ φ(t_j)⊗v_j and Σ ψ(t_j), read forwards. Or (QUERIES) of queries and the output's gradients g,
    over the TIMES heads of a group, Σ φ(a_i)⊗g_i/D_i and Σ ψ(a_i) δ_i/D_i, read backwards. Of the documents, only the
    one at the segment's far end goes on, and is summed.
    """
    block, head, row = locate(parts * tl.cdiv(DV, BLOCK_Z), heads)
    part = block % parts
    split = block // parts
    column = tl.arange(0, BLOCK_D)
    into = split * BLOCK_Z + tl.arange(0, BLOCK_Z)
    state_0 = tl.zeros([BLOCK_Z, BLOCK_D], tl.float32)
    state_c = tl.zeros([BLOCK_Z, BLOCK_D], tl.float32)
    state_s = tl.zeros([BLOCK_Z, BLOCK_D], tl.float32)
    sum_0 = tl.zeros([BLOCK_D], tl.float32)
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
        cos, sin = load_angles(angles, angles_b, angles_s, row, index, live, WAVE)
        for time in range(TIMES):
            which = head * TIMES + time
            feature = load_features(y, row * y_b + which * y_h + wide * y_n, column, live, RELU, D, DOT)
            value = load_tile(z, row * z_b + which * z_h + wide * z_n, into, live, DV, DOT)
            one = tl.full([BLOCK], 1.0, tl.float32)
            delta = one
            weight = one
            if QUERIES:
                where = (row * heads * TIMES + which) * n + wide
                weight = load_scale(denominators, where, live, epsilon)
                delta = tl.load(deltas + where, mask=live, other=0.0)
            if STILL:
                state_0 += _outer(feature, value, weight * still, PRECISION)
            if WAVE:
                state_c += _outer(feature, value, weight * wave * cos, PRECISION)
                state_s += _outer(feature, value, weight * wave * sin, PRECISION)
            weight = weight * delta
            if not SHARED:
                sum_0 += column_sums(feature, weight)
            if SHARED and STILL:
                sum_0 += column_sums(feature, weight * still)
            if SHARED and WAVE:
                sum_c += column_sums(feature, weight * wave * cos)
                sum_s += column_sums(feature, weight * wave * sin)
    PARTS: tl.constexpr = STILL + 2 * WAVE
    SUMS: tl.constexpr = PARTS if SHARED else 1
    at = (row * heads + head) * parts + part
    to = states + at * PARTS * D * DV + into[:, None] * D + column[None, :]
    inside = (into < DV)[:, None] & (column < D)[None, :]
    if STILL:
        tl.store(to, state_0, mask=inside)
    if WAVE:
        tl.store(to + STILL * D * DV, state_c, mask=inside)
        tl.store(to + (STILL + 1) * D * DV, state_s, mask=inside)
    to_sum = sums + at * SUMS * D + column
    if split == 0:
        if STILL or not SHARED:
            tl.store(to_sum, sum_0, mask=column < D)
        if WAVE and SHARED:
            tl.store(to_sum + STILL * D, sum_c, mask=column < D)
            tl.store(to_sum + (STILL + 1) * D, sum_s, mask=column < D)


@triton.jit
def _outer(feature, value, weight, PRECISION: tl.constexpr):
    return multiply(tl.trans(value), weighed(feature, weight), PRECISION)


@triton.jit(do_not_specialize=["n", "segment", "parts", "size", "heads"])
def prefix_kernel(
    totals, initial, before, final, documents, n, segment, parts, size, heads, documents_b,
    REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK numbers of one row and head. From the totals of segments to the sum of all before each of them
    (REVERSE: after it), from `initial` on, and to the sum of all."""
    block, head, row = locate(tl.cdiv(size, BLOCK), heads)
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
