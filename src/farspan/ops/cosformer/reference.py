"""Linear attention by its definition: every pair of query and key, every weight, written out. The specification.

A weight is (a_i · t_j) κ(i-j) with a, t ≥ 0, its row divided by its sum. cosFormer (arXiv 2202.08791, sec. 3) has
κ = cos.
"""

import math

import torch
from torch import Tensor

from farspan.ops.cosformer.weights import ACTIVATIONS, EPSILON, FLOOR
from farspan.ops.rotary import working_dtype
from farspan.ops.softmax.reference import repeat_heads


def cosformer_weights(
    q: Tensor, k: Tensor, distance: Tensor, *, max_length: int, beyond: str, activation: str, reweight: bool
) -> tuple[Tensor, Tensor]:
    """What numerator and denominator give each key, (b, h, n, m), for distances (b|1, 1, n, m)."""
    act, work = ACTIVATIONS[activation], working_dtype(q.dtype)
    products = act(q.to(work)) @ act(repeat_heads(k, q.shape[1]).to(work)).mT
    turned = distance.double().remainder(4 * max_length)  # whole turns left out, or π would run out of digits
    cos = torch.cos(math.pi * turned / (2 * max_length))
    one = torch.ones_like(cos)
    raised = FLOOR + (1 + cos) / 2
    faded = torch.exp(-distance.double().abs() / max_length) * raised
    kappa = {
        "raise": (cos, cos),
        "decoupled": (cos, one),
        "raised-cosine": (raised, raised),
        "decay": (faded, faded),
    }
    numerator, denominator = kappa[beyond] if reweight else (one, one)
    return products * numerator.to(work), products * denominator.to(work)


def linear_coca_weights(q: Tensor, t: Tensor, distance: Tensor, theta: Tensor | None) -> tuple[Tensor, Tensor]:
    """CoCA's Eq. 17 as a weight, Σ_j ‖q_j‖² t_j cos(Δθ_j), and the same without the angle; where θ is None, the latter
    for both."""
    work = working_dtype(q.dtype)
    a, b = q.to(work).chunk(2, dim=-1)
    t = repeat_heads(t, q.shape[1]).to(work)
    products = (a * a + b * b)[:, :, :, None] * t[:, :, None]  # (b, h, n, m, d/2)
    still = products.sum(-1)
    if theta is None:
        return still, still
    waves = torch.cos(distance.double()[..., None] * theta).to(work)
    return (products * waves).sum(-1), still


def seen_only(x: Tensor, mask: Tensor) -> Tensor:
    """Zeros for keys or values (b, g, m, ·) that no query sees: padding may hold anything, and 0·inf is not 0."""
    return x.masked_fill(~mask.any(-2).any(1)[:, None, :, None], 0.0)


def weigh(numerator: Tensor, denominator: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Σ numerator·v / max(Σ denominator, ε) over visible keys: (b,h,n,m) twice, (b,g,m,dv), (b|1,1,n,m)."""
    heads, work = numerator.shape[1], numerator.dtype
    values = repeat_heads(v, heads).to(work)
    total = denominator.masked_fill(~mask, 0.0).sum(-1, keepdim=True)
    return (numerator.masked_fill(~mask, 0.0) @ values / total.clamp(min=EPSILON[v.dtype])).to(v.dtype)
