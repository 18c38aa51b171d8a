"""Linear attention in chunks: time O(N), and the features of one segment at a time.

A chunk weighs all pairs of its own tokens; everything older comes from the running sums before it. A segment is a run
of chunks computed in parallel. Between segments only the sums go on, as between the calls of a stream. In training the
backward pass computes each segment again: autograd keeps q, k, v, the output, and one state per segment.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from farspan.ops.device import wants_gradient, working_dtype
from farspan.ops.reference import MIN_DENOMINATOR

if TYPE_CHECKING:
    from farspan.ops.cosformer import LinearState, Weighting

R = TypeVar("R")

CHUNK = 64
"""Tokens whose pairs are weighed directly."""
ELEMENTS = 2**19
"""Upper bound on the features of one segment on a CPU (2 MiB in float32)."""
GPU_TIMES = 128
"""A GPU needs larger segments to be busy, and has the memory."""


class Keys(NamedTuple):
    """Keys, their values, positions, padding and documents."""

    k: Tensor
    v: Tensor
    positions: Tensor
    """(b|1, m) float64, not decreasing within a document."""
    padding: Tensor | None
    """(b, m) bool, True = a real key."""
    documents: Tensor | None
    """(b, m) int; the tokens of a document are adjacent."""

    def part(self, start: int, stop: int) -> "Keys":
        """Return keys start … stop-1."""
        s = slice(start, stop)
        padding, documents = (None if x is None else x[:, s] for x in (self.padding, self.documents))
        return Keys(self.k[:, :, s], self.v[:, :, s], self.positions[:, s], padding, documents)

    def reversed(self) -> "Keys":
        """Return the keys in reverse order, with the same distances."""
        padding, documents = (None if x is None else x.flip(1) for x in (self.padding, self.documents))
        return Keys(self.k.flip(2), self.v.flip(2), -self.positions.flip(1), padding, documents)

    def values(self, work: torch.dtype) -> Tensor:
        """Return the values in the working dtype, zero where there is padding: it may hold NaN."""
        v = self.v.to(work)
        return v if self.padding is None else v.masked_fill(~self.padding[:, None, :, None], 0.0)


def causal_attention(
    weighting: "Weighting", q: Tensor, keys: Keys, state: "LinearState"
) -> tuple[Tensor, "LinearState"]:
    """Attend from query i to all of `state` and to the keys up to key i: (b, h, n, dv), and the state after them."""
    parts = []
    for begin, end in _segments(weighting, q):
        piece, before = keys.part(begin, end), _document_before(keys, begin)
        wanted = (q, keys.k, keys.v)
        out, state = _run(_segment_output, wanted, weighting, q[:, :, begin:end], piece, before, state)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2), state


def two_sided_attention(weighting: "Weighting", q: Tensor, keys: Keys) -> Tensor:
    """Attend from each query to all keys of its document, under any decay.

    One pass runs forwards. A second one runs backwards and leaves out the key of the query itself.
    """
    numerator, denominator = _one_side(weighting, q, keys, strict=False)
    backward = _one_side(weighting, q.flip(2), keys.reversed(), strict=True)
    return divide(numerator + backward[0].flip(2), denominator + backward[1].flip(2), q.dtype)


def _one_side(weighting: "Weighting", q: Tensor, keys: Keys, *, strict: bool) -> tuple[Tensor, Tensor]:
    state, parts = weighting.empty_state(keys.k, keys.v, keys.positions), []
    for begin, end in _segments(weighting, q):
        piece, before = keys.part(begin, end), _document_before(keys, begin)
        wanted = (q, keys.k, keys.v)
        *sums, state = _run(_segment, wanted, weighting, q[:, :, begin:end], piece, before, state, strict)
        parts.append(sums)
    numerators, denominators = zip(*parts, strict=True)
    return torch.cat(numerators, dim=2), torch.cat(denominators, dim=2)


def absorb(weighting: "Weighting", keys: Keys, state: "LinearState") -> "LinearState":
    """Add keys and values to a state. Documents are ignored."""
    for begin, end in _segments(weighting, keys.k):
        state = _run(_absorb_segment, (keys.k, keys.v), weighting, keys.part(begin, end), state)
    return state


def recall(weighting: "Weighting", q: Tensor, positions: Tensor, state: "LinearState") -> Tensor:
    """Attend from each query to all of a state, whatever the order: (b, h, n, dv).

    Under a decay all queries must be at the state's own position.
    """
    parts = []
    for begin, end in _segments(weighting, q):
        wanted = (q, state.numerator)
        parts.append(_run(_recall_segment, wanted, weighting, q[:, :, begin:end], positions[:, begin:end], state))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def divide(numerator: Tensor, denominator: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute numerator / max(denominator, ε): zeros for a query that sees no key."""
    return (numerator / denominator.clamp(min=MIN_DENOMINATOR[dtype])).to(dtype)


def advance(keys: Keys, state: "LinearState", numerator: Tensor, denominator: Tensor) -> "LinearState":
    """Return the state after keys that changed the sums to `numerator` and `denominator`."""
    real = keys.positions if keys.padding is None else keys.positions.masked_fill(~keys.padding, torch.inf)
    first = torch.minimum(state.first, real.amin(-1, keepdim=True))
    position = keys.positions[:, -1:].clone()
    return state._replace(numerator=numerator, denominator=denominator, position=position, first=first)


def _run(function: Callable[..., R], wanted: tuple[Tensor, ...], *args: object) -> R:
    """Call `function`; if gradients are `wanted`, keep only its arguments and compute it again in the backward pass."""
    if wants_gradient(*wanted):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


def _segments(weighting: "Weighting", x: Tensor) -> list[tuple[int, int]]:
    """Split the positions of x (b, heads, n, d) into segments of whole chunks, and the rest."""
    b, heads, n, d = x.shape
    elements = ELEMENTS * (GPU_TIMES if x.is_cuda else 1)
    chunks = max(1, elements // (b * heads * CHUNK * weighting.numerator.width(d)))
    whole = n - n % CHUNK
    return list(pairwise(sorted({0, *range(0, whole, chunks * CHUNK), whole, n})))


def _document_before(keys: Keys, begin: int) -> Tensor | None:
    """Return the document (b, 1) of the key before `begin`; any will do at 0, where the state is empty."""
    last = max(begin - 1, 0)
    return None if keys.documents is None else keys.documents[:, last : last + 1]


def _segment_output(
    weighting: "Weighting", q: Tensor, keys: Keys, before: Tensor | None, state: "LinearState"
) -> tuple[Tensor, "LinearState"]:
    numerator, denominator, state = _segment(weighting, q, keys, before, state)
    return divide(numerator, denominator, q.dtype), state


def _segment(
    weighting: "Weighting", q: Tensor, keys: Keys, before: Tensor | None, state: "LinearState", strict: bool = False
) -> tuple[Tensor, Tensor, "LinearState"]:
    """Compute numerator (b, h, n, dv) and denominator (b, h, n, 1); `strict` leaves out a query's own key."""
    (b, h, n, _), g = q.shape, keys.k.shape[1]
    size = min(n, CHUNK)
    grid = (b, g, h // g, n // size, size)
    work = working_dtype(q.dtype)
    angles = weighting.angles(keys.positions - state.anchor, work)
    factors = _factors(weighting, keys, before, state, size, h // g, strict, work)

    def queries(x: Tensor) -> Tensor:  # (b, g, chunks, queries of all heads of the group, ·)
        return x.reshape(*grid, -1).transpose(2, 3).flatten(3, 4)

    def scores(query: Tensor, key: Tensor) -> Tensor:
        products = (query @ key.mT).unflatten(3, (grid[2], size))
        return (products * factors.within).flatten(3, 4)

    def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
        return x if factor is None else x * factor

    phi_q, psi_q = (queries(x) for x in weighting.query(q, angles))
    phi_k, psi_k = (x.unflatten(2, (-1, size)) for x in weighting.key(keys.k, keys.padding, angles))
    v = keys.values(work).unflatten(2, (-1, size))

    inside = scores(phi_q, phi_k)
    numerator = inside @ v
    denominator = (inside if weighting.shared else scores(psi_q, psi_k)).sum(-1, keepdim=True)
    del inside

    values = _prefix(state.numerator, scaled(phi_k, factors.to_end).mT @ v, factors.between)
    totals = _prefix(state.denominator, scaled(psi_k, factors.to_end).sum(-2), factors.between)
    numerator = numerator + scaled(phi_q @ values[:, :, :-1], factors.from_start)
    denominator = denominator + scaled(psi_q @ totals[:, :, :-1, :, None], factors.from_start)

    def heads(x: Tensor) -> Tensor:  # the inverse of `queries`
        return x.unflatten(3, (grid[2], size)).transpose(2, 3).reshape(b, h, n, -1)

    after = advance(keys, state, values[:, :, -1].clone(), totals[:, :, -1].clone())  # a view would keep all
    return heads(numerator), heads(denominator), after


class _Factors(NamedTuple):
    """Factors of products of features, from decay and documents; None is one."""

    within: Tensor
    """(b|1, 1, chunks|1, 1, queries, keys): the lower triangle of a chunk."""
    to_end: Tensor | None = None
    """(b|1, 1, chunks, keys, 1): from a key to the end of its chunk."""
    between: Tensor | None = None
    """(b|1, chunks + 1, chunks + 1): from the end of a chunk to the end of a later one."""
    from_start: Tensor | None = None
    """(b|1, 1, chunks, queries of all heads of a group, 1): from the end of the chunk before to a query."""


def _factors(
    weighting: "Weighting",
    keys: Keys,
    before: Tensor | None,
    state: "LinearState",
    size: int,
    groups: int,
    strict: bool,
    work: torch.dtype,
) -> _Factors:
    triangle = torch.ones(size, size, dtype=work, device=keys.k.device).tril(-1 if strict else 0)
    if not weighting.decay and keys.documents is None:
        return _Factors(triangle[None, None, None, None])
    positions = keys.positions.unflatten(1, (-1, size))  # (b|1, chunks, size)
    ends = torch.cat((state.position.expand(positions.shape[0], 1), positions[:, :, -1]), dim=1)
    low = None if keys.documents is None else 0.0  # below 0 only between documents, whose factor is 0
    within, to_end, between, from_start = (
        torch.exp(-weighting.decay * (distance if low is None else distance.clamp(min=low))).to(work)
        for distance, low in (
            (positions[:, :, :, None] - positions[:, :, None, :], 0.0),
            (ends[:, 1:, None] - positions, low),
            (ends[:, :, None] - ends[:, None, :], low),
            (positions - ends[:, :-1, None], low),
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
    return _Factors(
        (within * triangle)[:, None, :, None],
        to_end[:, None, :, :, None],
        between,
        from_start.repeat(1, 1, groups)[:, None, :, :, None],
    )


def _prefix(first: Tensor, sums: Tensor, between: Tensor | None) -> Tensor:
    """Compute the sums before each chunk and after the last: (b, g, …), (b, g, chunks, …) → (b, g, chunks + 1, …)."""
    joined = torch.cat((first[:, :, None], sums), dim=2)
    if between is None:
        return joined.cumsum(dim=2)
    mixed = between[:, None] @ joined.flatten(3)
    return mixed.unflatten(3, joined.shape[3:])


def _absorb_segment(weighting: "Weighting", keys: Keys, state: "LinearState") -> "LinearState":
    work = working_dtype(keys.k.dtype)
    phi, psi = weighting.key(keys.k, keys.padding, weighting.angles(keys.positions - state.anchor, work))
    values, totals = state.numerator, state.denominator
    if weighting.decay:
        end = keys.positions[:, -1:]
        to_end = torch.exp(-weighting.decay * (end - keys.positions)).to(work)[:, None, :, None]
        phi, psi = phi * to_end, psi * to_end
        between = torch.exp(-weighting.decay * (end - state.position)).to(work)[:, :, None]
        values, totals = values * between[..., None], totals * between
    return advance(keys, state, values + phi.mT @ keys.values(work), totals + psi.sum(-2))


def _recall_segment(weighting: "Weighting", q: Tensor, positions: Tensor, state: "LinearState") -> Tensor:
    angles = weighting.angles(positions - state.anchor, working_dtype(q.dtype))
    g = state.numerator.shape[1]
    phi, psi = (x.unflatten(1, (g, -1)).flatten(2, 3) for x in weighting.query(q, angles))
    out = divide(phi @ state.numerator, psi @ state.denominator[..., None], q.dtype)
    return out.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
