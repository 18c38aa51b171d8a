"""The census and the curves by their definitions: every query, key and pair written out in float64. For checking.

Angles come from the vectors themselves (Eq. 3), scores from the reference equations of the ops.
"""

import math

import torch
from torch import Tensor

from farspan.layers import Attention
from farspan.ops.masking import make_mask
from farspan.ops.reference import pairs, repeat_heads, rotations, scores_coca, scores_rope, visible

CIRCLE = 2 * math.pi


def scores(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """a(m, n), without the softmax's scale, of a layer from its projections of one text: (h, n, n)."""
    mask = make_mask(q.shape[2], q.shape[2], 1, q.device)
    query, key = rotations(attention.rotary, mask, q.shape[-1], q.dtype)
    if attention.spec.kind == "coca":
        return scores_coca(q, k, query, key, attention.form)[0]
    return scores_rope(q, k, query, key)[0]


def probabilities(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """The softmax of the layer, (h, n, n), zero where a query cannot look."""
    n = q.shape[2]
    mask = visible(make_mask(n, n, 1, q.device, window=attention.spec.window))[0]
    return torch.softmax((scores(attention, q, k) * attention.scaling).masked_fill(~mask, -torch.inf), dim=-1)


def initial_angles(attention: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Θ_j in 0 … 2π from k_j to q_j before rotation, and |q_j||k_j|: (h, n, n, d/2) each; CoCA's key is q∘t (Eq. 7)."""
    query = pairs(q)[0][:, :, None]
    if attention.spec.kind == "coca":
        keys = query * repeat_heads(k, q.shape[1])[0][:, None]
        product = (query * query.conj()) * repeat_heads(k, q.shape[1])[0][:, None]  # q·conj(q∘t)
    else:
        keys = pairs(repeat_heads(k, q.shape[1]))[0][:, None]
        product = query * keys.conj()
    angle = product.angle()
    return torch.where(angle < 0, angle + CIRCLE, angle), query.abs() * keys.abs()


def count_crossings(angle: float, theta: float, reach: int) -> tuple[int, int, int]:
    """Borders k, -q, q between Θ and Θ + reach·θ (Eq. 25), found by walking from one multiple of π to the next.

    >>> count_crossings(1.5 * math.pi, math.pi / 4, 7)  # to 3.25π: 2π ends the irregular stretch, then 3π
    (1, 1, 0)
    """
    first, opposed, aligned = 0, 0, 0
    multiple = math.floor(angle / math.pi) + 1
    while multiple * math.pi <= angle + reach * theta:
        if multiple % 2:
            opposed += 1
        elif multiple == 2 and angle > math.pi:
            first += 1
        else:
            aligned += 1
        multiple += 1
    return first, opposed, aligned
