"""Before any clock starts: every contestant computes what it says."""

import re
from collections.abc import Callable, Mapping, Sequence
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


def refuse(rows: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise :class:`ResultsDifferError` if a row's error is larger than allowed, or not a number.

    >>> refuse([{"attention": "rope", "of": "output", "error": 0.2, "allowed": 0.1}, {"missing": "no GPU"}], "layers")
    Traceback (most recent call last):
    farspan.benchmark.agree.ResultsDifferError: 1 of 2 layers fail their check: rope, output: 2.0e-01 (allowed: 1.0e-01)
    """
    wrong = [row for row in rows if "error" in row and not row["error"] <= row["allowed"]]
    if wrong:
        names = "; ".join(
            f"{row['attention']}, {row['of']}: {row['error']:.1e} (allowed: {row['allowed']:.1e})" for row in wrong
        )
        raise ResultsDifferError(f"{len(wrong)} of {len(rows)} {what} fail their check: {names}")


def reason(error: BaseException) -> str:
    """What an error says, in one line: the first, or the error that torch.compile quotes.

    >>> reason(RuntimeError("out of memory\\nTried to allocate …"))
    'RuntimeError: out of memory'
    >>> reason(RuntimeError("failed\\n  Explanation: Dynamo failed …: got ValueError('no such kernel')"))
    "ValueError('no such kernel')"
    >>> reason(RuntimeError("Observed exception\\n  Developer …: raised exception ValueError('no such kernel')"))
    "ValueError('no such kernel')"
    """
    quoted = re.search(r"(?:got|raised exception) (\w+\(['\"].*['\"]\))$", str(error), re.MULTILINE)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return quoted[1] if quoted else f"{type(error).__name__}: {first}"
