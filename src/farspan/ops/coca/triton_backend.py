"""CoCA on Triton kernels: when they can run, and which of them does.

Without gradients the half-width kernel reads t as it is cached. With gradients q̃ and k̃ are made in one fused pass,
forward and backward, and the attention is SDPA's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.call import Call
from farspan.ops.coca.decoding import (
    Case,
    Slots,
    Steps,
    attend_half_width,
    kernel_refusal,
    takes_half_width,
    wants_gradient,
)
from farspan.ops.coca.fused import coca_features
from farspan.ops.coca.preparation import prepared
from farspan.ops.launch import cannot_derive_forwards
from farspan.ops.phases import PhasePlan, phase_plan
from farspan.ops.rotary import Plan, Rotary
from farspan.ops.segments import attend_by_segment, check_dim
from farspan.ops.softmax.core import softmax_attention


def auto_takes_triton(
    q: Tensor, t: Tensor, v: Tensor, rotary: Rotary | Plan | PhasePlan | None, documents: Tensor | None
) -> bool:
    """Whether backend="auto" hands a call to the kernels: a decoding step, where that is measured to be faster."""
    if isinstance(rotary, tuple):
        return False
    case = Case(
        n=q.shape[2],
        group=q.shape[1] // t.shape[1],
        width=max(q.shape[-1], v.shape[-1]),
        dtype=q.dtype,
        device=q.device,
        gradient=wants_gradient(q, t, v),
        documents=documents is not None,
    )
    return takes_half_width(case, "auto")


def triton_refusal(
    q: Tensor, t: Tensor, v: Tensor, rotary: Rotary | Plan | PhasePlan | None, documents: Tensor | None
) -> str | None:
    """Why backend="triton" cannot take a call, and what to do about it; None when it can."""
    if isinstance(rotary, tuple):
        return "backend='triton' computes its angles in the kernel: pass the Rotary, not a plan of angles"
    if documents is not None:
        return "backend='triton' does not see documents; use backend='sdpa'"
    if q.dtype == torch.float16 and wants_gradient(q, t, v):
        return "backend='triton' has no gradients in float16, whose range squares leave; use bfloat16 or backend='sdpa'"
    return cannot_derive_forwards() or kernel_refusal(q.dtype, max(q.shape[-1], v.shape[-1]), q.device)


def triton_attention(
    q: Tensor, t: Tensor, v: Tensor, *, rotary: Rotary | Plan | PhasePlan | None, form: str, call: Call
) -> Tensor:
    """:func:`farspan.ops.coca_attention` after its checks; raises where :func:`triton_refusal` has a reason."""
    reason = triton_refusal(q, t, v, rotary, call.sight.documents)
    require(reason is None, str(reason))
    assert rotary is None or isinstance(rotary, Rotary)
    if rotary is not None:
        check_dim(rotary, q)
    if not wants_gradient(q, t, v):
        return _half_width(q, t, v, rotary, form, call)
    if rotary is None:
        ready = coca_features(q, t, None, None, form=form)
        return softmax_attention(*ready, v, sight=call.sight, scale=call.scale)
    plan = phase_plan(rotary, call.places, causal=call.sight.causal)
    return attend_by_segment(plan, partial(prepared, form=form), q, t, v, call)


def _half_width(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary | None, form: str, call: Call) -> Tensor:
    """All queries against un-rotated t."""
    places, sight = call.places, call.sight
    slots = Slots(
        first=places.first or 0,
        positions=None if places.first is not None else (places.query, places.key),
        padding=sight.padding,
        by_position=not places.aligned,
    )
    steps = None if rotary is None else Steps.of(rotary, places)
    options: dict[str, Any] = {"causal": sight.causal, "window": sight.window, "scale": call.scale}
    return attend_half_width(q, t, v, steps, slots, form=form, **options)
