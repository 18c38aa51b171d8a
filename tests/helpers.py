"""Random inputs and comparisons used by several tests."""

from collections.abc import Callable

import torch
from torch import Tensor


def coca_inputs(
    n: int,
    m: int | None = None,
    *,
    b: int = 1,
    h: int = 4,
    g: int = 2,
    d: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Leaf tensors q (b,h,n,d), t (b,g,m,d/2) ≥ 0, v (b,g,m,d)."""
    m = m or n
    q = torch.randn(b, h, n, d, dtype=dtype, device=device)
    t = torch.randn(b, g, m, d // 2, dtype=dtype, device=device).relu()
    v = torch.randn(b, g, m, d, dtype=dtype, device=device)
    return q.requires_grad_(), t.requires_grad_(), v.requires_grad_()


def softmax_inputs(n: int, m: int | None = None, **shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Leaf tensors q (b,h,n,d), k and v (b,g,m,d) in float64."""
    q, _, v = coca_inputs(n, m, **shape)  # type: ignore[arg-type]
    return q, torch.randn_like(v).requires_grad_(), v


def largest_difference(
    fused: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options: object
) -> float:
    """The largest difference in outputs and in gradients with respect to all inputs."""
    outputs = [op(*inputs, **options) for op in (fused, reference)]
    weights = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(out, inputs, weights) for out in outputs]
    pairs = [(outputs[0], outputs[1]), *zip(*gradients, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)
