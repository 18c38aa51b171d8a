"""Every attention of this library by its definition: all scores, all weights, the whole mask. Slow, in any dtype.

The fast implementations are tested against these functions in float64. f(x, n) is the rotation of Eq. 1, written on
complex numbers; pair j of x is (x_j, x_{j+d/2}). Scores come without the scale of the softmax, except for ALiBi, whose
bias is not scaled.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.ops.device import working_dtype
from farspan.ops.masking import AttentionMask
from farspan.ops.rotary import DynamicNTK, Rotary

# Masks, softmax, grouped heads


def visible(mask: AttentionMask) -> Tensor:
    """Compute the whole mask, (b|1, 1, n, m): True where query i sees key j."""
    if mask.aligned:
        query = torch.arange(mask.offset, mask.offset + mask.n, device=mask.device)[None]
        key = torch.arange(mask.m, device=mask.device)[None]
    else:
        query, key = mask.query_positions, mask.key_positions
    distance = query[:, :, None] - key[:, None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if mask.causal:
        seen &= distance >= 0
    if mask.window is not None:
        seen &= distance.abs() < mask.window
    if mask.documents is not None:
        rows = mask.documents[:, mask.offset : mask.offset + mask.n]
        seen = seen & (rows[:, :, None] == mask.documents[:, None, :])
    if mask.padding is not None:
        seen = seen & mask.padding[:, None, :]
    return seen[:, None]


def attend(scores: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute softmax(scores)·v over visible keys: (b, h, n, m), (b, g, m, dv) → (b, h, n, dv).

    A query that sees nothing returns zeros.
    """
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights.to(v.dtype) @ repeat_heads(v, scores.shape[1])


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads, (b, g, m, ·) → (b, heads, m, ·): key head i serves query heads i·h/g … (i+1)·h/g - 1."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


# Rotary angles


def rotations(rotary: Rotary | None, mask: AttentionMask, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute e^{imθ} per query (b|1, n, d/2) and e^{inθ} per query *and* key (b|1, n, m, d/2).

    Keys have a query axis since θ may depend on the query (per_query dynamic NTK).
    """
    work = torch.complex128 if working_dtype(dtype) == torch.float64 else torch.complex64
    theta, factor = torch.zeros(width // 2, dtype=torch.float64, device=mask.device), 1.0
    if rotary is not None:
        theta = rotary.frequencies(governing_length(rotary, mask), mask.device)  # (d/2) or (b|1, n, d/2)
        factor = rotary.factor
    theta = theta.expand(mask.query_positions.shape[0], mask.n, -1)
    query = mask.query_positions[:, :, None] * theta
    key = mask.key_positions[:, None, :, None] * theta[:, :, None, :]
    return (
        torch.polar(torch.full_like(query, factor), query).to(work),
        torch.polar(torch.full_like(key, factor), key).to(work),
    )


def governing_length(rotary: Rotary, mask: AttentionMask) -> Tensor | None:
    """Return the length that sets each query's frequencies (b|1, n) under dynamic NTK, else None."""
    if rotary.follows_query:
        assert isinstance(rotary.scaling, DynamicNTK)
        return rotary.scaling.buckets(mask.query_positions)
    if rotary.follows_length:
        return (mask.query_positions.amax(-1, keepdim=True) + 1).expand_as(mask.query_positions)
    return None


def pairs(x: Tensor) -> Tensor:
    """View (…, d) real as (…, d/2) complex, pair j = (x_j, x_{j+d/2})."""
    return torch.complex(*x.to(working_dtype(x.dtype)).chunk(2, dim=-1))


# Softmax scores: (b, h, n, d), (b, g, m, ·) → (b, h, n, m)


def scores_nope(q: Tensor, k: Tensor) -> Tensor:
    """Compute q·k: no positions."""
    return q @ repeat_heads(k, q.shape[1]).mT


def scores_rope(q: Tensor, k: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Compute Eq. 2: Re⟨f(q_m, m), f(k_n, n)⟩, with rotations from :func:`rotations`."""
    keys = pairs(repeat_heads(k, q.shape[1]))[:, :, None] * key[:, None]  # f(k_n, n), as each query sees it
    return ((pairs(q) * query[:, None])[:, :, :, None] * keys.conj()).real.sum(-1)


def scores_alibi(q: Tensor, k: Tensor, slopes: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Compute scale·q_m·k_n - slope·|m-n|, with one slope per head (h)."""
    distance = (mask.query_positions[:, None, :, None] - mask.key_positions[:, None, None, :]).abs().to(q.dtype)
    return scores_nope(q, k) * scale - slopes.to(q.dtype)[:, None, None] * distance


def scores_coca(q: Tensor, t: Tensor, query: Tensor, key: Tensor, form: str) -> Tensor:
    """Compute CoCA scores, exact (Eq. 9) or slack (Eq. 10), from t (b, g, m, d/2) and :func:`rotations`."""
    return (scores_slack if form == "slack" else scores_exact)(q, t, query, key)


def scores_exact(q: Tensor, t: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Compute Eq. 9: Re⟨f(q_m, m), f(q_m, n)∘t_n⟩, with the keys of Eq. 7 in full: one d-vector per (m, n)."""
    t = repeat_heads(t, q.shape[1]).to(working_dtype(q.dtype))
    rotated = pairs(q) * query[:, None]  # f(q_m, m)
    keys = pairs(q)[:, :, :, None] * key[:, None] * t[:, :, None]  # f(q_m, n)∘t_n: N×N×d
    return (rotated[:, :, :, None] * keys.conj()).real.sum(-1)


def scores_closed(q: Tensor, t: Tensor, distance: Tensor, theta: Tensor) -> Tensor:
    """Compute Eq. 17: Σ_j t_j ‖q_j‖² cos((m-n)θ_j), for distances (n, m) and frequencies (d/2)."""
    t = repeat_heads(t, q.shape[1])
    waves = torch.cos(distance[..., None] * theta).to(q.dtype)  # n m d/2
    return torch.einsum("bhnj,bhmj,nmj->bhnm", pairs(q).abs() ** 2, t, waves)


def scores_slack(q: Tensor, t: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Compute Eq. 10: Re⟨f(q_m, m), q_m∘f(t_n, n)⟩, t equal on both members of a pair (Eq. 6)."""
    t = repeat_heads(t, q.shape[1])
    rotated = pairs(q) * query[:, None]  # f(q_m, m)
    keys = pairs(torch.cat((t, t), dim=-1))[:, :, None] * key[:, None]  # f(t_n, n), as each query sees it
    a, b = q.to(working_dtype(q.dtype)).chunk(2, dim=-1)
    product = torch.complex(a[:, :, :, None] * keys.real, b[:, :, :, None] * keys.imag)  # q_m∘f(t_n, n)
    return (rotated[:, :, :, None] * product.conj()).real.sum(-1)


def scores_polar(q: Tensor, k: Tensor, phase: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Compute Σ_c q_c k_c cos((m-n)θ_c + δ_c) from magnitudes (…, r), with rotations of r frequencies."""
    rotation = (query[:, :, None] * key.conj())[:, None]  # e^{i(m-n)θ}
    if phase is not None:
        phase = phase.to(working_dtype(phase.dtype))
        rotation = rotation * torch.polar(torch.ones_like(phase), phase)[:, None, None]
    waves = rotation.real
    products = q[:, :, :, None] * repeat_heads(k, q.shape[1])[:, :, None]
    return (products * waves).sum(-1)


# Linear attention: weights ≥ 0 instead of a softmax, each row divided by its sum

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "elu": lambda x: F.elu(x) + 1.0}
MIN_DENOMINATOR = {torch.float16: 2.0**-10, torch.bfloat16: 1e-6, torch.float32: 1e-6, torch.float64: 1e-12}
"""ε, the least sum of weights. Gradients grow as its inverse, and 1/1e-6 exceeds float16."""
MIN_WEIGHT = 2.0**-16
"""δ, the least weight of the raised cosine. At distance 2M its two parts cancel to 2^-24 in float32, and a quotient of
such remainders has no bound."""


def cosformer_weights(
    q: Tensor, k: Tensor, distance: Tensor, *, max_length: int, beyond: str, activation: str, reweight: bool
) -> tuple[Tensor, Tensor]:
    """Compute cosFormer's weights (arXiv 2202.08791, sec. 3) of numerator and denominator, (b, h, n, m) each.

    `distance` (b|1, 1, n, m) is the position of the query minus that of the key.
    """
    activate, work = ACTIVATIONS[activation], working_dtype(q.dtype)
    products = activate(q.to(work)) @ activate(repeat_heads(k, q.shape[1]).to(work)).mT
    reduced = distance.double().remainder(4 * max_length)  # without whole periods, for which π has too few digits
    cos = torch.cos(math.pi * reduced / (2 * max_length))
    one = torch.ones_like(cos)
    raised = MIN_WEIGHT + (1 + cos) / 2
    decayed = torch.exp(-distance.double().abs() / max_length) * raised
    kappa = {"raise": (cos, cos), "decoupled": (cos, one), "decay": (decayed, decayed)}
    numerator, denominator = kappa[beyond] if reweight else (one, one)
    return products * numerator.to(work), products * denominator.to(work)


def linear_coca_weights(q: Tensor, t: Tensor, distance: Tensor, *, theta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute Eq. 17 as a weight, Σ_j ‖q_j‖² t_j cos(Δθ_j), and the same without the cosine: (b, h, n, m) each.

    If theta is None, both come without the cosine.
    """
    work = working_dtype(q.dtype)
    a, b = q.to(work).chunk(2, dim=-1)
    t = repeat_heads(t, q.shape[1]).to(work)
    products = (a * a + b * b)[:, :, :, None] * t[:, :, None]  # (b, h, n, m, d/2)
    total = products.sum(-1)
    if theta is None:
        return total, total
    waves = torch.cos(distance.double()[..., None] * theta).to(work)
    return (products * waves).sum(-1), total


def seen_only(x: Tensor, mask: Tensor) -> Tensor:
    """Zero keys or values (b, g, m, ·) that no query sees: padding may hold inf, and 0·inf is not 0."""
    return x.masked_fill(~mask.any(-2).any(1)[:, None, :, None], 0.0)


def weigh(numerator: Tensor, denominator: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute Σ numerator·v / max(Σ denominator, ε) over visible keys: (b, h, n, m) twice, (b, g, m, dv)."""
    heads, work = numerator.shape[1], numerator.dtype
    values = repeat_heads(v, heads).to(work)
    total = denominator.masked_fill(~mask, 0.0).sum(-1, keepdim=True)
    return (numerator.masked_fill(~mask, 0.0) @ values / total.clamp(min=MIN_DENOMINATOR[v.dtype])).to(v.dtype)
