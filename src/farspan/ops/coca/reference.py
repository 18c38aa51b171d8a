"""The equations of the CoCA paper, literally. Slow, hungry, any dtype: the specification of the fused form.

f(x, n) is the rotation of Eq. 1 on complex pairs (j, j + d/2). Scores are without the 1/√d of the softmax.
"""

import torch
from torch import Tensor

from farspan.ops.rotary import working_dtype
from farspan.ops.rotary_reference import pairs
from farspan.ops.softmax.reference import repeat_heads


def scores_coca(q: Tensor, t: Tensor, query: Tensor, key: Tensor, form: str) -> Tensor:
    """Those of a form, "exact" or "slack": q (b, h, n, d), t (b, g, m, d/2) → (b, h, n, m).

    `query` and `key` are e^{imθ} and e^{inθ}, as :func:`farspan.ops.rotary_reference.turns` gives them.
    """
    return (scores_slack if form == "slack" else scores_exact)(q, t, query, key)


def scores_exact(q: Tensor, t: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Eq. 9: Re⟨f(q_m, m), f(q_m, n)∘t_n⟩, with the keys of Eq. 7 in full: one d-vector for each (m, n)."""
    t = repeat_heads(t, q.shape[1]).to(working_dtype(q.dtype))
    rotated = pairs(q) * query[:, None]  # f(q_m, m)
    keys = pairs(q)[:, :, :, None] * key[:, None] * t[:, :, None]  # f(q_m, n)∘t_n: N×N×d
    return (rotated[:, :, :, None] * keys.conj()).real.sum(-1)


def scores_closed(q: Tensor, t: Tensor, distance: Tensor, theta: Tensor) -> Tensor:
    """Eq. 17: Σ_j t_j ‖q_j‖² cos((m-n)θ_j), for distances (n, m) and frequencies (d/2)."""
    t = repeat_heads(t, q.shape[1])
    waves = torch.cos(distance[..., None] * theta).to(q.dtype)  # n m d/2
    return torch.einsum("bhnj,bhmj,nmj->bhnm", pairs(q).abs() ** 2, t, waves)


def scores_slack(q: Tensor, t: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Eq. 10: Re⟨f(q_m, m), q_m∘f(t_n, n)⟩, t equal on both members of a pair (Eq. 6)."""
    t = repeat_heads(t, q.shape[1])
    rotated = pairs(q) * query[:, None]  # f(q_m, m)
    turned = pairs(torch.cat((t, t), dim=-1))[:, :, None] * key[:, None]  # f(t_n, n), seen from each query
    a, b = q.to(working_dtype(q.dtype)).chunk(2, dim=-1)
    product = torch.complex(a[:, :, :, None] * turned.real, b[:, :, :, None] * turned.imag)  # q_m∘f(t_n, n)
    return (rotated[:, :, :, None] * product.conj()).real.sum(-1)
