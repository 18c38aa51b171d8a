"""From a checked call to the chunked machinery: which passes over the text a linear attention needs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.errors import require
from farspan.ops.call import check_mask, check_tensors, drop_trivial
from farspan.ops.cosformer import chunked
from farspan.ops.cosformer.chunked import Keys
from farspan.ops.cosformer.state import LinearState
from farspan.ops.cosformer.weights import Kernel
from farspan.ops.positions import Positions, PositionsArgument, resolve

BACKENDS = ("auto", "reference", "chunked")


def place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_name: str,
    key_width: int,
    causal: bool,
    positions: PositionsArgument | str,
    padding_mask: Tensor | None,
    documents: Tensor | None,
    state: LinearState | None,
    return_state: bool,
    backend: str,
) -> Positions:
    """Refuse what cannot be meant, with argument, value and remedy; say where queries and keys stand."""
    check_tensors(q, k, v, key_name, key_width)
    (b, _, n, _), m = q.shape, k.shape[2]
    check_mask("padding_mask", padding_mask, (b, m), boolean=True)
    check_mask("documents", documents, (b, m), boolean=False)
    free = isinstance(positions, tuple | str)
    require(not (free and documents is not None), "documents cannot be combined with a pair of positions; use a tensor")
    require(
        free or n <= m,
        f"queries are the last keys, so there must be at least as many keys as queries, got {n} queries and {m} keys; "
        "pass positions=(of queries, of keys), or 'proportional' for cross attention",
    )
    if state is not None or return_state:
        _check_stream(causal, free, documents, backend)
    _check_documents(documents)
    if isinstance(positions, str):
        require(
            positions == "proportional" and not causal,
            f"positions given as a word must be 'proportional', with causal=False, got {positions!r} "
            f"and causal={causal}; or give the numbers",
        )
        return _proportional(n, m, q.device)
    if state is not None and positions is None:
        keys = state.position.long() + 1 + torch.arange(m, device=q.device)
        return Positions(n, m, q.device, None, (keys[:, m - n :], keys), True)
    places = resolve(positions, n, m, q.device, documents)
    rows = places.query.shape[0], places.key.shape[0]
    require(
        {*rows} <= {1, b},
        f"positions must have 1 or {b} rows, like the batch, got {rows[0]} of queries, {rows[1]} of keys",
    )
    if state is not None:
        _check_goes_on(places, state)
    return places


def run(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Positions,
    *,
    causal: bool,
    padding_mask: Tensor | None,
    documents: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, LinearState | None]:
    """The chunked form of any call → (b, h, n, dv) and, for an aligned causal text, the state after it."""
    with torch.autocast(q.device.type, enabled=False):  # it would take the sums to half precision
        keep = drop_trivial(padding_mask)
        out, after = _run(kernel, q, k, v, places, causal, keep, documents, state)
    return silenced(out, places, keep), after


def silenced(out: Tensor, places: Positions, padding: Tensor | None) -> Tensor:
    """Zeros where the query itself is padding: it may stand past M, where "raise" has no bound."""
    if padding is None or not places.aligned:
        return out
    return out.masked_fill(~padding[:, None, places.m - places.n :, None], 0.0)


def _run(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Positions,
    causal: bool,
    keep: Tensor | None,
    documents: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, LinearState | None]:
    n, m = places.n, places.m
    query, key = places.query.double(), places.key.double()
    if state is not None:
        check_state(kernel, k, v, state)
        key = key.expand(max(key.shape[0], state.position.shape[0]), m)
    keys = Keys(k, v, key, keep, documents)
    if not causal and documents is None and not kernel.decay:
        return chunked.recall(kernel, q, query, chunked.absorb(kernel, keys, chunked.start(kernel, keys))), None
    if not places.aligned:
        return _free(kernel, q, keys, query, causal), None
    state = state or chunked.start(kernel, keys)
    if n == 1 and causal and documents is None:  # a decoding step sees every key
        state = chunked.absorb(kernel, keys, state)
        return chunked.recall(kernel, q, query, state), state
    if n < m and causal and documents is None:
        state = chunked.absorb(kernel, keys.cut(0, m - n), state)
        return chunked.causal(kernel, q, keys.cut(m - n, m), state)
    q = F.pad(q, (0, 0, m - n, 0)) if n < m else q
    if not causal:
        return chunked.two_sided(kernel, q, keys)[:, :, m - n :], None
    out, state = chunked.causal(kernel, q, keys, state)
    return out[:, :, m - n :], state


def _free(kernel: Kernel, q: Tensor, keys: Keys, query: Tensor, causal: bool) -> Tensor:
    """Queries and keys at any places: one text of both by position, where each slot is one or the other."""
    b, n, m = q.shape[0], q.shape[2], keys.k.shape[2]
    places = torch.cat((keys.positions.expand(b, m), query.expand(b, n)), dim=1)
    order = places.argsort(dim=1, stable=True)  # a key before the query at the same place, which sees it
    keep = torch.ones(b, m, dtype=torch.bool, device=q.device) if keys.keep is None else keys.keep

    def take(x: Tensor, order: Tensor) -> Tensor:
        return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    q = take(F.pad(q, (0, 0, m, 0)), order)
    k, v = (take(F.pad(x, (0, 0, 0, n)), order) for x in (keys.k, keys.v))
    merged = Keys(k, v, places.gather(1, order), F.pad(keep, (0, n)).gather(1, order), None)
    if causal:
        out, _ = chunked.causal(kernel, q, merged, chunked.start(kernel, merged))
    else:
        out = chunked.two_sided(kernel, q, merged)
    return take(out, order.argsort(dim=1)[:, m:])


def _proportional(n: int, m: int, device: torch.device) -> Positions:
    """Queries spread evenly over the keys: query i at (i + ½)·m/n - ½, so equal lengths stand at equal places."""
    query = (torch.arange(n, dtype=torch.float64, device=device) + 0.5) * (m / n) - 0.5
    return Positions(n, m, device, None, (query[None], torch.arange(m, device=device)[None]), False)


def _check_stream(causal: bool, free: bool, documents: Tensor | None, backend: str) -> None:
    """What a call that takes or gives a state cannot be combined with."""
    require(causal, "state needs causal=True, got causal=False; the past is all a state remembers")
    require(not free, "state needs aligned positions, got queries and keys placed freely; use a tensor")
    require(
        documents is None, "documents cannot be combined with state or return_state; give each document its own call"
    )
    require(
        backend != "reference", "backend='reference' keeps no state: it must see every key; pass the whole text at once"
    )


def _check_goes_on(places: Positions, state: LinearState) -> None:
    """Under a decay a step back would multiply the sums instead of fading them."""
    if places.device.type != "cpu" or torch.compiler.is_compiling():
        return
    step = places.key[:, :1] - state.position
    require(
        bool((step >= 0).all()),
        f"positions must not go back behind the state, which stands at {int(state.position.max())}, got a step of "
        f"{int(step.min())}; leave positions out to go on after it",
    )


def check_state(kernel: Kernel, k: Tensor, v: Tensor, state: LinearState) -> None:
    """A state continues the attention and the layer that made it."""
    require(
        state.kernel == kernel.name,
        f"state was made by {state.kernel!r} and cannot continue as {kernel.name!r}; start without a state",
    )
    held, new = (*state.numerator.shape[:2], state.numerator.shape[3]), (*k.shape[:2], v.shape[3])
    require(
        held == new,
        f"state must have batch, key heads and value width {new}, got {held}; it belongs to another layer or batch",
    )


def _check_documents(documents: Tensor | None) -> None:
    """The tokens of a document must be adjacent: sums cannot be taken apart again."""
    if documents is None or documents.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for row, numbers in enumerate(documents):
        runs = int((numbers[1:] != numbers[:-1]).sum()) + 1
        require(
            runs == numbers.unique().numel(),
            f"documents must be adjacent runs of one number each, got one that comes back in row {row}; sort the row",
        )
