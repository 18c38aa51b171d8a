"""The public cosFormer op: contract, checks, dispatch."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.call import reference_twin
from farspan.ops.cosformer.reference import cosformer_weights, seen_only, weigh
from farspan.ops.cosformer.run import BACKENDS, place, run, silenced
from farspan.ops.cosformer.state import LinearState
from farspan.ops.cosformer.triton_backend import auto_takes_triton, triton_run
from farspan.ops.cosformer.weights import ACTIVATIONS, BEYOND, cosformer_kernel
from farspan.ops.positions import Positions, PositionsArgument
from farspan.ops.softmax.reference import visible


@overload
def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_length: int,
    causal: bool = ...,
    positions: PositionsArgument | str = ...,
    padding_mask: Tensor | None = ...,
    documents: Tensor | None = ...,
    beyond: str = ...,
    activation: str = ...,
    reweight: bool = ...,
    state: LinearState | None = ...,
    return_state: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_length: int,
    causal: bool = ...,
    positions: PositionsArgument | str = ...,
    padding_mask: Tensor | None = ...,
    documents: Tensor | None = ...,
    beyond: str = ...,
    activation: str = ...,
    reweight: bool = ...,
    state: LinearState | None = ...,
    return_state: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, LinearState]: ...


def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_length: int,
    causal: bool = True,
    positions: PositionsArgument | str = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    beyond: str = "raise",
    activation: str = "relu",
    reweight: bool = True,
    state: LinearState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """cosFormer: weights ReLU(q_i)·ReLU(k_j)·cos(π(i-j)/2M), each row divided by its sum. Time O(N), state O(1).

    `max_length` M is a constant of the model, not the length of this text: so a token's output never changes when
    the text grows. At distance M the cosine is zero and past it negative; `beyond` says what happens there
    (Δ = i-j, θ = π/2M; proofs in docs/math.md):

    * ``"raise"``: κ = cos θΔ above and below. A text longer than M is refused.
    * ``"decoupled"``: κ = cos θΔ in the numerator, 1 in the denominator. Weights turn negative, yet |o| ≤ max |v|.
    * ``"raised-cosine"``: κ = δ + (1 + cos θΔ)/2, δ = 2^-16. A mean of values for ever; a key comes back at 4M.
    * ``"decay"``: κ = e^{-|Δ|/M}·(δ + (1 + cos θΔ)/2). A mean of values for ever, and what is far fades.

    Each is its own attention also within M: a model is trained and run with one of them. A denominator is at least ε
    (2^-10 in float16, 1e-6 in bfloat16 and float32, 1e-12 in float64): where activations are so small that a row sums
    to less, its output is the mean drawn towards zero.

    Args:
        q: (b, h, n, d) queries before the activation. When n < m they are the last n positions.
        k: (b, g, m, d) keys before the activation; g divides h.
        v: (b, g, m, dv) values.
        max_length: M.
        causal: a query sees keys up to itself; False sees all (encoder, cross attention).
        positions: see :mod:`farspan.ops.positions`; a pair places queries and keys freely, and "proportional" spreads
            n queries evenly over m keys (cross attention, causal=False). With a state, None goes on after it.
        padding_mask: (b, m) bool, True = keep. A query that is padding or sees nothing gives zeros.
        documents: (b, m) int, adjacent tokens of one number; a query sees its own document only.
        activation: "relu" (the paper) or "elu" (elu + 1).
        reweight: False leaves the cosine out (linear attention, the paper's ablation).
        state: what an earlier call returned: this call continues its text, and q, k, v are the new tokens only.
        return_state: also return the state after the last key. Any cutting into calls gives the same outputs.
        backend: "chunked" (O(N) time and memory, plain torch), "triton" (the same in kernels, see
            :mod:`farspan.ops.cosformer.triton_backend`; refuses with the reason where they cannot run), "reference"
            (the definition, N×N), or "auto": the kernels where they are measured to be faster, else "chunked".

    Returns:
        (b, h, n, dv) in q's dtype; with `return_state` a pair of it and a :class:`LinearState` of constant size.

    "raise" reads position tensors, which makes a GPU wait, and reads nothing under torch.compile.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
    >>> whole = cosformer_attention(q, k, v, max_length=64)
    >>> start, state = cosformer_attention(q[:, :, :7], k[:, :, :7], v[:, :, :7], max_length=64, return_state=True)
    >>> rest = cosformer_attention(q[:, :, 7:], k[:, :, 7:], v[:, :, 7:], max_length=64, state=state)
    >>> torch.allclose(whole, torch.cat((start, rest), dim=2), atol=1e-6), state.nbytes
    (True, 1176)
    """
    require(
        isinstance(max_length, int) and max_length >= 1,
        f"max_length must be a whole number ≥ 1, the M of the model, got {max_length!r}; use the length of training",
    )
    require_choice("beyond", beyond, BEYOND)
    require_choice("activation", activation, ACTIVATIONS)
    require_choice("backend", backend, (*BACKENDS, "triton"))
    places = place(
        q,
        k,
        v,
        key_name="k",
        key_width=q.shape[-1],
        causal=causal,
        positions=positions,
        padding_mask=padding_mask,
        documents=documents,
        state=state,
        return_state=return_state,
        backend=backend,
    )
    if reweight and beyond == "raise":
        _check_reach(places, max_length, causal, padding_mask, documents, state)
    if backend == "reference":
        mask = visible(places, causal=causal, window=None, padding_mask=padding_mask, documents=documents)
        weights = cosformer_weights(
            q,
            seen_only(k, mask),
            places.query[:, None, :, None] - places.key[:, None, None, :],
            max_length=max_length,
            beyond=beyond,
            activation=activation,
            reweight=reweight,
        )
        return silenced(weigh(*weights, seen_only(v, mask), mask), places, padding_mask)
    kernel = cosformer_kernel(max_length, beyond, activation, reweight)
    options: dict[str, Any] = {"causal": causal, "padding_mask": padding_mask, "documents": documents, "state": state}
    fused = backend == "auto" and auto_takes_triton(kernel, q, v, places, causal, documents)
    if fused or backend == "triton":
        out, after = triton_run(kernel, q, k, v, places, **options, return_state=return_state)
    else:
        out, after = run(kernel, q, k, v, places, **options)
    if not return_state:
        return out
    assert after is not None
    return out, after


cosformer_attention_reference = reference_twin(cosformer_attention)


def _check_reach(
    places: Positions,
    max_length: int,
    causal: bool,
    padding: Tensor | None,
    documents: Tensor | None,
    state: LinearState | None,
) -> None:
    """No query may meet a key M or more away: its weight would not be positive."""
    if places.first is not None and state is None and places.m <= max_length:
        return
    known = places.first is not None and state is None and padding is None and documents is None
    if known:
        reach = float(places.m - 1)
    elif torch.compiler.is_compiling():
        return
    else:
        reach = _reach(places, causal, padding, documents, state)
    require(
        reach < max_length,
        f"max_length is M = {max_length} and this text spans {reach + 1:.0f} positions, where cos(πΔ/2M) turns "
        "negative; split it, train with a larger max_length, or choose beyond='decoupled', 'raised-cosine' or 'decay'",
    )


def _reach(
    places: Positions, causal: bool, padding: Tensor | None, documents: Tensor | None, state: LinearState | None
) -> float:
    """The largest distance of a key from a query that sees it, padding aside."""
    query, key = places.query.double(), places.key.double()
    rows = [x.shape[0] for x in (key, padding, documents) if x is not None]
    key = key.expand(max(rows), -1)
    low, high = key, key
    if padding is not None:
        low, high = key.masked_fill(~padding, torch.inf), key.masked_fill(~padding, -torch.inf)
    if not places.aligned:
        behind, ahead = query.amax(-1) - low.amin(-1), high.amax(-1) - query.amin(-1)
        return float((behind if causal else torch.maximum(behind, ahead)).amax())
    runs = torch.zeros_like(key, dtype=torch.long)
    if documents is not None:
        runs[:, 1:] = (documents[:, 1:] != documents[:, :-1]).cumsum(-1)
    first = torch.full_like(key, torch.inf).scatter_reduce(1, runs, low, "amin")
    last = torch.full_like(key, -torch.inf).scatter_reduce(1, runs, high, "amax")
    if state is not None:
        first = torch.minimum(first, state.first)
    return float((last - first).amax())
