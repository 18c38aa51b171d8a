"""The public CoCA op: contract, checks, dispatch."""

from functools import partial

from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.call import BACKENDS, check_call, reference_twin
from farspan.ops.coca.decoding import wants_gradient
from farspan.ops.coca.preparation import coca_plan, prepared
from farspan.ops.coca.reference import scores_coca
from farspan.ops.coca.triton_backend import auto_takes_triton, triton_attention
from farspan.ops.coca.waves import Waves, attend_waves, takes_waves
from farspan.ops.phases import PhasePlan, Phases
from farspan.ops.positions import PositionsArgument
from farspan.ops.rotary import Plan, Rotary, odd_width
from farspan.ops.rotary_reference import turns
from farspan.ops.segments import attend_by_segment, check_dim
from farspan.ops.softmax.core import softmax_attention
from farspan.ops.softmax.reference import attend, visible

FORMS = ("exact", "slack")


def coca_attention(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | Plan | PhasePlan | Waves | None,
    form: str = "exact",
    positions: PositionsArgument = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Collinear constrained attention: the key of query m at place n is q_m∘t_n, so their initial angle is zero.

    Args:
        q: (b, h, n, d) queries, before rotation. When n < m they are the last n positions.
        t: (b, g, m, d/2) coefficients, un-rotated, after their activation (Eq. 6); g divides h.
        v: (b, g, m, dv) values.
        rotary: the angles; None for no rotation (NoPE); or, to share them between layers, a ready :meth:`Rotary.plan`
            or :func:`~farspan.ops.coca.preparation.coca_plan`, for a single query ready
            :class:`~farspan.ops.coca.waves.Waves`.
        form: "exact" (Eq. 9 = Eq. 17) or "slack" (Eq. 10). Strict is exact with tied q (Eq. 11).
        positions: see :mod:`farspan.ops.positions`.
        causal: a query sees keys up to itself.
        window: see only the last `window` keys, itself included.
        padding_mask: (b, m) bool, True = keep. A query that sees nothing gives zeros.
        documents: (b, m) int; a query sees its own document only.
        scale: multiplies the scores; default 1/√d.
        backend: "auto", "sdpa" (dot-product form, O(N) memory), "triton" (kernels, see
            :mod:`farspan.ops.coca.triton_backend`; refuses with the reason where they cannot run) or "reference" (the
            equations, N×N×d). "auto" is "sdpa", except for a single query on a CPU (:mod:`farspan.ops.coca.waves`),
            a few on a Hopper GPU (:func:`farspan.ops.coca.decoding.half_width_refusal` says where not, and why), and
            the preparation on Nvidia GPUs (:mod:`farspan.ops.coca.preparation`; no second derivatives).

    Returns:
        (b, h, n, dv) in q's dtype.

    >>> import torch
    >>> q, t, v = torch.randn(1, 4, 6, 8), torch.rand(1, 2, 6, 4), torch.randn(1, 2, 6, 8)
    >>> coca_attention(q, t, v, rotary=Rotary(8)).shape
    torch.Size([1, 4, 6, 8])
    """
    require_choice("form", form, FORMS)
    require(q.shape[-1] % 2 == 0, lambda: odd_width(q.shape[-1]))
    call = check_call(
        q,
        t,
        v,
        key_name="t",
        key_width=q.shape[-1] // 2,
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        scale=scale,
        backend=backend,
        backends=(*BACKENDS, "triton"),
    )
    if isinstance(rotary, Waves):
        require(backend == "auto", f"ready waves are for backend='auto', got {backend!r}; pass the Rotary")
        rotary.check(q, t, form)
        return attend_waves(q, t, v, rotary, sight=call.sight, scale=call.scale)
    if isinstance(rotary, tuple) and any(isinstance(part.query, Phases) for part in rotary):
        require(backend == "auto", f"a plan of phases is for backend='auto', got {backend!r}; pass the Rotary")
    if backend == "triton" or (backend == "auto" and auto_takes_triton(q, t, v, rotary, documents)):
        return triton_attention(q, t, v, rotary=rotary, form=form, call=call)
    if backend == "reference":
        require(
            rotary is None or isinstance(rotary, Rotary), "backend='reference' needs a Rotary, got a plan of angles"
        )
        assert not isinstance(rotary, tuple)
        scores = scores_coca(q, t, *turns(rotary, call.places, q.shape[-1], q.dtype), form)
        mask = visible(call.places, causal=causal, window=window, padding_mask=padding_mask, documents=documents)
        return attend(scores * call.scale, v, mask)
    if backend == "auto" and not isinstance(rotary, tuple) and _takes_waves(q, t, v, documents):
        if rotary is not None:
            check_dim(rotary, q)
        waves = Waves.of(rotary, call.places, form=form, causal=causal, dtype=q.dtype)
        return attend_waves(q, t, v, waves, sight=call.sight, scale=call.scale)
    prepare = partial(prepared, form=form)
    if rotary is None:
        return softmax_attention(*prepare(q, t, None, None), v, sight=call.sight, scale=call.scale)
    if isinstance(rotary, Rotary):
        check_dim(rotary, q)
        if backend == "auto":
            rotary = coca_plan(rotary, call.places, causal=causal, dtype=q.dtype)
        else:
            rotary = rotary.plan(call.places, call.places.n, call.places.m, causal=causal, dtype=q.dtype)
    return attend_by_segment(rotary, prepare, q, t, v, call)


coca_attention_reference = reference_twin(coca_attention)


def _takes_waves(q: Tensor, t: Tensor, v: Tensor, documents: Tensor | None) -> bool:
    return takes_waves(q.shape[2], q.device, gradient=wants_gradient(q, t, v), documents=documents is not None)
