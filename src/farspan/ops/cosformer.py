"""cosFormer (arXiv 2202.08791), linear attention with cosine weights: the op, its state and its dispatch table.

A linear attention has weights Σ_f a_f t_f κ_f(Δ), with features a ≥ 0 of the query, t ≥ 0 of the key, and

    κ_f(Δ) = e^{-λ|Δ|} · (constant + wave · cos ω_f Δ),    Δ = position of the query - position of the key.

Since cos ω(i-j) = cos ωi·cos ωj + sin ωi·sin ωj, one to three features per f carry κ. Two running sums over the keys,
Σ φ(k)⊗v and Σ ψ(k), then replace all past keys.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.cosformer_chunked import Keys, absorb, advance, causal_attention, hide, recall
from farspan.ops.device import (
    is_hopper,
    is_traced,
    takes_forward_derivatives,
    wants_gradient,
    why_not_triton,
    working_dtype,
)
from farspan.ops.dispatch import Implementation, Table, mask_of, operation, reference_twin
from farspan.ops.masking import AttentionMask, MaskOptions, Positions, check_tensors
from farspan.ops.reference import ACTIVATIONS, MIN_DENOMINATOR, MIN_WEIGHT, cosformer_weights, seen_only, visible, weigh

BEYOND = ("raise", "decoupled", "decay")
"""What a weight is past distance M, see :func:`cosformer_attention`."""
WIDEST = 128
"""Widest head that the kernels take."""


class LinearState(NamedTuple):
    """Running sums over a sequence, and its positions. The size depends on the layer alone.

    The sums stay in the frame of the `anchor`: a query is rotated by its distance from there. Rotating the sums at each
    token would drift: in float32, at M = 1000, a million rotations scale the oldest keys by 0.98. Only `decay` moves
    the sums, to the `position` of the newest key.
    """

    numerator: Tensor
    """Σ φ(k)⊗v, (b, g, F, dv), float32 or wider."""
    denominator: Tensor
    """Σ ψ(k), (b, g, F')."""
    anchor: Tensor
    """The position that angles are measured from, (b|1, 1), float64."""
    position: Tensor
    """The position of the newest key, padding included, (b|1, 1): the next call continues at position + 1."""
    first: Tensor
    """The position of the first key that is not padding, (b|1, 1); infinite if there is none."""
    weighting: Hashable
    """The name of the weighting that made the sums; no other can continue them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.numel() * x.element_size() for x in self[:5])

    def detach(self) -> "LinearState":
        """Return the state without its autograd history, to train on one segment of a sequence after another."""
        return self._replace(numerator=self.numerator.detach(), denominator=self.denominator.detach())


class LinearOptions(TypedDict, total=False):
    """What all linear ops take beside their own arguments, see :func:`cosformer_attention`."""

    positions: Positions
    causal: bool
    padding_mask: Tensor | None
    documents: Tensor | None
    mask: AttentionMask | None
    state: LinearState | None
    return_state: bool
    backend: str


@operation(LinearOptions, Tensor | tuple[Tensor, LinearState])
def cosformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_length: int,
    beyond: str = "raise",
    activation: str = "relu",
    reweight: bool = True,
    **options: Unpack[LinearOptions],
) -> "LinearCall":
    """Compute cosFormer in O(N): weights ReLU(q_i)·ReLU(k_j)·cos(π(i-j)/2M), each row divided by its sum.

    `max_length` M is a constant of the model, not the length of the sequence. An output therefore never changes as the
    sequence grows. The cosine is zero at distance M and negative past it; `beyond` sets what happens there
    (Δ = i-j, θ = π/2M; proofs in docs/math.md):

    * ``"raise"``: κ = cos θΔ in numerator and denominator. Longer sequences than M raise an error.
    * ``"decoupled"``: κ = cos θΔ in the numerator, 1 in the denominator. Weights may be negative, but |o| ≤ max |v|.
    * ``"decay"``: κ = e^{-|Δ|/M}·(δ + (1 + cos θΔ)/2), δ = 2^-16. Always a mean of values; distant keys fade.

    They differ within M too: train and run a model with the same one. "raise" reads position tensors, which makes a
    GPU wait, except under torch.compile. The denominator is at least ε: 2^-10 in float16, 1e-6 in bfloat16 and float32,
    1e-12 in float64. A row that sums to less is drawn towards zero.

    Args:
        q: (b, h, n, d) queries before the activation. If n < m they are the last n positions.
        k: (b, g, m, d) keys before the activation; g divides h.
        v: (b, g, m, dv) values.
        max_length: M.
        causal: a query sees keys up to itself; False sees all.
        positions: None, an int or a tensor, see :mod:`farspan.ops.masking`. With a state, None continues after it.
        padding_mask: (b, m) bool, True = keep. A query that is padding or sees nothing returns zeros. What padded keys
            and values hold, even NaN, reaches no output.
        documents: (b, m) int, not decreasing; a query sees its own document only.
        mask: a ready :class:`~farspan.ops.masking.AttentionMask` instead of the four arguments above. With a state, it
            covers the new tokens, at their own positions.
        activation: "relu" (the paper) or "elu" (elu + 1).
        reweight: False omits the cosine (linear attention, the paper's ablation).
        state: what an earlier call returned: continue its sequence. q, k, v then hold the new tokens only.
        return_state: also return the state after the last key. Every split into calls gives the same outputs.
        backend: "auto", "chunked" (torch, O(N) memory), "triton" (causal "raise" with ReLU; no second derivatives) or
            "reference" (the definition, N×N; "auto" takes it for documents or a decay with causal=False), see
            :func:`farspan.ops.explain`.

    Returns:
        (b, h, n, dv) in q's dtype; with `return_state` a pair of it and a :class:`LinearState`.

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
    raised, activate = Curve(0.5 + MIN_WEIGHT, 0.5), ACTIVATIONS[activation]
    curves = {"raise": (COSINE, COSINE), "decoupled": (COSINE, ONE), "decay": (raised, raised)}
    numerator, denominator = curves[beyond] if reweight else (ONE, ONE)
    weighting = Weighting(
        name=f"cosformer, M = {max_length}, beyond {beyond}, {activation}" if reweight else f"linear, {activation}",
        definition=partial(
            cosformer_weights, max_length=max_length, beyond=beyond, activation=activation, reweight=reweight
        ),
        frequency=math.pi / (2 * max_length),
        numerator=numerator,
        denominator=denominator,
        query_map=activate,
        key_map=activate,
        decay=1.0 / max_length if reweight and beyond == "decay" else 0.0,
        period=4.0 * max_length,
    )
    call = check_linear_call(COSFORMER, q, k, v, weighting, **options)
    if reweight and beyond == "raise":
        _check_reach(call, max_length)
    return call


# Weighting


Waves = tuple[Tensor, Tensor]
"""Cosines and sines of angles."""


class Curve(NamedTuple):
    """constant + wave·cos ωΔ."""

    constant: float
    wave: float

    def width(self, features: int) -> int:
        """Return the width of :meth:`lift` for so many features."""
        return features * (int(self.constant != 0) + 2 * int(self.wave != 0))

    def lift(self, x: Tensor, angles: Waves, scaled: bool) -> Tensor:
        """Compute x, x·cos and x·sin side by side, where not zero; if `scaled`, times their coefficients."""
        parts = [x * self.constant if scaled else x] if self.constant else []
        if self.wave:
            x = x * self.wave if scaled and self.wave != 1 else x
            parts += [x * angle for angle in angles]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


COSINE, ONE = Curve(0, 1), Curve(1, 0)


@dataclass(frozen=True)
class Weighting:
    """κ of numerator and denominator, and the maps from queries and keys to features a, t ≥ 0."""

    name: Hashable
    """Everything that a state depends on."""
    definition: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q, k, distances) → all weights of numerator and denominator, for the reference."""
    frequency: float | Tensor
    """ω, one for all features or (f)."""
    numerator: Curve
    denominator: Curve
    query_map: Callable[[Tensor], Tensor]
    key_map: Callable[[Tensor], Tensor]
    decay: float = 0.0
    """λ"""
    period: float | None = None
    """Period of all angles. Positions are reduced by it first, and are exact at any distance."""

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Waves:
        """Compute cos and sin of ω·position for (b|1, n) float64: (b|1, 1, n, 1 | f), rounded at the end."""
        if self.period is not None:
            positions = positions.remainder(self.period)
        phase = positions[:, None, :, None] * self.frequency
        return phase.cos().to(dtype), phase.sin().to(dtype)

    def query(self, q: Tensor, angles: Waves) -> tuple[Tensor, Tensor]:
        """Compute φ(q) and ψ(q), which carry the coefficients of both curves."""
        return self._lift(self.query_map(q.to(working_dtype(q.dtype))), angles, scaled=True)

    def key(self, k: Tensor, padding: Tensor | None, angles: Waves) -> tuple[Tensor, Tensor]:
        """Compute φ(k) and ψ(k), zeros where there is padding (b, n)."""
        # Hide before the map, whose derivative at NaN is NaN; and after it, since elu(0) + 1 = 1.
        t = hide(self.key_map(hide(k.to(working_dtype(k.dtype)), padding)), padding)
        return self._lift(t, angles, scaled=False)

    def _lift(self, x: Tensor, angles: Waves, scaled: bool) -> tuple[Tensor, Tensor]:
        phi = self.numerator.lift(x, angles, scaled)
        return phi, phi if self.shared else self.denominator.lift(x, angles, scaled)

    @property
    def shared(self) -> bool:
        """Whether numerator and denominator have the same weights: the output is then a mean of values."""
        return self.numerator == self.denominator

    def empty_state(self, keys: Keys) -> LinearState:
        """Return the state before these keys; the position of the first of them is the anchor."""
        (b, g), work = keys.k.shape[:2], working_dtype(keys.k.dtype)
        width, anchor = keys.k.shape[-1], keys.positions[:, :1].clone()
        sums = keys.k.new_zeros(b, g, self.numerator.width(width), keys.v.shape[-1], dtype=work)
        totals = sums.new_zeros(b, g, self.denominator.width(width))
        return LinearState(sums, totals, anchor, anchor - 1, torch.full_like(anchor, torch.inf), self.name)


# Checks


@dataclass(frozen=True, eq=False)
class LinearCall:
    """The checked arguments of a linear attention op."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    weighting: Weighting
    state: LinearState | None
    return_state: bool
    backend: str
    table: Table

    @property
    def streams(self) -> bool:
        """Whether the call takes or returns a state."""
        return self.state is not None or self.return_state

    def run(self) -> Any:
        """Run on the first implementation that can: the output, or a pair of it and the state after."""
        mask = self.mask
        with torch.autocast(self.q.device.type, enabled=False):  # it would round the sums
            out, state = self.table.choose(self).run(self)
        if mask.padding is not None:  # a padded query may be past M, where "raise" has no bound
            out = out.masked_fill(~mask.padding[:, None, mask.m - mask.n :, None], 0.0)
        return (out, state) if self.return_state else out


def check_linear_call(
    table: Table,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weighting: Weighting,
    *,
    mask: AttentionMask | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    backend: str = "auto",
    **masking: Unpack[MaskOptions],
) -> LinearCall:
    """Check the arguments that linear ops share; `masking` makes the mask if there is none."""
    require_choice("backend", backend, table.backends)
    check_tensors(q, k, v, table.key_name, q.shape[-1] // 2 if table.key_name == "t" else q.shape[-1])
    continues = mask is None and state is not None and masking.get("positions") is None
    mask = mask_of(q, k, mask, masking)
    if continues:  # at the position after the state
        keys = state.position.long() + 1 + torch.arange(mask.m, device=q.device)  # type: ignore[union-attr]
        mask.first, mask.positions = None, (keys[:, mask.m - mask.n :], keys)
    require(mask.window is None, lambda: f"linear attention has no window, got window {mask.window}; leave it out")
    require(mask.aligned, "linear attention takes one position per key, got a pair of positions; use a tensor")
    documents = mask.documents
    if documents is not None and documents.device.type == "cpu" and not torch.compiler.is_compiling():
        require(
            bool((documents[:, 1:] >= documents[:, :-1]).all()),
            "documents must not decrease in linear attention, whose sums are not taken apart; number them in order",
        )
    call = LinearCall(q, k, v, mask, weighting, state, return_state, backend, table)
    if call.streams:
        _check_stream(call)
    return call


def _check_stream(call: LinearCall) -> None:
    mask, state = call.mask, call.state
    require(mask.causal, "state needs causal=True, got causal=False; a state holds only past keys")
    require(
        mask.documents is None, "documents cannot be combined with state or return_state; use one call per document"
    )
    if state is None:
        return
    require(
        state.weighting == call.weighting.name,
        lambda: f"state was made by {state.weighting} and cannot continue as {call.weighting.name}; start without one",
    )
    held, new = (*state.numerator.shape[:2], state.numerator.shape[3]), (*call.k.shape[:2], call.v.shape[3])
    require(
        held == new,
        lambda: f"state must have batch, key heads and value width {new}, got {held}; it is of another layer or batch",
    )
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():  # going back, a decay would grow
        step = mask.key_positions[:, :1] - state.position
        require(
            bool((step >= 0).all()),
            lambda: (
                f"positions must not go back behind the state at {int(state.position.max())}, got a step of "
                f"{int(step.min())}; omit positions to continue after it"
            ),
        )


def _check_reach(call: LinearCall, max_length: int) -> None:
    """Check that no query sees a key M or more away, whose weight would not be positive."""
    mask, state = call.mask, call.state
    counted = mask.first is not None and state is None
    if counted and mask.m <= max_length:
        return
    if counted and mask.padding is None and mask.documents is None:
        reach = float(mask.m - 1)
    elif torch.compiler.is_compiling():
        return
    else:
        reach = mask.share("reach", lambda: _reach(mask, None)) if state is None else _reach(mask, state)
    require(
        reach < max_length,
        lambda: (
            f"max_length is M = {max_length} and the sequence spans {reach + 1:.0f} positions, where cos(πΔ/2M) is "
            "negative; split it, train with a larger max_length, or choose beyond='decoupled' or 'decay'"
        ),
    )


def _reach(mask: AttentionMask, state: LinearState | None) -> float:
    """Compute the largest distance between two tokens of one document, without padding."""
    key = mask.key_positions.double()
    key = key.expand(max(x.shape[0] for x in (key, mask.padding, mask.documents) if x is not None), -1)
    low, high = key, key
    if mask.padding is not None:
        low, high = key.masked_fill(~mask.padding, torch.inf), key.masked_fill(~mask.padding, -torch.inf)
    runs = torch.zeros_like(key, dtype=torch.long)
    if mask.documents is not None:
        runs[:, 1:] = (mask.documents[:, 1:] != mask.documents[:, :-1]).cumsum(-1)
    first = torch.full_like(key, torch.inf).scatter_reduce(1, runs, low, "amin")
    last = torch.full_like(key, -torch.inf).scatter_reduce(1, runs, high, "amax")
    if state is not None:
        first = torch.minimum(first, state.first)
    return float((last - first).amax())


# Implementations


def _reference(call: LinearCall) -> tuple[Tensor, None]:
    seen = visible(call.mask)
    distance = call.mask.query_positions[:, None, :, None] - call.mask.key_positions[:, None, None, :]
    weights = call.weighting.definition(call.q, seen_only(call.k, seen), distance)
    return weigh(*weights, seen_only(call.v, seen), seen), None


def _why_not_reference(call: LinearCall) -> str | None:
    return "backend='reference' has no state; pass the whole sequence at once" if call.streams else None


def _keys(call: LinearCall) -> Keys:
    positions, state = call.mask.key_positions.double(), call.state
    if state is not None:
        positions = positions.expand(max(positions.shape[0], state.position.shape[0]), -1)
    return Keys(call.k, call.v, positions, call.mask.padding, call.mask.documents)


def _chunked(call: LinearCall) -> tuple[Tensor, LinearState]:
    q, mask, weighting, keys = call.q, call.mask, call.weighting, _keys(call)
    state = call.state or weighting.empty_state(keys)
    if not mask.causal or (mask.documents is None and mask.n == 1):  # each query sees each key
        state = absorb(weighting, keys, state)
        return recall(weighting, q, mask.query_positions.double(), state), state
    before = mask.m - mask.n
    q = F.pad(q, (0, 0, before, 0)) if before else q  # one query per key
    out, state = causal_attention(weighting, q, keys, state)
    return out[:, :, before:], state


def _why_not_chunked(call: LinearCall) -> str | None:
    mask = call.mask
    if not mask.causal and (mask.documents is not None or call.weighting.decay):
        return "backend='chunked' takes documents and a decay only with causal=True; use backend='reference'"
    return None


def _why_not_triton(call: LinearCall) -> str | None:
    """Return why the kernels do not take a call, or None; "auto" takes them where they were measured to be faster."""
    q, mask, weighting = call.q, call.mask, call.weighting
    if call.backend == "auto" and not (is_hopper(q.device.index) and q.dtype == torch.bfloat16 and mask.n > 1):
        return "the kernels are chosen for bfloat16 on Hopper GPUs, and more than one query"
    relu = weighting.query_map is ACTIVATIONS["relu"]
    if not (relu and weighting.numerator == weighting.denominator == COSINE):
        return "backend='triton' takes beyond='raise' with ReLU and re-weighting; use backend='chunked'"
    if not (mask.causal and mask.n == mask.m and mask.documents is None):
        return "backend='triton' takes causal calls with one query per key and no documents; use backend='chunked'"
    if call.state is not None or (call.return_state and wants_gradient(q, call.k, call.v)):
        return "backend='triton' starts a sequence, and its state has no gradients; use backend='chunked'"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"backend='triton' takes float32 or bfloat16, got {q.dtype}; use backend='chunked'"
    widest = max(q.shape[-1], call.v.shape[-1])
    if widest > WIDEST:
        return f"backend='triton' takes heads up to {WIDEST} wide, got {widest}; use backend='chunked'"
    if takes_forward_derivatives():
        return "backend='triton' has no forward-mode derivatives; use backend='chunked'"
    return why_not_triton(q.device.type)


def _triton(call: LinearCall) -> tuple[Tensor, LinearState | None]:
    """Run the kernels. In bfloat16 the gradient of q loses digits where values have a large mean.

    Its part -(g_i·o_i) comes from the rounded output and nearly cancels against g_i·v_j. At d = 64 its error is 3.3e-3,
    against 1.6e-3 of "chunked", which computes the output again in float32.
    """
    from farspan.ops.triton.linear import linear_attention_op

    mask, weighting = call.mask, call.weighting

    def angles() -> Tensor:  # cos and sin of the keys, (b|1, 2, m), measured from the first of them
        positions = (mask.key_positions - mask.key_positions[:, :1]).double()
        return torch.cat([x[:, :, :, 0] for x in weighting.angles(positions, torch.float32)], dim=1)

    # A compiled block would be another graph where an earlier one has filled the mask.
    table = angles() if is_traced() else mask.share(("linear angles", weighting.name), angles)
    k, v = hide(call.k, mask.padding), hide(call.v, mask.padding)  # ReLU(0) has no weight
    out, *_, numerator, denominator = linear_attention_op(call.q, k, v, table, MIN_DENOMINATOR[call.q.dtype])
    if not call.return_state:
        return out, None
    keys = _keys(call)
    # The kernels hold the waves apart, and values before features.
    return out, advance(keys, weighting.empty_state(keys), numerator.mT.flatten(2, 3), denominator.flatten(2, 3))


CHUNKED = Implementation("chunked", ("auto", "chunked"), _chunked, _why_not_chunked)
REFERENCE = Implementation("reference", ("auto", "reference"), _reference, _why_not_reference)
TRITON = Implementation("triton", ("auto", "triton"), _triton, _why_not_triton, "cuda")
COSFORMER = Table(TRITON, CHUNKED, REFERENCE)
"""triton: the chunks in kernels. chunked: the chunks in torch. reference: all weights."""

cosformer_attention_reference = reference_twin(cosformer_attention)
