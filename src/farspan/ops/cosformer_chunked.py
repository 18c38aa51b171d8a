"""Linear attention in chunks: time O(N), and the features of one segment at a time.

A chunk weighs all pairs of its own tokens; everything older comes from the running sums before it. A segment is a run
of chunks computed in parallel. Between segments only the sums go on, as between the calls of a stream. In training the
backward pass computes each segment again: autograd keeps q, k, v, the output, and one state per segment.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
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

    def values(self) -> Tensor:
        """Return the values in the working dtype, zero where there is padding."""
        return hide(self.v.to(working_dtype(self.v.dtype)), self.padding)


def hide(x: Tensor, padding: Tensor | None) -> Tensor:
    """Zero what x (b, g, m, ·) holds at padding: it may be NaN."""
    return x if padding is None else x.masked_fill(~padding[:, None, :, None], 0.0)


def divide(numerator: Tensor, denominator: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute numerator / max(denominator, ε): zeros for a query that sees no key."""
    return (numerator / denominator.clamp(min=MIN_DENOMINATOR[dtype])).to(dtype)


def causal_attention(
    weighting: "Weighting", q: Tensor, keys: Keys, state: "LinearState"
) -> tuple[Tensor, "LinearState"]:
    """Attend from query i to all of `state` and to the keys up to key i: (b, h, n, dv), and the state after them."""
    parts, wanted = [], (q, keys.k, keys.v)
    for begin, end in _segments(weighting, q):
        out, state = _run(_segment, wanted, weighting, q, keys, begin, end, state)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2), state


def absorb(weighting: "Weighting", keys: Keys, state: "LinearState") -> "LinearState":
    """Add keys and values to a state. Documents are ignored."""
    for begin, end in _segments(weighting, keys.k):
        state = _run(_absorb_segment, (keys.k, keys.v), weighting, keys.part(begin, end), state)
    return state


def recall(weighting: "Weighting", q: Tensor, positions: Tensor, state: "LinearState") -> Tensor:
    """Attend from each query to all of a state, whatever the order: (b, h, n, dv).

    Under a decay all queries must be at the state's own position.
    """
    parts, wanted = [], (q, state.numerator)
    for begin, end in _segments(weighting, q):
        parts.append(_run(_recall_segment, wanted, weighting, q[:, :, begin:end], positions[:, begin:end], state))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


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


def _segment(
    weighting: "Weighting", q: Tensor, keys: Keys, begin: int, end: int, state: "LinearState"
) -> tuple[Tensor, "LinearState"]:
    """Attend from queries begin … end-1: see :func:`causal_attention`."""
    size = min(end - begin, CHUNK)
    within, to_end, between, from_start = _factors(weighting, keys, begin, end, state, size)
    q, keys = q[:, :, begin:end], keys.part(begin, end)
    (b, h, n, _), g = q.shape, keys.k.shape[1]
    angles = weighting.angles(keys.positions - state.anchor, state.numerator.dtype)

    def queries(x: Tensor) -> Tensor:  # (b, g, chunks, queries of all heads of the group, ·)
        return x.reshape(b, g, h // g, n // size, size, -1).transpose(2, 3).flatten(3, 4)

    def heads(x: Tensor) -> Tensor:  # the inverse of `queries`
        return x.unflatten(3, (h // g, size)).transpose(2, 3).reshape(b, h, n, -1)

    def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
        return x if factor is None else (x.unflatten(3, (-1, size)) * factor[:, None, :, None]).flatten(3, 4)

    phi_q, psi_q = (queries(x) for x in weighting.query(q, angles))
    phi_k, psi_k = (x.unflatten(2, (-1, size)) for x in weighting.key(keys.k, keys.padding, angles))
    v = keys.values().unflatten(2, (-1, size))

    inside = scaled(phi_q @ phi_k.mT, within)
    numerator = inside @ v
    denominator = (inside if weighting.shared else scaled(psi_q @ psi_k.mT, within)).sum(-1, keepdim=True)
    del inside

    phi_k, psi_k = scaled(phi_k, to_end), scaled(psi_k, to_end)
    values = _prefix(state.numerator, phi_k.mT @ v, between)
    totals = _prefix(state.denominator, psi_k.sum(-2), between)
    numerator = numerator + scaled(phi_q @ values[:, :, :-1], from_start)
    denominator = denominator + scaled(psi_q @ totals[:, :, :-1, :, None], from_start)

    after = advance(keys, state, values[:, :, -1].clone(), totals[:, :, -1].clone())  # a view would keep all
    return divide(heads(numerator), heads(denominator), q.dtype), after


def _factors(
    weighting: "Weighting", keys: Keys, begin: int, end: int, state: "LinearState", size: int
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute factors of products of features, from decay and documents; None is one.

    Within a chunk, (b|1, chunks|1, queries, keys); from a key to the end of its chunk, (b|1, chunks, keys, 1); from the
    end of a chunk to that of a later one, (b|1, chunks + 1, chunks + 1); and from there to a query, (b|1, chunks,
    queries, 1).
    """
    work = state.numerator.dtype
    triangle = torch.ones(1, 1, size, size, dtype=work, device=keys.k.device).tril()
    if not weighting.decay and keys.documents is None:
        return triangle, None, None, None
    positions = torch.cat((state.position.expand(keys.positions.shape[0], 1), keys.positions[:, begin:end]), dim=1)
    documents = torch.zeros_like(positions)
    if keys.documents is not None:  # that before the first key is of no matter: the state is empty
        documents = F.pad(keys.documents.double(), (1, 0))[:, begin : end + 1]
    tokens = torch.stack(torch.broadcast_tensors(positions, documents))  # (2, b|1, 1 + n), the first before `begin`
    inside, ends = tokens[:, :, 1:].unflatten(2, (-1, size)), tokens[:, :, ::size]

    def factor(later: Tensor, earlier: Tensor) -> Tensor:
        distance, change = later[..., :, None] - earlier[..., None, :]
        decayed = torch.exp(-weighting.decay * distance.clamp(min=0.0))  # below 0 only between documents
        return decayed.masked_fill(change != 0, 0.0).to(work)

    to_end, from_start = factor(ends[:, :, 1:, None], inside).mT, factor(inside, ends[:, :, :-1, None])
    return factor(inside, inside) * triangle, to_end, factor(ends, ends).tril(), from_start


def _prefix(first: Tensor, sums: Tensor, between: Tensor | None) -> Tensor:
    """Compute the sums before each chunk and after the last: (b, g, …), (b, g, chunks, …) → (b, g, chunks + 1, …)."""
    joined = torch.cat((first[:, :, None], sums), dim=2)
    if between is None:
        return joined.cumsum(dim=2)
    return (between[:, None] @ joined.flatten(3)).unflatten(3, joined.shape[3:])


def _absorb_segment(weighting: "Weighting", keys: Keys, state: "LinearState") -> "LinearState":
    values, totals = state.numerator, state.denominator
    phi, psi = weighting.key(keys.k, keys.padding, weighting.angles(keys.positions - state.anchor, values.dtype))
    if weighting.decay:
        end = keys.positions[:, -1:]
        to_end, between = (
            torch.exp(-weighting.decay * (end - x)).to(values.dtype)[:, None, :, None]
            for x in (keys.positions, state.position)
        )
        phi, psi = phi * to_end, psi * to_end
        values, totals = values * between, totals * between[..., 0]
    return advance(keys, state, values + phi.mT @ keys.values(), totals + psi.sum(-2))


def _recall_segment(weighting: "Weighting", q: Tensor, positions: Tensor, state: "LinearState") -> Tensor:
    angles = weighting.angles(positions - state.anchor, state.numerator.dtype)
    phi, psi = (x.unflatten(1, (state.numerator.shape[1], -1)).flatten(2, 3) for x in weighting.query(q, angles))
    out = divide(phi @ state.numerator, psi @ state.denominator[..., None], q.dtype)
    return out.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
