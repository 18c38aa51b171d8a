"""Launching the kernels of linear attention, forward and backward: how the work is cut, and room for its sums."""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from farspan.ops.cosformer.kernels.pairs import delta_kernel, pairs_kernel
from farspan.ops.cosformer.kernels.sums import prefix_kernel, totals_kernel
from farspan.ops.kernels.layout import padded, processors, row_major, row_stride
from farspan.ops.launch import cdiv

WAVES = 4
"""Programs a processor that cutting the keys of bidirectional attention aims at."""
PREFIX = 512
"""Numbers of the sums that a program adds up over segments."""

DELTAS = 64
"""Rows whose δ a program finds."""


class Weight(NamedTuple):
    """κ = still + wave·cos θΔ above; below the same if `shared`, else 1. Features by ReLU, or by elu + 1."""

    still: float
    wave: float
    shared: bool
    relu: bool
    epsilon: float

    @property
    def parts(self) -> int:
        """How many sums Σ y⊗z there are."""
        return int(self.still != 0) + 2 * int(self.wave != 0)

    @property
    def sums(self) -> int:
        """How many sums Σ y there are."""
        return self.parts if self.shared else 1

    def like(self, k: Tensor, v: Tensor, held: int, dtype: torch.dtype = torch.float32) -> "Sums":
        """Room for `held` sums of keys k (b, g, m, d) and values v (b, g, m, dv), those with values in `dtype`."""
        (b, g, _, d), dv = k.shape, v.shape[-1]
        states = k.new_empty((b, g, held, self.parts, dv, d), dtype=dtype)
        return Sums(states, k.new_empty((b, g, held, self.sums, d), dtype=torch.float32))

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """In what products are made: still + wave·cos θΔ nearly cancels at the far end, and needs float32's digits."""
        return torch.float32 if self.still and self.wave else given

    def flags(self) -> dict[str, Any]:
        return {"RELU": self.relu, "STILL": self.still != 0, "WAVE": self.wave != 0, "SHARED": self.shared}


class Text(NamedTuple):
    """Where tokens stand and which count; None: at no place, all of them, one document."""

    angles: Tensor | None
    """(b|1, 2, n), cos and sin."""
    padding: Tensor | None
    """(b|1, n)"""
    documents: Tensor | None

    @classmethod
    def of(cls, angles: Tensor | None, padding: Tensor | None, documents: Tensor | None) -> "Text":
        padding = None if padding is None else padding.view(torch.uint8)
        return cls(*(x if x is None else row_major(x) for x in (angles, padding, documents)))

    @property
    def strides(self) -> list[int]:
        """From one row of the batch to the next, 0 where all rows share one; and from cosines to sines."""
        angles, *rest = (row_stride(x) for x in self)
        return [angles, 0 if self.angles is None else self.angles.stride(1), *rest]


class Sums(NamedTuple):
    """Sums before segments, (b, g, held, parts, dv, d) and (b, g, held, sums, d); None: nothing yet."""

    states: Tensor | None
    sums: Tensor | None

    @property
    def held(self) -> int:
        return 1 if self.states is None else self.states.shape[2]


NOTHING = Sums(None, None)


class Cut(NamedTuple):
    """How a launch is cut: tokens of x and of y a tile (of sums: tokens, and columns of values), threads, stages."""

    rows: int
    columns: int
    warps: int
    stages: int


PAIRS = {64: Cut(64, 64, 4, 1), 128: Cut(64, 64, 4, 2)}
QUERY_PAIRS = {64: Cut(64, 64, 4, 2), 128: Cut(128, 64, 8, 3)}
"""For the gradient of the queries, which needs more registers."""
TOTALS = {64: Cut(128, 64, 4, 3), 128: Cut(128, 128, 8, 2)}
"""In bfloat16, by the widest head that it is for: the fastest of `farspan bench cosformer --tune` on an H200, kernel by
kernel, or near it."""
PRECISE_PAIRS = {64: Cut(32, 32, 4, 1), 128: Cut(32, 32, 8, 1)}
PRECISE_TOTALS = {64: Cut(32, 64, 8, 1), 128: Cut(32, 32, 8, 1)}
"""In float16 and float32, whose tiles are twice as large."""
SEGMENT = {64: 256, 128: 512}
"""Tokens of a segment of causal attention: the fewer, the fewer pairs; the more, the less memory for its sums. In width
128, 256 would be 10% faster and need 1.25 times the memory of inputs, outputs and gradients."""


def choose_cut(table: dict[int, Cut], precise: dict[int, Cut], d: int, width: int, dtype: torch.dtype) -> Cut:
    """A table's entry for features of width d and values of `width`."""
    return (table if dtype == torch.bfloat16 else precise)[widest(d, width)]


def widest(d: int, width: int) -> int:
    """The entry of the tables for features of width d and values of `width`."""
    return 64 if max(d, width) <= 64 else 128


def choose_segment(n: int, programs: int, processors: int, block: int) -> int:
    """Tokens of a segment of n keys of which all are summed, `programs` heads at once, in blocks.

    >>> choose_segment(65_536, 16, 132, 64), choose_segment(2048, 16, 132, 64), choose_segment(2048, 1024, 132, 64)
    (2048, 64, 2048)
    """
    blocks = cdiv(n, block)
    parts = max(1, processors * WAVES // programs)
    return cdiv(blocks, min(parts, blocks)) * block


def chosen(q: Tensor, v: Tensor, causal: bool) -> int:
    """Tokens of a segment for queries (b, h, n, d) and values (b, g, m, dv) on their device.

    Causal queries need the sums before each segment. Others need one sum of all: segments only share the work, and are
    chosen by the longer side, as the backward pass sums over the queries.
    """
    (b, h, n, d), (m, width) = q.shape, v.shape[2:]
    if causal:
        return SEGMENT[widest(d, width)]
    cut = choose_cut(TOTALS, PRECISE_TOTALS, d, width, q.dtype)
    return choose_segment(max(n, m), b * h * cdiv(width, cut.columns), processors(q.device), cut.rows)


def count_segments(k: Tensor, segment: int) -> int:
    """How many segments of so many tokens the keys (b, g, m, d) have."""
    return cdiv(k.shape[2], segment)


def products(dtype: torch.dtype) -> dict[str, Any]:
    """bfloat16 as it is; float16 as float32 of 10 bits, as sums leave its range; float32 in three such products."""
    return {
        "DOT": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "PRECISION": "tf32" if dtype == torch.float16 else "tf32x3",
    }


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what the sums before segments are kept: in what they are multiplied in."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def mix(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    out: Tensor,
    weight: Weight,
    text: Text,
    before: Sums,
    denominators: Tensor,
    deltas: Tensor | None,
    segment: int,
    *,
    causal: bool,
    reverse: bool = False,
    source: Tensor | None = None,
) -> None:
    """Fill `out` with Σ κ (x·y) z (see :mod:`farspan.ops.cosformer.kernels.pairs`), or a gradient, that of `source`."""
    (b, heads, n, width), into = x.shape, z.shape[-1]
    group = y.shape[1] // heads if reverse else heads // y.shape[1]
    table = QUERY_PAIRS if source is not None and not reverse else PAIRS
    dtype = weight.dtype(x.dtype)
    cut = choose_cut(table, PRECISE_PAIRS, width, into, dtype)
    rows = math.gcd(cut.rows, segment)  # a block lies in one segment
    origin = x if source is None else source
    strides = [s for tensor in (x, y, z, origin, out) for s in tensor.stride()[:3]]
    with torch.cuda.device_of(x):
        pairs_kernel[(cdiv(n, rows) * heads * b,)](
            x, y, z, source, out, before.states, before.sums, denominators, deltas, *text,
            weight.still, weight.wave, weight.epsilon, n, heads, segment, before.held,
            *strides, *text.strides,
            CAUSAL=causal, REVERSE=reverse, GRADED=source is not None, **weight.flags(), **products(dtype),
            GROUP=group, WIDTH=width, OUT_WIDTH=into, BLOCK_M=rows, BLOCK_N=cut.columns,
            BLOCK_X=padded(width), BLOCK_Z=padded(into), num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip


def add_up(
    y: Tensor,
    z: Tensor,
    weight: Weight,
    text: Text,
    denominators: Tensor | None,
    deltas: Tensor | None,
    segment: int,
    groups: int,
    initial: Sums,
    *,
    causal: bool,
    whole: bool,
) -> tuple[Sums, Sums]:
    """The sums before each segment (if `causal`), and those of everything (if `whole`; held once, float32).

    Of keys and values; or, given `denominators` and `deltas`, of queries and gradients, from the end of the text.
    """
    (b, heads, n, d), dv = y.shape, z.shape[-1]
    g, queries = heads // groups, denominators is not None
    if not queries:  # a key's factors are 1, cos, sin
        weight = weight._replace(still=float(weight.still != 0), wave=float(weight.wave != 0))
    dtype = weight.dtype(y.dtype)
    cut, parts = choose_cut(TOTALS, PRECISE_TOTALS, d, dv, dtype), count_segments(y, segment)
    columns = min(cut.columns, padded(dv))
    totals = weight.like(y[:, :g], z, parts)
    finals = weight.like(y[:, :g], z, 1) if whole else NOTHING
    before = weight.like(y[:, :g], z, parts, held_dtype(dtype)) if causal else NOTHING
    with torch.cuda.device_of(y):
        totals_kernel[(parts * cdiv(dv, columns) * g * b,)](
            y, z, *totals, denominators, deltas, *text,
            weight.still, weight.wave, weight.epsilon, n, g, segment, parts,
            *y.stride()[:3], *z.stride()[:3], *text.strides,
            QUERIES=queries, **weight.flags(), **products(dtype), TIMES=groups, D=d, DV=dv,
            BLOCK=cut.rows, BLOCK_D=padded(d), BLOCK_Z=columns, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        for total, start, left, final in zip(totals, initial, before, finals, strict=True):
            assert total is not None
            size = total[0, 0, 0].numel()
            prefix_kernel[(cdiv(size, PREFIX) * g * b,)](
                total, start, left, final, text.documents, n, segment, parts, size, g, text.strides[3],
                REVERSE=queries, BLOCK=PREFIX,
            )  # fmt: skip
    return before, finals


def find_deltas(out: Tensor, gradient: Tensor, denominators: Tensor, weight: Weight) -> Tensor:
    """δ (b, h, n): what the denominators do to the gradient."""
    b, h, n, width = out.shape
    deltas = torch.empty_like(denominators)
    with torch.cuda.device_of(out):
        delta_kernel[(cdiv(n, DELTAS) * h * b,)](
            out, gradient, denominators, deltas, weight.epsilon, n, h, *out.stride()[:3], *gradient.stride()[:3],
            WIDTH=width, BLOCK=DELTAS, BLOCK_V=padded(width),
        )  # fmt: skip
    return deltas
