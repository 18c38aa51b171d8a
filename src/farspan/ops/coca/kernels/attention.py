"""Launching the half-width kernels: how the work is cut, and its registration with torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from farspan.ops.coca.decoding import FOLD_ROWS
from farspan.ops.coca.kernels.few_queries import few_queries_kernel
from farspan.ops.coca.kernels.half_width import ANCHOR, half_width_kernel, merge_kernel
from farspan.ops.coca.kernels.one_query import one_query_kernel
from farspan.ops.kernels.layout import padded, processors, row_major, row_stride
from farspan.ops.launch import cdiv, has_sound_wgmma, power_of_2

LOG2_E = 1.4426950408889634
WAVES = 8
"""Programs a processor that splitting the keys aims at for one query: enough to even out their ends."""
FEW_WAVES = 4
"""The same for few queries, whose programs are larger."""
PREFILL_WAVES = 2
"""The same for many queries, whose partial results are not small."""
MOST_SPLITS = 128
SPLIT_TILES = 8
"""Fewest tiles worth a program of their own."""


class Cut(NamedTuple):
    """How a launch is cut into tiles."""

    rows: int
    keys: int
    warps: int
    stages: int
    waves: int = 0
    """Programs a processor that splitting the keys aims at; 0 = the usual number."""


FEW = {16: Cut(8, 32, 2, 3), 32: Cut(8, 64, 2, 2), 64: Cut(8, 32, 2, 3), 128: Cut(8, 16, 2, 2)}
"""For few queries, by d/2 rounded up to a power of two. With fewer than four warps Triton keeps to mma.sync."""
FEW_BY_WGMMA = {32: Cut(8, 64, 4, 3), 64: Cut(8, 64, 4, 3, waves=2)}
"""The same for up to eight queries, where ptxas is no older than 12.9: 12.8 makes the descriptors of this kernel's
wgmma from registers that hold something else. The fastest of a sweep on an H200 at four waves, where they are nearly
twice as fast as the others; with two, 64 is faster still in groups of four (others were not tried). Those of other
widths and more queries have not been checked on a GPU."""
CODES_BY_WGMMA = {32: Cut(8, 128, 4, 4, waves=2)}
"""The same for t in eight bits, where other cuts were faster in a sweep on an H200."""
ALONE = {16: Cut(1, 64, 1, 2), 32: Cut(1, 16, 1, 4), 64: Cut(1, 16, 1, 3), 128: Cut(1, 16, 2, 2)}
"""For one query a key head; 32 and 64 are the fastest of a sweep on an H200."""
PREFILL = {16: Cut(128, 64, 8, 3), 32: Cut(128, 64, 8, 3), 64: Cut(128, 64, 8, 3), 128: Cut(64, 32, 8, 2)}


def choose_cut(rows: int, half: int, width: int, dtype: torch.dtype, coded: bool = False) -> Cut:
    """Tile sizes for `rows` queries a key head; `coded`: that read t in eight bits."""
    size = max(padded(half), padded(width) // 2)
    if rows == 1:
        return ALONE[size]
    cut = (FEW if rows <= FOLD_ROWS else PREFILL)[size]
    by_wgmma = FEW_BY_WGMMA | (CODES_BY_WGMMA if coded else {})
    if size in by_wgmma and rows <= by_wgmma[size].rows and has_sound_wgmma():
        cut = by_wgmma[size]
    if dtype == torch.float32:
        cut = Cut(min(cut.rows, 64), min(cut.keys, 32), cut.warps, 2)
    fitting = power_of_2(rows)
    if rows > FOLD_ROWS:
        return cut._replace(rows=min(cut.rows, fitting))
    return cut if rows <= cut.rows else cut._replace(rows=fitting)


def choose_splits(programs: int, keys: int, cut: Cut, processors: int) -> int:
    """Into how many parts the keys are cut, when `programs` cover the queries.

    >>> one, many = Cut(16, 64, 4, 3), Cut(128, 64, 8, 3)
    >>> choose_splits(8, 32_768, one, 132), choose_splits(8, 200, one, 132), choose_splits(1024, 32_768, many, 132)
    (64, 1, 1)
    """
    useful = max(1, cdiv(keys, cut.keys) // SPLIT_TILES)
    usual = WAVES if cut.rows == 1 else FEW_WAVES if cut.rows <= FOLD_ROWS else PREFILL_WAVES
    wanted = processors * (cut.waves or usual) // programs
    return max(1, min(wanted, useful, MOST_SPLITS))


def launch(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    t_scale: Tensor | None,
    step: Tensor | None,
    lengths: Tensor | None,
    firsts: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    padding: Tensor | None,
    pages: Tensor | None,
    first: int,
    behind: int,
    form: str,
    by_position: bool,
    causal: bool,
    window: int | None,
    scale: float,
    splits: int | None,
    cut: Cut | None = None,
) -> Tensor:
    """:func:`half_width_op`, with a cut to try."""
    (b, h, n, d), g, width = q.shape, t.shape[1], v.shape[-1]
    q, t, v = (row_major(x) for x in (q, t, v))
    lengths, firsts = (x if x is None else x.contiguous() for x in (lengths, firsts))
    m = t.shape[2] if pages is None else t.shape[2] * pages.shape[1]
    cut = cut or choose_cut(n * (h // g), d // 2, width, q.dtype, t_scale is not None)
    blocks = cdiv(n * (h // g), cut.rows)
    seen = m if window is None or by_position else min(m, n + 2 * window)
    splits = splits or choose_splits(blocks * b * g, seen, cut, processors(q.device))
    few = 1 < cut.rows <= FOLD_ROWS
    if few:  # its kernel finds one base angle a split
        splits = max(splits, cdiv(cdiv(seen, cut.keys), ANCHOR.value))
    out = torch.empty((b, n, h, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    parts: Tensor = out.unsqueeze(3)
    sums: Tensor | None = None
    if splits > 1:
        parts = torch.empty((b, h, n, splits, width), dtype=torch.float32, device=q.device)
        sums = torch.empty((b, h, n, splits, 2), dtype=torch.float32, device=q.device)
    sums_b, sums_h, sums_n = (0, 0, 0) if sums is None else sums.stride()[:3]
    t_strides = (*t.stride()[:3], *((0, 0, 0) if t_scale is None else t_scale.stride()))
    aside = (step, query_positions, key_positions, None if padding is None else padding.view(torch.uint8), pages)
    step, query_positions, key_positions, padding, pages = (x if x is None else row_major(x) for x in aside)
    rows = [row_stride(x) for x in (step, query_positions, key_positions, padding, pages)]
    places = (step, lengths, firsts, query_positions, key_positions, padding, pages)
    out_b, out_h, out_n, out_s = parts.stride()[:4]
    options = {
        "EXACT": form == "exact", "CAUSAL": causal, "WINDOW": window is not None, "BY_POSITION": by_position,
        "DIRECT": key_positions is not None or q.dtype == torch.float32,
        "HALF": d // 2, "WIDTH": width, "PAGE": 0 if pages is None else t.shape[2],
        "BLOCK_N": cut.keys, "BLOCK_D": padded(d // 2), "BLOCK_V": padded(width), "num_warps": cut.warps,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        if cut.rows == 1:
            one_query_kernel[(1, g * splits, b)](
                q, t, t_scale, v, parts, sums, *places, scale * LOG2_E, m, first, behind, window or 0, splits,
                *q.stride()[:2], *t_strides, *v.stride()[:3], out_b, out_h, out_s, sums_b, sums_h, *rows,
                **options, STAGES=cut.stages,
            )  # fmt: skip
        else:
            (few_queries_kernel if few else half_width_kernel)[(blocks, g * splits, b)](
                q, t, t_scale, v, parts, sums, *places, scale * LOG2_E, n, m, first, behind, window or 0, splits,
                *q.stride()[:3], *t_strides, *v.stride()[:3], out_b, out_h, out_n, out_s, sums_b, sums_h, sums_n,
                *rows, **options, GROUP=h // g, BLOCK_M=cut.rows, num_stages=cut.stages,
            )  # fmt: skip
        if sums is not None:
            merge_kernel[(h * n, b)](
                parts, sums, out, n, splits, out_b, out_h, out_n, out_s, sums_b, sums_h, sums_n, *out.stride()[:3],
                WIDTH=width, BLOCK_S=power_of_2(splits),
                BLOCK_V=padded(width), num_warps=4,
            )  # fmt: skip
    return out


@torch.library.custom_op("farspan::half_width_attention", mutates_args=())
def half_width_op(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    t_scale: Tensor | None,
    step: Tensor | None,
    lengths: Tensor | None,
    firsts: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    padding: Tensor | None,
    pages: Tensor | None,
    first: int,
    behind: int,
    form: str,
    by_position: bool,
    causal: bool,
    window: int | None,
    scale: float,
    splits: int | None,
) -> Tensor:
    """(b, h, n, d), (b, g, m, d/2), (b, g, m, dv) → (b, h, n, dv); with `pages` (b, ·) t, v are (pages, g, page, ·).

    The queries are the last n of each row's `lengths` keys, but for `behind` keys after them. Key i stands at
    `first` + i (or `firsts` of its row), or where the positions (b|1, ·) say. `step` are the frequencies (b|1, d/2) of
    :mod:`farspan.ops.phases`; None = NoPE. `by_position`: positions, not the index, decide what is seen. With `t_scale`
    (b, g, m), or (pages, g, page), t holds codes of eight bits.
    """
    places = (lengths, firsts, query_positions, key_positions, padding, pages, first, behind)
    return launch(q, t, v, t_scale, step, *places, form, by_position, causal, window, scale, splits)


@half_width_op.register_fake
def _(q: Tensor, t: Tensor, v: Tensor, *rest: object) -> Tensor:
    b, h, n, _ = q.shape
    return q.new_empty((b, n, h, v.shape[-1])).transpose(1, 2)
