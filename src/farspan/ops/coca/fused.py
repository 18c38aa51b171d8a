"""CoCA as a plain dot product of width d, so that any flash kernel can run it (derivation in docs/math.md)."""

import torch
from torch import Tensor

from farspan.ops.rotary import Angles, working_dtype


def coca_features(
    q: Tensor, t: Tensor, query: Angles | None, key: Angles | None, *, form: str = "exact"
) -> tuple[Tensor, Tensor]:
    """q̃ (b, h, n, d) and k̃ (b, g, m, d) with q̃·k̃ = a(m, n) of the chosen form, in q's dtype.

    Without angles (NoPE) both forms are Σ_j t_j ‖q_j‖², of width d/2.

    >>> one = Angles(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2, 1))
    >>> q, t = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), torch.tensor([2.0]).view(1, 1, 1, 1)
    >>> q_, k_ = coca_features(q, t, one, one)
    >>> (q_ * k_).sum().item()  # t·‖q‖², whatever the direction of q
    50.0
    """
    q_, k_ = _query(q, query, form), _key(t, key, form)
    if q.dtype == torch.float16:
        q_, k_ = balance(q_, k_)
    return q_.to(q.dtype), k_.to(q.dtype)


def _query(q: Tensor, angles: Angles | None, form: str) -> Tensor:
    a, b = q.to(working_dtype(q.dtype)).chunk(2, dim=-1)
    if angles is None:
        return a * a + b * b
    if form == "exact":  # ‖q_j‖² (cos mθ_j, sin mθ_j)
        return ((a * a + b * b)[..., None, :] * angles.both).flatten(-2)
    cos, sin = angles.cos, angles.sin  # q∘f(q, m)
    return torch.cat((a * (a * cos - b * sin), b * (a * sin + b * cos)), dim=-1)


def _key(t: Tensor, angles: Angles | None, form: str) -> Tensor:
    t = t.to(working_dtype(t.dtype))
    if angles is None:
        return t
    both = angles.both
    if form == "slack":  # f((t, t), n)
        both = torch.stack((angles.cos - angles.sin, angles.sin + angles.cos), dim=-2)
    return (t[..., None, :] * both).flatten(-2)


def balance(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Move a power of two from q to k, or back, so that their largest entries are alike: q·k keeps every bit.

    q̃ holds squares and leaves float16's range when q passes 256; after this only logits near 10⁹ could.
    """
    size = q.shape[1] // k.shape[1]
    heads = q.detach().abs().amax(dim=(-2, -1), keepdim=True).unflatten(1, (-1, size)).amax(dim=2)
    ratio = heads / k.detach().abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-30)
    shift = torch.exp2((ratio.clamp(min=1e-30).log2() / 2).round().clamp(-24, 24))
    return q / shift.repeat_interleave(size, dim=1), k * shift
