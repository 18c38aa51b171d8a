"""What is timed, against the same weights in a wider dtype: no ratio of a call that computed something else."""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError
from farspan.layers import Attention
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import alibi_attention, coca_attention, rope_attention

WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
"""Float64 for float32. Bfloat16 is judged by float32, a thousand times as exact: no GPU has a fused attention in
float64, and without one a long prompt's scores would not fit into memory."""
LOOSE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
"""How far the same function may be from itself on another kernel, as a part of the largest number.

Rounding alone comes to 0.01 in a model of eight layers, and 1e-6; an attention that is left out, to 1.
"""


def far(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a part of the largest number wanted.

    >>> far(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])), far(torch.ones(2), torch.zeros(2))
    (0.25, inf)
    """
    difference, largest = (float(x.abs().max()) for x in (got.double() - want.double(), want.double()))
    if largest == 0:
        return math.inf if difference else 0.0
    return difference / largest


def apart(got: Tensor, want: Tensor) -> float:
    """The root mean square of the differences, as a part of that of the numbers wanted.

    For gradients through a ReLU, which a rounding near zero switches on or off: single numbers may be far off.

    >>> apart(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    difference, size = (float(x.norm()) for x in (got.double() - want.double(), want.double()))
    if size == 0:
        return math.inf if difference else 0.0
    return difference / size


def wider(model: FarspanForCausalLM) -> FarspanForCausalLM:
    """Copy the weights in :data:`WIDER`, on SDPA alone: no kernel, and no short cut for one query."""
    weight = model.lm_head.weight
    twin = copy.deepcopy(model).to(weight.device, WIDER[weight.dtype])
    set_decode_backend(twin, "sdpa")
    return twin


def set_decode_backend(model: FarspanForCausalLM, backend: str) -> None:
    """Choose what computes the steps of a built model."""
    model.config.decode_backend = backend
    for block in model.model.layers:
        block.self_attn.decode_backend = backend


def definition(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The layer's equations, N×N×d, of q, k or t, and v: the truth in float64, and in bfloat16 what anyone would write.

    >>> from farspan.layers import RopeAttention
    >>> definition(RopeAttention(16, 2), *(torch.ones(1, 2, 5, 8) for _ in range(3))).shape
    torch.Size([1, 2, 5, 8])
    """
    options: dict[str, Any] = {"window": layer.spec.window, "backend": "reference"}
    if layer.spec.kind == "alibi":
        return alibi_attention(q, k, v, **options)
    if layer.spec.kind == "rope":
        return rope_attention(q, k, v, rotary=layer.rotary, **options)
    return coca_attention(q, k, v, rotary=layer.rotary, form=layer.form, **options)


def as_timed(what: str, got: Tensor, want: Tensor) -> dict[str, Any]:
    """Fields of a row: how far a timed result is from the truth (:func:`far`), and how far it may be (:data:`LOOSE`).

    Raises:
        ResultsDifferError: it is farther, or not a number.
    """
    error, allowed = far(got, want), LOOSE[got.dtype]
    refuse_beyond(allowed, error, what, want)
    return {"error_as_timed": error, "allowed_as_timed": allowed}


def refuse_beyond(allowed: float, error: float, what: str, want: Tensor) -> None:
    """Raise :class:`ResultsDifferError` if an error is larger than allowed, or not a number."""
    if not error <= allowed:
        raise ResultsDifferError(
            f"{what}: what is timed differs from the same weights in {want.dtype} by {error:.1e} of its size "
            f"(allowed: {allowed:.0e})"
        )
