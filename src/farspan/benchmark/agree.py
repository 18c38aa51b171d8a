"""Before any clock starts: every contestant computes what it says."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from farspan.ops import coca_attention, linear_coca_attention

ALLOWED = 1e-12
HALF_WIDTH = (coca_attention, linear_coca_attention)
"""Ops whose keys are t, d/2 numbers that are not negative."""

Contestants = Mapping[str, tuple[Callable[..., Tensor], dict[str, Any]]]
"""Name → op and its options."""


class ResultsDifferError(RuntimeError):
    """The contestants do not compute the same thing, so their speed means nothing."""


def agree(contestants: Contestants, device: str, seed: int) -> dict[str, Any]:
    """A row with the largest difference of each op from its reference, values and gradients, in float64."""
    torch.manual_seed(seed)
    worst = {}
    for name, (op, options) in contestants.items():
        q, k, v = (torch.randn(1, 8, 257, 32, dtype=torch.float64, device=device) for _ in range(3))
        inputs = [q, k[..., :16].abs() if op in HALF_WIDTH else k, v]
        for x in inputs:
            x.requires_grad_()
        outputs = [op(*inputs, **options, backend=backend) for backend in ("auto", "reference")]
        weights = torch.randn_like(v)
        pairs = list(zip(*(torch.autograd.grad(out, inputs, weights) for out in outputs), strict=True))
        pairs.append((outputs[0].detach(), outputs[1].detach()))
        worst[name] = max(float((a - b).abs().max()) for a, b in pairs)
        if worst[name] > ALLOWED:
            raise ResultsDifferError(f"{name} and its reference differ by {worst[name]:.1e} (allowed: {ALLOWED:.0e})")
    return {"kind": "check", "max_difference": max(worst.values()), "each": worst}
