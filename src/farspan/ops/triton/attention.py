"""Softmax attention over the keys that a window, documents and padding leave, forward and backward.

Each program of the forward pass holds one tile of queries. It reads only tiles of keys that some of them can see, so a
window of w costs O(N·w). The backward pass computes the weights again from the logarithm of their sums. One kernel
computes dq per tile of queries; another computes dk and dv per tile of keys, summed over the heads of a group.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspan.ops.device import cdiv
from farspan.ops.triton.support import load_tile, narrow, padded, product, row_major, row_stride

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _label(labels, start, index, live):
    """Load one label (a document, or whether a key is real) per index."""
    return tl.load(labels + start + index, mask=live, other=0)


@triton.jit
def _scores(
    left, right, at, key, live, scale, slope, window, padding, documents, slopes, padding_at, documents_at, m,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return left·rightᵀ as powers of two, -∞ where the query at index `at` does not see the key.

    One of both tiles holds queries and one keys; `at`, `key` and `live` have the shape of their side.
    """
    score = product(left, tl.trans(right), tl.zeros([left.shape[0], right.shape[0]], tl.float32)) * (scale * LOG2_E)
    distance = at - key
    if slopes is not None:  # ALiBi
        score = score - slope * LOG2_E * tl.abs(distance).to(tl.float32)
    seen = live & (key < m) & (distance < window)
    seen = seen & (distance >= 0) if CAUSAL else seen & (distance > -window)
    if padding is not None:
        seen = seen & (_label(padding, padding_at, key, key < m) != 0)
    if documents is not None:
        seen = seen & (_label(documents, documents_at, at, live) == _label(documents, documents_at, key, key < m))
    return tl.where(seen, score, float("-inf"))


@triton.jit(do_not_specialize=["n", "m", "offset"])
def forward_kernel(
    q, k, v, out, sums, padding, documents, slopes, scale, n, m, offset, window,
    q_b, q_h, q_n, k_b, k_g, k_m, v_b, v_g, v_m, out_b, out_h, out_n, sums_b, sums_h, padding_b, documents_b,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries, and the base-2 logarithm of the sum of its weights."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    key_head = head // GROUP
    query = start + tl.arange(0, BLOCK_M)
    at = offset + query
    live = query < n
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_V)
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + head)
    queries = load_tile(q + row * q_b + head * q_h, query.to(tl.int64) * q_n, dim, live, DIM)
    k += row * k_b + key_head * k_g
    v += row * v_b + key_head * v_g
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    low = tl.maximum(0, offset + start - window + 1)
    high = offset + start + BLOCK_M
    if not CAUSAL:
        high += window - 1
    for first in range(low, tl.minimum(m, high), BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        slot = key.to(tl.int64)
        keys = load_tile(k, slot * k_m, dim, key < m, DIM)
        score = _scores(
            queries, keys, at[:, None], key[None, :], live[:, None], scale, slope, window,
            padding, documents, slopes, row * padding_b, row * documents_b, m, CAUSAL,
        )  # fmt: skip
        peak = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weight, axis=1)
        values = load_tile(v, slot * v_m, column, key < m, WIDTH)
        mixed = product(narrow(weight, values.dtype), values, mixed * fade[:, None])
        top = peak
    nonempty = total > 0
    total = tl.where(nonempty, total, 1.0)
    where = out + row * out_b + head * out_h + query.to(tl.int64)[:, None] * out_n + column[None, :]
    tl.store(
        where, narrow(mixed / total[:, None], out.dtype.element_ty), mask=live[:, None] & (column < WIDTH)[None, :]
    )
    # A query that sees nothing keeps 0: its weights exp2(-inf - 0) are then zero in the backward pass, too.
    tl.store(sums + row * sums_b + head * sums_h + query, tl.where(nonempty, top + tl.log2(total), 0.0), mask=live)


@triton.jit(do_not_specialize=["n", "m", "offset"])
def query_gradient_kernel(
    q, k, v, out, gradient, dq, sums, deltas, padding, documents, slopes, scale, n, m, offset, window,
    q_b, q_h, q_n, k_b, k_g, k_m, v_b, v_g, v_m, out_b, out_h, out_n, gradient_b, gradient_h, gradient_n,
    dq_b, dq_h, dq_n, sums_b, sums_h, padding_b, documents_b,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of queries, and deltas Σ gradient·out for the other kernel."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    key_head = head // GROUP
    query = start + tl.arange(0, BLOCK_M)
    at = offset + query
    live = query < n
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_V)
    slope = 0.0
    if slopes is not None:
        slope = tl.load(slopes + head)
    place = query.to(tl.int64)
    queries = load_tile(q + row * q_b + head * q_h, place * q_n, dim, live, DIM)
    gradients = load_tile(gradient + row * gradient_b + head * gradient_h, place * gradient_n, column, live, WIDTH)
    outputs = load_tile(out + row * out_b + head * out_h, place * out_n, column, live, WIDTH)
    delta = tl.sum(gradients.to(tl.float32) * outputs.to(tl.float32), axis=1)
    sums_at = row * sums_b + head * sums_h
    tl.store(deltas + sums_at + query, delta, mask=live)
    whole = tl.load(sums + sums_at + query, mask=live, other=0.0)
    k += row * k_b + key_head * k_g
    v += row * v_b + key_head * v_g
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = tl.maximum(0, offset + start - window + 1)
    high = offset + start + BLOCK_M
    if not CAUSAL:
        high += window - 1
    for first in range(low, tl.minimum(m, high), BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        slot = key.to(tl.int64)
        keys = load_tile(k, slot * k_m, dim, key < m, DIM)
        values = load_tile(v, slot * v_m, column, key < m, WIDTH)
        score = _scores(
            queries, keys, at[:, None], key[None, :], live[:, None], scale, slope, window,
            padding, documents, slopes, row * padding_b, row * documents_b, m, CAUSAL,
        )  # fmt: skip
        weight = tl.exp2(score - whole[:, None])
        change = product(gradients, tl.trans(values), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        change = weight * (change - delta[:, None])
        result = product(narrow(change, keys.dtype), keys, result)
    where = dq + row * dq_b + head * dq_h + place[:, None] * dq_n + dim[None, :]
    tl.store(where, narrow(result * scale, dq.dtype.element_ty), mask=live[:, None] & (dim < DIM)[None, :])


@triton.jit(do_not_specialize=["n", "m", "offset"])
def key_gradient_kernel(
    q, k, v, gradient, dk, dv, sums, deltas, padding, documents, slopes, scale, n, m, offset, window,
    q_b, q_h, q_n, k_b, k_g, k_m, v_b, v_g, v_m, gradient_b, gradient_h, gradient_n,
    dk_b, dk_g, dk_m, dv_b, dv_g, dv_m, sums_b, sums_h, padding_b, documents_b,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of keys, summed over the query heads of its group."""
    start = tl.program_id(0) * BLOCK_N
    key_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    key = start + tl.arange(0, BLOCK_N)
    exists = key < m
    slot = key.to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_V)
    keys = load_tile(k + row * k_b + key_head * k_g, slot * k_m, dim, exists, DIM)
    values = load_tile(v + row * v_b + key_head * v_g, slot * v_m, column, exists, WIDTH)
    key_result = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_result = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    low = start - offset
    if not CAUSAL:
        low -= window - 1
    low = tl.maximum(0, low)
    high = tl.minimum(n, start + BLOCK_N - 1 + window - offset)
    tiles = tl.maximum(0, (high - low + BLOCK_M - 1) // BLOCK_M)
    for step in range(GROUP * tiles):
        head = key_head * GROUP + step // tiles
        query = low + (step % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        at = offset + query
        live = query < n
        place = query.to(tl.int64)
        slope = 0.0
        if slopes is not None:
            slope = tl.load(slopes + head)
        queries = load_tile(q + row * q_b + head * q_h, place * q_n, dim, live, DIM)
        gradients = load_tile(gradient + row * gradient_b + head * gradient_h, place * gradient_n, column, live, WIDTH)
        sums_at = row * sums_b + head * sums_h
        whole = tl.load(sums + sums_at + query, mask=live, other=0.0)
        delta = tl.load(deltas + sums_at + query, mask=live, other=0.0)
        score = _scores(
            keys, queries, at[None, :], key[:, None], live[None, :], scale, slope, window,
            padding, documents, slopes, row * padding_b, row * documents_b, m, CAUSAL,
        )  # fmt: skip
        weight = tl.exp2(score - whole[None, :])
        value_result = product(narrow(weight, gradients.dtype), gradients, value_result)
        change = product(values, tl.trans(gradients), tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
        change = weight * (change - delta[None, :])
        key_result = product(narrow(change, queries.dtype), queries, key_result)
    where = dk + row * dk_b + key_head * dk_g + slot[:, None] * dk_m + dim[None, :]
    tl.store(where, narrow(key_result * scale, dk.dtype.element_ty), mask=exists[:, None] & (dim < DIM)[None, :])
    where = dv + row * dv_b + key_head * dv_g + slot[:, None] * dv_m + column[None, :]
    tl.store(where, narrow(value_result, dv.dtype.element_ty), mask=exists[:, None] & (column < WIDTH)[None, :])


class Cut(NamedTuple):
    """Tile sizes of a launch."""

    queries: int
    keys: int
    warps: int
    stages: int


# For heads up to 64 and up to 128 wide: among the fastest of some 20 on an H200, windows of 128 and 512 (not recorded).
CUTS = {
    "forward": (Cut(64, 64, 4, 3), Cut(64, 32, 4, 3)),
    "query gradient": (Cut(64, 64, 4, 2), Cut(64, 32, 4, 2)),
    "key gradient": (Cut(32, 64, 4, 2), Cut(32, 64, 4, 2)),
}


def choose_cut(kernel: str, width: int, dtype: torch.dtype) -> Cut:
    """Return the tile sizes of a kernel for heads of a width. Float32 and wider heads must fit into shared memory."""
    if dtype == torch.float32 or width > 128:
        return Cut(32, 32, 4, 1)
    return CUTS[kernel][width > 64]


class Masking(NamedTuple):
    """Which keys a query sees, and what its scores are multiplied by."""

    padding: Tensor | None  # (b|1, m) bool, True = keep
    documents: Tensor | None  # (b|1, m) int
    slopes: Tensor | None  # (h), float32: ALiBi
    offset: int  # index of query 0 among the keys
    window: int  # m or more for no window
    causal: bool
    scale: float


KERNELS = {"forward": forward_kernel, "query gradient": query_gradient_kernel, "key gradient": key_gradient_kernel}


def launch(kernel: str, tensors: list[Tensor], sums: list[Tensor], masking: Masking, cut: Cut | None = None) -> None:
    """Launch a kernel on q, k, v and more tensors (b, ·, ·, ·), one program per tile of queries, or of keys."""
    q, k, v = tensors[:3]
    (b, h, n, d), (g, m), width = q.shape, k.shape[1:3], v.shape[-1]
    cut = cut or choose_cut(kernel, max(d, width), q.dtype)
    padding = None if masking.padding is None else row_major(masking.padding).view(torch.uint8)
    documents = None if masking.documents is None else row_major(masking.documents)
    grid = (cdiv(m, cut.keys), g, b) if kernel == "key gradient" else (cdiv(n, cut.queries), h, b)
    with torch.cuda.device_of(q):
        KERNELS[kernel][grid](
            *tensors, *sums, padding, documents, masking.slopes, masking.scale, n, m, masking.offset,
            min(masking.window, m), *(stride for x in tensors for stride in x.stride()[:3]), *sums[0].stride()[:2],
            row_stride(padding), row_stride(documents),
            CAUSAL=masking.causal, GROUP=h // g, DIM=d, WIDTH=width, BLOCK_M=cut.queries, BLOCK_N=cut.keys,
            BLOCK_D=padded(d), BLOCK_V=padded(width), num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, *masking: Any) -> tuple[Tensor, Tensor]:
    """Attend from q (b, h, n, d) to k (b, g, m, d) and v (b, g, m, dv) under a :class:`Masking`.

    Return (b, h, n, dv), and the base-2 logarithm of each query's sum of weights, (b, h, n) in float32.
    """
    q, k, v = (row_major(x) for x in (q, k, v))
    out, sums = _tokens_outside(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch("forward", [q, k, v, out], [sums], Masking(*masking))
    return out, sums


def gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *masking: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    gradient, q, k, v, out = (row_major(x) for x in (gradient, q, k, v, out))
    dq, dk, dv = (_tokens_outside(x, x.shape[-1]) for x in (q, k, v))
    deltas = torch.empty_like(sums)
    launch("query gradient", [q, k, v, out, gradient, dq], [sums, deltas], Masking(*masking))
    launch("key gradient", [q, k, v, gradient, dk, dv], [sums, deltas], Masking(*masking))
    return dq, dk, dv


def _tokens_outside(x: Tensor, width: int) -> Tensor:
    """Allocate (b, h, n, width) for x (b, h, n, ·), laid out as (b, n, h, width) like the output of a projection."""
    b, h, n, _ = x.shape
    return x.new_empty(b, n, h, width).transpose(1, 2)


class MaskedAttention(torch.autograd.Function):
    """Run the kernels in eager mode, where calling a custom op takes longer than a small layer."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *masking: Any) -> Tensor:
        out, sums = attend(q, k, v, *masking)
        ctx.save_for_backward(q, k, v, out, sums, *masking[:3])
        ctx.rest = masking[3:]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return *gradients(gradient, *ctx.saved_tensors, *ctx.rest), *(None,) * 7


_MASKING = "Tensor? padding, Tensor? documents, Tensor? slopes, SymInt offset, SymInt window, bool causal, float scale"
attention_op = torch.library.custom_op(
    "farspan::masked_attention",
    attend,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_MASKING}) -> (Tensor, Tensor)",
)
"""The kernels for compiled graphs, which serve all lengths."""
gradients_op = torch.library.custom_op(
    "farspan::masked_attention_backward",
    gradients,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, {_MASKING}) -> "
    "(Tensor, Tensor, Tensor)",
)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _tokens_outside(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@gradients_op.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_tokens_outside(x, x.shape[-1]) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *masking = inputs
    ctx.save_for_backward(q, k, v, *output, *masking[:3])
    ctx.rest = masking[3:]


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *gradients_op(gradient, *ctx.saved_tensors, *ctx.rest), *(None,) * 7


attention_op.register_autograd(_backward, setup_context=_save)
