"""Linear attention in chunks: time O(N), and never more than a segment's features at once.

Tokens are taken in chunks. Inside a chunk all pairs are weighed; all that is older comes from the running sums before
the chunk. A segment is a run of chunks worked in parallel; between segments only the sums go on, as they do between
the calls of a stream. In training each segment is computed again in the backward pass: what is kept is the caller's
q, k, v, the output, and one state a segment.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from farspan.ops.cosformer.state import LinearState, empty_state
from farspan.ops.cosformer.weights import EPSILON, Kernel
from farspan.ops.rotary import working_dtype

R = TypeVar("R")

CHUNK = 64
"""Tokens whose pairs are weighed directly."""
ELEMENTS = 2**19
"""Upper bound on the features of one segment on a CPU (2 MiB in float32)."""
GPU_TIMES = 128
"""A GPU needs larger segments to be busy, and has the memory."""


class Keys(NamedTuple):
    """Keys, their values, and all that is known about them."""

    k: Tensor
    v: Tensor
    positions: Tensor
    """(b|1, m) float64, not decreasing within a document."""
    keep: Tensor | None
    """(b, m) bool, False = padding."""
    documents: Tensor | None
    """(b, m) int; the tokens of a document are adjacent."""

    def cut(self, start: int, stop: int) -> "Keys":
        s = slice(start, stop)
        keep, documents = (None if x is None else x[:, s] for x in (self.keep, self.documents))
        return Keys(self.k[:, :, s], self.v[:, :, s], self.positions[:, s], keep, documents)

    def reversed(self) -> "Keys":
        """The text read backwards; distances stay what they were."""
        keep, documents = (None if x is None else x.flip(1) for x in (self.keep, self.documents))
        return Keys(self.k.flip(2), self.v.flip(2), -self.positions.flip(1), keep, documents)

    def values(self, work: torch.dtype) -> Tensor:
        """Values in the working dtype, zero where padding could hold anything."""
        v = self.v.to(work)
        return v if self.keep is None else v.masked_fill(~self.keep[:, None, :, None], 0.0)


def start(kernel: Kernel, keys: Keys) -> LinearState:
    """The memory before a text begins."""
    work = working_dtype(keys.k.dtype)
    features = kernel.key_map(keys.k[:1, :1, :1].to(work)).shape[-1]
    width = (kernel.width(kernel.numerator, features), kernel.width(kernel.denominator, features))
    return empty_state(keys.k, keys.v, width, keys.positions[:, :1].clone(), kernel.name, work)


def causal(kernel: Kernel, q: Tensor, keys: Keys, state: LinearState) -> tuple[Tensor, LinearState]:
    """Query i over the keys up to key i and all that `state` remembers: (b, h, n, dv), and the state after."""
    parts = []
    for begin, end in _segments(kernel, q):
        piece, before = keys.cut(begin, end), _document_before(keys, begin)
        wanted = (q, keys.k, keys.v)
        out, state = _run(_segment_output, wanted, kernel, q[:, :, begin:end], piece, before, state)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2), state


def two_sided(kernel: Kernel, q: Tensor, keys: Keys) -> Tensor:
    """Each query over all keys of its document, under any decay: forwards, and backwards without itself."""
    numerator, denominator = _one_side(kernel, q, keys, strict=False)
    backward = _one_side(kernel, q.flip(2), keys.reversed(), strict=True)
    return divide(numerator + backward[0].flip(2), denominator + backward[1].flip(2), q.dtype)


def _one_side(kernel: Kernel, q: Tensor, keys: Keys, *, strict: bool) -> tuple[Tensor, Tensor]:
    state, parts = start(kernel, keys), []
    for begin, end in _segments(kernel, q):
        piece, before = keys.cut(begin, end), _document_before(keys, begin)
        wanted = (q, keys.k, keys.v)
        *sums, state = _run(_segment, wanted, kernel, q[:, :, begin:end], piece, before, state, strict)
        parts.append(sums)
    numerators, denominators = zip(*parts, strict=True)
    return torch.cat(numerators, dim=2), torch.cat(denominators, dim=2)


def absorb(kernel: Kernel, keys: Keys, state: LinearState) -> LinearState:
    """Add keys and values to the memory; no query is asked. Documents are not told apart."""
    for begin, end in _segments(kernel, keys.k):
        state = _run(_absorb_segment, (keys.k, keys.v), kernel, keys.cut(begin, end), state)
    return state


def recall(kernel: Kernel, q: Tensor, positions: Tensor, state: LinearState) -> Tensor:
    """Each query over everything `state` remembers, whatever the order: (b, h, n, dv).

    Under a decay the queries must stand at the state's own position.
    """
    parts = []
    for begin, end in _segments(kernel, q):
        wanted = (q, state.numerator)
        parts.append(_run(_recall_segment, wanted, kernel, q[:, :, begin:end], positions[:, begin:end], state))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def divide(numerator: Tensor, denominator: Tensor, dtype: torch.dtype) -> Tensor:
    """numerator / max(denominator, ε); a query that meets no key gives zeros."""
    return (numerator / denominator.clamp(min=EPSILON[dtype])).to(dtype)


def _run(function: Callable[..., R], wanted: tuple[Tensor, ...], *args: object) -> R:
    """Call `function`; where gradients are `wanted`, keep only its arguments and compute it again backwards."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in wanted):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


def _segments(kernel: Kernel, x: Tensor) -> list[tuple[int, int]]:
    """Cut the positions of x (b, heads, n, d) into runs of whole chunks, then what is left."""
    b, heads, n, d = x.shape
    elements = ELEMENTS * (GPU_TIMES if x.is_cuda else 1)
    chunks = max(1, elements // (b * heads * CHUNK * kernel.width(kernel.numerator, d)))
    whole = n - n % CHUNK
    return list(pairwise(sorted({0, *range(0, whole, chunks * CHUNK), whole, n})))


def _document_before(keys: Keys, begin: int) -> Tensor | None:
    """The document (b, 1) of the slot before `begin`; at the start nothing is remembered, and any will do."""
    last = max(begin - 1, 0)
    return None if keys.documents is None else keys.documents[:, last : last + 1]


def _segment_output(
    kernel: Kernel, q: Tensor, keys: Keys, before: Tensor | None, state: LinearState
) -> tuple[Tensor, LinearState]:
    numerator, denominator, state = _segment(kernel, q, keys, before, state)
    return divide(numerator, denominator, q.dtype), state


def _segment(
    kernel: Kernel, q: Tensor, keys: Keys, before: Tensor | None, state: LinearState, strict: bool = False
) -> tuple[Tensor, Tensor, LinearState]:
    """Numerator (b, h, n, dv) and denominator (b, h, n, 1) of n tokens in chunks; `strict`: not of itself."""
    (b, h, n, _), g = q.shape, keys.k.shape[1]
    size = min(n, CHUNK)
    grid = (b, g, h // g, n // size, size)
    work = working_dtype(q.dtype)
    angles = kernel.angles(keys.positions - state.anchor, work)
    weights = _weights(kernel, keys, before, state, size, h // g, strict, work)

    def queries(x: Tensor) -> Tensor:  # (b, g, chunks, queries of all heads of the group, ·)
        return x.reshape(*grid, -1).transpose(2, 3).flatten(3, 4)

    def scores(query: Tensor, key: Tensor) -> Tensor:
        products = (query @ key.mT).unflatten(3, (grid[2], size))
        return (products * weights.within).flatten(3, 4)

    def weighed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else x * weight

    phi_q, psi_q = (queries(x) for x in kernel.query(q, angles))
    phi_k, psi_k = (x.unflatten(2, (-1, size)) for x in kernel.key(keys.k, keys.keep, angles))
    v = keys.values(work).unflatten(2, (-1, size))

    inside = scores(phi_q, phi_k)
    numerator = inside @ v
    denominator = (inside if kernel.shared else scores(psi_q, psi_k)).sum(-1, keepdim=True)
    del inside

    values = _prefix(state.numerator, weighed(phi_k, weights.to_end).mT @ v, weights.between)
    totals = _prefix(state.denominator, weighed(psi_k, weights.to_end).sum(-2), weights.between)
    numerator = numerator + weighed(phi_q @ values[:, :, :-1], weights.from_start)
    denominator = denominator + weighed(psi_q @ totals[:, :, :-1, :, None], weights.from_start)

    def heads(x: Tensor) -> Tensor:  # undoes `queries`
        return x.unflatten(3, (grid[2], size)).transpose(2, 3).reshape(b, h, n, -1)

    after = advance(keys, state, values[:, :, -1].clone(), totals[:, :, -1].clone())  # a view would keep all
    return heads(numerator), heads(denominator), after


class _Weights(NamedTuple):
    """What decay and documents leave of a product, beside the features; None = all of it."""

    within: Tensor
    """(b|1, 1, chunks|1, 1, queries, keys): the lower triangle of a chunk."""
    to_end: Tensor | None = None
    """(b|1, 1, chunks, keys, 1): of a key, at the end of its chunk."""
    between: Tensor | None = None
    """(b|1, chunks + 1, chunks + 1): of a chunk's sums, at the end of a later one."""
    from_start: Tensor | None = None
    """(b|1, 1, chunks, queries of all heads of a group, 1): of the sums before a chunk, at its queries."""


def _weights(
    kernel: Kernel,
    keys: Keys,
    before: Tensor | None,
    state: LinearState,
    size: int,
    groups: int,
    strict: bool,
    work: torch.dtype,
) -> _Weights:
    triangle = torch.ones(size, size, dtype=work, device=keys.k.device).tril(-1 if strict else 0)
    if not kernel.decay and keys.documents is None:
        return _Weights(triangle[None, None, None, None])
    places = keys.positions.unflatten(1, (-1, size))  # (b|1, chunks, size)
    ends = torch.cat((state.position.expand(places.shape[0], 1), places[:, :, -1]), dim=1)
    low = None if keys.documents is None else 0.0  # below 0 only between documents, which do not meet
    within, to_end, between, from_start = (
        torch.exp(-kernel.decay * (distance if low is None else distance.clamp(min=low))).to(work)
        for distance, low in (
            (places[:, :, :, None] - places[:, :, None, :], 0.0),
            (ends[:, 1:, None] - places, low),
            (ends[:, :, None] - ends[:, None, :], low),
            (places - ends[:, :-1, None], low),
        )
    )
    between = between.tril()
    if keys.documents is not None and before is not None:
        inside = keys.documents.unflatten(1, (-1, size))
        last = torch.cat((before, inside[:, :, -1]), dim=1)
        within = within * (inside[:, :, :, None] == inside[:, :, None, :])
        to_end = to_end * (inside == last[:, 1:, None])
        between = between * (last[:, :, None] == last[:, None, :])
        from_start = from_start * (inside == last[:, :-1, None])
    return _Weights(
        (within * triangle)[:, None, :, None],
        to_end[:, None, :, :, None],
        between,
        from_start.repeat(1, 1, groups)[:, None, :, :, None],
    )


def _prefix(first: Tensor, sums: Tensor, between: Tensor | None) -> Tensor:
    """The memory before each chunk and after the last: (b, g, …) and (b, g, chunks, …) → (b, g, chunks + 1, …)."""
    joined = torch.cat((first[:, :, None], sums), dim=2)
    if between is None:
        return joined.cumsum(dim=2)
    mixed = between[:, None] @ joined.flatten(3)
    return mixed.unflatten(3, joined.shape[3:])


def _absorb_segment(kernel: Kernel, keys: Keys, state: LinearState) -> LinearState:
    work = working_dtype(keys.k.dtype)
    phi, psi = kernel.key(keys.k, keys.keep, kernel.angles(keys.positions - state.anchor, work))
    values, totals = state.numerator, state.denominator
    if kernel.decay:
        end = keys.positions[:, -1:]
        left = torch.exp(-kernel.decay * (end - keys.positions)).to(work)[:, None, :, None]
        phi, psi = phi * left, psi * left
        faded = torch.exp(-kernel.decay * (end - state.position)).to(work)[:, :, None]
        values, totals = values * faded[..., None], totals * faded
    return advance(keys, state, values + phi.mT @ keys.values(work), totals + psi.sum(-2))


def _recall_segment(kernel: Kernel, q: Tensor, positions: Tensor, state: LinearState) -> Tensor:
    angles = kernel.angles(positions - state.anchor, working_dtype(q.dtype))
    g = state.numerator.shape[1]
    phi, psi = (x.unflatten(1, (g, -1)).flatten(2, 3) for x in kernel.query(q, angles))
    out = divide(phi @ state.numerator, psi @ state.denominator[..., None], q.dtype)
    return out.unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def advance(keys: Keys, state: LinearState, numerator: Tensor, denominator: Tensor) -> LinearState:
    """The state after keys that brought the sums to `numerator` and `denominator`."""
    kept = keys.positions if keys.keep is None else keys.positions.masked_fill(~keys.keep, torch.inf)
    first = torch.minimum(state.first, kept.amin(-1, keepdim=True))
    return LinearState(numerator, denominator, state.anchor, keys.positions[:, -1:].clone(), first, state.kernel)
