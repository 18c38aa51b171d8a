"""Softmax attention as it is defined: every score, every mask entry, written out.

Scores are without the scale of the softmax, but for ALiBi, whose bias is not scaled.
"""

import torch
from torch import Tensor

from farspan.ops.positions import Positions
from farspan.ops.rotary_reference import pairs


def scores_rope(q: Tensor, k: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Eq. 2: Re⟨f(q_m, m), f(k_n, n)⟩, by the turns of :func:`farspan.ops.rotary_reference.turns`."""
    keys = pairs(repeat_heads(k, q.shape[1]))[:, :, None] * key[:, None]  # f(k_n, n), seen from each query
    return ((pairs(q) * query[:, None])[:, :, :, None] * keys.conj()).real.sum(-1)


def scores_alibi(q: Tensor, k: Tensor, slopes: Tensor, places: Positions, scale: float) -> Tensor:
    """scale·q_m·k_n - slope·|m-n|, with a slope a head (h)."""
    distance = (places.query[:, None, :, None] - places.key[:, None, None, :]).abs().to(q.dtype)
    return scores_nope(q, k) * scale - slopes.to(q.dtype)[:, None, None] * distance


def scores_nope(q: Tensor, k: Tensor) -> Tensor:
    """q·k: no position at all."""
    return q @ repeat_heads(k, q.shape[1]).mT


def visible(
    places: Positions,
    *,
    causal: bool,
    window: int | None,
    padding_mask: Tensor | None,
    documents: Tensor | None,
) -> Tensor:
    """The whole mask, (b|1, 1, n, m): True where query i may look at key j."""
    n, m = places.n, places.m
    if places.aligned:
        query = torch.arange(m - n, m, device=places.device)[None]
        key = torch.arange(m, device=places.device)[None]
    else:
        query, key = places.query, places.key
    distance = query[:, :, None] - key[:, None, :]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    if documents is not None:
        mask = mask & (documents[:, m - n :, None] == documents[:, None, :])
    if padding_mask is not None:
        mask = mask & padding_mask[:, None, :]
    return mask[:, None]


def attend(scores: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(scores)·v over visible keys; zeros for a query that sees none. (b,h,n,m), (b,g,m,dv) → (b,h,n,dv)."""
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights.to(v.dtype) @ repeat_heads(v, scores.shape[1])


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(b, g, m, ·) → (b, heads, m, ·): key head i serves query heads i·h/g … (i+1)·h/g - 1."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)
