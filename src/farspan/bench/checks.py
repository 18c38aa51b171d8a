"""One rule decides whether a candidate is right: its error is at most twice that of the same dtype written out plainly.

Both errors are against float64. Where no plain twin fits into memory, a fixed tolerance stands in (:data:`LOOSE`).
"""

import copy
import math
import re
from typing import Any

import torch
from torch import Tensor

from farspan.layers import Attention
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import alibi_attention, coca_attention, rope_attention
from farspan.ops.coca import pope_attention

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-18, torch.float64: 2.0**-44}
"""What rounding alone may add to an error, as a part of the largest number."""
LOOSE = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.float64: 1e-10}
"""How far one function may be from itself on another kernel, as a part of the largest number.

Rounding comes to 0.01 in a model of eight layers in bfloat16, and to 1e-6 in float32; an attention left out, to 1.
"""
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
"""What a model is compared with. Bfloat16 is judged by float32, a thousand times as exact: no GPU has a fused attention
in float64, and without one the scores of a long prompt do not fit into memory."""


class ResultsDifferError(RuntimeError):
    """A candidate computes something else, so its speed means nothing."""


def check(
    what: str, got: Tensor, truth: Tensor, eager: Tensor | None = None, *, limit: float | None = None
) -> dict[str, float]:
    """Return {"error", "allowed"} as parts of the largest number; raise ResultsDifferError beyond what is allowed.

    Args:
        truth: float64, or the widest dtype that fits.
        eager: the same in got's dtype, written out plainly. Twice its error and a rounding are allowed.
        limit: what is allowed instead; without both, :data:`LOOSE`.

    >>> check("rope", torch.tensor([1.0, 4.1]), torch.tensor([1.0, 4.0]))
    Traceback (most recent call last):
    farspan.bench.checks.ResultsDifferError: rope is wrong by 2.5e-02 of its largest number (allowed: 1.0e-04)
    """
    error = far(got, truth)
    if limit is None:
        limit = LOOSE[got.dtype] if eager is None else 2 * far(eager, truth) + ROUNDING[got.dtype]
    try:  # also stops at NaN and at another shape
        torch.testing.assert_close(got.double(), truth.double(), rtol=0.0, atol=limit * float(truth.abs().max()))
    except AssertionError:
        message = f"{what} is wrong by {error:.1e} of its largest number (allowed: {limit:.1e})"
        raise ResultsDifferError(message) from None
    return {"error": error, "allowed": limit}


def worst(checks: list[dict[str, float]]) -> dict[str, float]:
    """Return the check that came nearest to its limit."""
    return max(checks, key=lambda x: x["error"] / x["allowed"])


def far(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, as a part of the largest number wanted.

    >>> far(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])), far(torch.ones(2), torch.zeros(2))
    (0.25, inf)
    """
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().double(), want.detach().double()
    difference, largest = float((got - want).abs().max()), float(want.abs().max())
    return difference / largest if largest else math.inf if difference else 0.0


def apart(got: Tensor, want: Tensor) -> float:
    """Return the root mean square of the differences, as a part of that of the numbers wanted.

    For gradients through a ReLU, which a rounding near zero switches on or off: single numbers may be far off.

    >>> apart(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    difference, size = (float(x.norm()) for x in (got.double() - want.double(), want.double()))
    return difference / size if size else math.inf if difference else 0.0


def definition(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute a layer's attention by its equations, N×N×d: the truth in float64, the plain twin in another dtype.

    >>> definition(Attention(16, 2, "rope"), *(torch.ones(1, 2, 5, 8) for _ in range(3))).shape
    torch.Size([1, 2, 5, 8])
    """
    options: dict[str, Any] = {"window": layer.spec.window, "backend": "reference"}
    if layer.spec.kind == "alibi":
        return alibi_attention(q, k, v, **options)
    if layer.spec.kind == "rope":
        return rope_attention(q, k, v, rotary=layer.rotary, **options)
    if layer.spec.polar:
        return pope_attention(q, k, v, rotary=layer.rotary, phase=layer._phases(), **options)
    return coca_attention(q, k, v, rotary=layer.rotary, form=layer.form, **options)


def wider(model: FarspanForCausalLM) -> FarspanForCausalLM:
    """Copy a model in :data:`WIDER`, on SDPA alone: no decoding kernel, and no short cut for one query."""
    weight = model.lm_head.weight
    twin = copy.deepcopy(model).to(weight.device, WIDER[weight.dtype])
    set_decode_backend(twin, "sdpa")
    return twin


def set_decode_backend(model: FarspanForCausalLM, backend: str) -> None:
    """Choose what computes the decoding steps of a built model."""
    model.config.decode_backend = backend
    for block in model.model.layers:
        block.self_attn.decode_backend = backend


def reason(error: BaseException) -> str:
    """Return the first line of an error, or the error that torch.compile quotes.

    >>> reason(RuntimeError("out of memory\\nTried to allocate …"))
    'RuntimeError: out of memory'
    >>> reason(RuntimeError("failed\\n  Explanation: Dynamo failed …: got ValueError('no such kernel')"))
    "ValueError('no such kernel')"
    """
    quoted = re.search(r"(?:got|raised exception) (\w+\(['\"].*['\"]\))$", str(error), re.MULTILINE)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return quoted[1] if quoted else f"{type(error).__name__}: {first}"
