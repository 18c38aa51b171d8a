"""Softmax attention as it is defined: every score, every mask entry, written out."""

import torch
from torch import Tensor

from farspan.ops.positions import Positions


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
