"""CoCA on Triton kernels: when they can run, and which of them does.

Without gradients the half-width kernel reads t as it is cached. With gradients q̃ and k̃ are made in one fused pass,
forward and backward, and the attention is SDPA's.
"""

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.call import Call
from farspan.ops.coca.fused import coca_features
from farspan.ops.launch import cannot_launch
from farspan.ops.phases import rotary_steps
from farspan.ops.positions import Positions
from farspan.ops.rotary import Plan, Rotary, Run
from farspan.ops.segments import check_dim, join
from farspan.ops.softmax.core import softmax_attention


def auto_takes_triton(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary | Plan | None, documents: Tensor | None) -> bool:
    """Whether backend="auto" hands a call to the kernels: not before they are measured to be faster."""
    return False


def triton_refusal(
    q: Tensor, t: Tensor, v: Tensor, rotary: Rotary | Plan | None, documents: Tensor | None
) -> str | None:
    """Why backend="triton" cannot take a call, and what to do about it; None when it can."""
    widest = max(q.shape[-1], v.shape[-1])
    if isinstance(rotary, tuple):
        return "backend='triton' computes its angles in the kernel: pass the Rotary, not a plan of angles"
    if documents is not None:
        return "backend='triton' does not see documents; use backend='sdpa'"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"backend='triton' takes float32, bfloat16 or float16, got {q.dtype}; use backend='sdpa'"
    if q.dtype == torch.float16 and _needs_gradient(q, t, v):
        return "backend='triton' has no gradients in float16, whose range squares leave; use bfloat16 or backend='sdpa'"
    if widest > 256:
        return f"backend='triton' takes heads up to 256 wide, got {widest}; use backend='sdpa'"
    return cannot_launch(q.device.type)


def triton_attention(q: Tensor, t: Tensor, v: Tensor, *, rotary: Rotary | Plan | None, form: str, call: Call) -> Tensor:
    """:func:`farspan.ops.coca_attention` after its checks; raises where :func:`triton_refusal` has a reason."""
    reason = triton_refusal(q, t, v, rotary, call.sight.documents)
    require(reason is None, str(reason))
    assert rotary is None or isinstance(rotary, Rotary)
    if rotary is not None:
        check_dim(rotary, q)
    runs = [Run(0, q.shape[2], None)] if rotary is None else list(rotary.runs(call.places))
    attend = _prepared if _needs_gradient(q, t, v) else _half_width
    return join(runs, [attend(q, t, v, rotary, form, call, run) for run in runs])


def _half_width(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary | None, form: str, call: Call, run: Run) -> Tensor:
    """One run of queries against un-rotated t."""
    from farspan.ops.coca.kernels.attention import half_width_op

    places, sight = call.places, call.sight
    query, key = _tensors(places, run, sight.m)
    step, scale = None, call.scale
    if rotary is not None:
        step = rotary_steps(rotary, run.length, q.device)
        scale = scale * rotary_factor(rotary) ** 2
    return half_width_op(
        q[:, :, run.start : run.stop],
        t,
        v,
        step,
        None,
        None,
        query,
        key,
        sight.padding,
        None,
        places.first or 0,
        places.n - run.stop,
        form,
        not places.aligned,
        sight.causal,
        sight.window,
        scale,
        None,
    )


def _prepared(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary | None, form: str, call: Call, run: Run) -> Tensor:
    """One run of queries by way of q̃ and k̃."""
    places = call.places
    keys = places.m - places.n + run.stop if call.sight.causal and places.aligned else places.m
    q, t, v = q[:, :, run.start : run.stop], t[:, :, :keys], v[:, :, :keys]
    if rotary is None:
        q_, k_ = coca_features(q, t, None, None, form=form)
    else:
        from farspan.ops.coca.kernels.prepare import prepare_op

        query, key = _tensors(places, run, keys)
        first = places.first or 0
        step = rotary_steps(rotary, run.length, q.device)
        begin = first + places.m - places.n + run.start
        q_, k_ = prepare_op(q, t, step, query, key, begin, first, form, rotary_factor(rotary))
    return softmax_attention(q_, k_, v, sight=call.sight.narrow(run.start, run.stop, keys), scale=call.scale)


def _tensors(places: Positions, run: Run, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Positions of a run's queries and of the keys, where they do not simply count on."""
    if places.first is not None:
        return None, None
    return places.query[:, run.start : run.stop], places.key[:, :keys]


def rotary_factor(rotary: Rotary) -> float:
    """What multiplies cos and sin (YaRN's temperature)."""
    return 1.0 if rotary.scaling is None else rotary.scaling.attention_factor


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
