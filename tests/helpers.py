"""Random inputs, comparisons and readings used by several tests."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from farspan.ops import Rotary
from farspan.ops.rotary import cos_sin


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


def masks(b: int, m: int) -> dict[str, dict[str, object]]:
    """Every way to hide keys, by name."""
    ragged = torch.arange(m)[None] >= torch.arange(b)[:, None] * (m // 3)
    lengths = torch.tensor([min(m, 1 + 5 * i) for i in range(b)])[:, None]
    return {
        "causal": {},
        "bidirectional": {"causal": False},
        "window": {"window": 7},
        "bidirectional window": {"window": 5, "causal": False},
        "left padding": {"padding_mask": ragged},
        "right padding": {"padding_mask": torch.arange(m)[None] < lengths},
        "documents": {"documents": (torch.arange(m) // 9).expand(b, m)},
        "window, padding, documents": {
            "window": 4,
            "padding_mask": ragged,
            "documents": (torch.arange(m) // 6).expand(b, m),
        },
    }


def eager(q: torch.Tensor, t: torch.Tensor, v: torch.Tensor, form: str) -> torch.Tensor:
    """Compute causal CoCA as a plain script would: products in the dtype of q, softmax in float32."""
    positions = torch.arange(q.shape[2], device=q.device)[None]
    cos, sin = cos_sin(positions, Rotary(q.shape[-1]).frequencies(device=q.device), 1.0, q.dtype).to(q.dtype).unbind(-2)
    a, b = q.chunk(2, dim=-1)
    if form == "exact":
        q_ = torch.cat(((a * a + b * b) * cos, (a * a + b * b) * sin), dim=-1)
        k_ = torch.cat((t * cos, t * sin), dim=-1)
    else:
        q_ = torch.cat((a * (a * cos - b * sin), b * (a * sin + b * cos)), dim=-1)
        k_ = torch.cat((t * cos - t * sin, t * sin + t * cos), dim=-1)
    n = q.shape[2]
    scores = (q_ @ k_.mT).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=q.device).tril(), -torch.inf)
    return scores.softmax(-1).to(q.dtype) @ v


def losses(run: Path) -> list[float]:
    """The loss of each step that a training run has written down."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
