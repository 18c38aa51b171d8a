"""The collinear family: CoCA and its polar form, each with op, dispatch table and dot-product form (docs/math.md)."""

from typing import Unpack

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.coca_decode import decode_cpu, decode_triton, why_not_decode_cpu, why_not_decode_triton
from farspan.ops.device import takes_forward_derivatives, why_not_triton, working_dtype
from farspan.ops.dispatch import Call, Implementation, SoftmaxOptions, Table, check_call, operation, reference_twin
from farspan.ops.reference import attend, rotations, scores_coca, scores_nope, scores_polar, visible
from farspan.ops.rotary import Angles, Rotary
from farspan.ops.softmax import DOT_PRODUCT, WIDEST, softmax_attention, why_never_by_kernel


@operation(SoftmaxOptions)
def coca_attention(
    q: Tensor, t: Tensor, v: Tensor, *, rotary: Rotary | None, form: str = "exact", **options: Unpack[SoftmaxOptions]
) -> Call:
    """Compute collinear constrained attention: query m sees key n as q_m∘t_n, so their initial angle is zero.

    Args:
        q: (b, h, n, d) queries, before rotation. If n < m they are the last n positions.
        t: (b, g, m, d/2) coefficients, un-rotated, after their activation (Eq. 6); g divides h.
        v: (b, g, m, dv) values.
        rotary: the angles; None for no rotation (NoPE).
        form: "exact" (Eq. 9 = Eq. 17) or "slack" (Eq. 10). Strict is exact with tied q (Eq. 11).
        positions: see :mod:`farspan.ops.masking`.
        causal: a query sees keys up to itself.
        window: see only the last `window` keys, itself included.
        padding_mask: (b, m) bool, True = keep. A query that sees nothing returns zeros. What padded keys and values
            hold, even NaN, reaches no output.
        documents: (b, m) int; a query sees its own document only.
        mask: a ready :class:`~farspan.ops.masking.AttentionMask` instead of the five arguments above. Layers that
            share one also share its angles.
        scale: multiplies the scores; default 1/√d.
        backend: "auto", "sdpa" (dot-product form, O(N) memory), "triton" (kernels; raises where they cannot run) or
            "reference" (the equations, N×N×d). :func:`farspan.ops.explain` tells what "auto" takes and why. The
            feature kernel has no second derivatives.

    Returns:
        (b, h, n, dv) in q's dtype.

    >>> q, t, v = torch.randn(1, 4, 6, 8), torch.rand(1, 2, 6, 4), torch.randn(1, 2, 6, 8)
    >>> coca_attention(q, t, v, rotary=Rotary(8)).shape
    torch.Size([1, 4, 6, 8])
    """
    return check_call(COCA, q, t, v, rotary=rotary, form=form, **options)


def coca_features(
    q: Tensor, t: Tensor, query: Tensor | None, key: Tensor | None, *, form: str = "exact"
) -> tuple[Tensor, Tensor]:
    """Compute q̃ (b, h, n, d) and k̃ (b, g, m, d) with q̃·k̃ = a(m, n), in q's dtype.

    `query` and `key` are tables of cosines and sines, (b|1, 1, ·, 2, d/2), see :class:`~farspan.ops.rotary.Angles`.
    Without them (NoPE) both forms are Σ_j t_j ‖q_j‖², of width d/2.

    >>> one = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2, 1)
    >>> q, t = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), torch.tensor([2.0]).view(1, 1, 1, 1)
    >>> q_, k_ = coca_features(q, t, one, one)
    >>> (q_ * k_).sum().item()  # t·‖q‖², whatever the direction of q
    50.0
    """
    a, b = q.to(working_dtype(q.dtype)).chunk(2, dim=-1)
    k_ = t.to(working_dtype(t.dtype))
    if query is None or key is None:
        q_ = a * a + b * b
    elif form == "exact":  # ‖q_j‖² (cos mθ_j, sin mθ_j) and t_j (cos nθ_j, sin nθ_j)
        q_ = ((a * a + b * b)[..., None, :] * query).flatten(-2)
        k_ = (k_[..., None, :] * key).flatten(-2)
    else:  # q∘f(q, m) and f((t, t), n)
        cos, sin = query[..., 0, :], query[..., 1, :]
        q_ = torch.cat((a * (a * cos - b * sin), b * (a * sin + b * cos)), dim=-1)
        cos, sin = key[..., 0, :], key[..., 1, :]
        k_ = (k_[..., None, :] * torch.stack((cos - sin, sin + cos), dim=-2)).flatten(-2)
    if q.dtype == torch.float16:
        q_, k_ = balance(q_, k_)
    return q_.to(q.dtype), k_.to(q.dtype)


def balance(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Move a power of two from q to k, or back, so that their largest entries are alike; q·k keeps every bit.

    q̃ holds squares and leaves float16's range when q passes 256; after this only logits near 10⁹ could.
    """
    size = q.shape[1] // k.shape[1]
    sizes = q.detach().abs().nan_to_num(0.0, 0.0)  # padded queries may hold anything
    heads = sizes.amax(dim=(-2, -1), keepdim=True).unflatten(1, (-1, size)).amax(dim=2)
    ratio = heads / k.detach().abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-30)
    shift = torch.exp2((ratio.clamp(min=1e-30).log2() / 2).round().clamp(-24, 24))
    return q / shift.repeat_interleave(size, dim=1), k * shift


def kernel_features(
    q: Tensor, t: Tensor, angles: Angles, form: str, phase: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute q̃ and k̃ in one Triton kernel, forward and backward, without tables of angles.

    `form` is that of CoCA, or "polar": then q and t are magnitudes, and `phase` is (h, r).
    """
    from farspan.ops.triton.coca_features import prepare_op

    steps, (query, key) = angles.steps, (None, None) if angles.positions is None else angles.positions
    if any(x is not None and x.device != q.device for x in (t, steps, query, key)):  # the kernel would not notice
        raise ValueError(f"t, angles and positions must be on the device of q, {q.device}; move them there")
    first, phase = angles.first or 0, None if phase is None else phase.float().contiguous()
    return prepare_op(q, t, phase, steps, query, key, first + angles.offset, first, form, angles.rotary.factor)


def why_not_feature_kernel(dtype: torch.dtype, width: int, device: torch.device) -> str | None:
    """Return why the feature kernel cannot run on its own choice, or None.

    >>> why_not_feature_kernel(torch.float32, 64, torch.device("cpu"))
    'the feature kernel needs CUDA tensors, got cpu'
    """
    if device.type != "cuda":
        return f"the feature kernel needs CUDA tensors, got {device.type}"
    if width > WIDEST:  # the width is not in the message: torch.compile may let it vary
        return f"the feature kernel takes heads up to {WIDEST} wide"
    if takes_forward_derivatives():
        return "the feature kernel has no forward-mode derivatives"
    if dtype == torch.float16:
        return "the feature kernel takes bfloat16 and float32, got torch.float16"
    return why_never_by_kernel(dtype, device)


def _why_not_fused(call: Call) -> str | None:
    q = call.q
    if call.backend == "auto":
        return "nothing rotates" if call.rotary is None else why_not_feature_kernel(q.dtype, call.rotary.dim, q.device)
    if q.dtype not in (torch.bfloat16, torch.float32):
        return f"backend='triton' takes float32 or bfloat16, got {q.dtype}; use backend='sdpa'"
    if takes_forward_derivatives():
        return "backend='triton' has no forward-mode derivatives; use backend='sdpa'"
    return why_not_triton(q.device.type)


def _fused(call: Call) -> Tensor:
    if call.rotary is None:
        return _sdpa(call)
    return softmax_attention(call, *kernel_features(call.q, call.k, call.mask.angles(call.rotary), call.form))


def _sdpa(call: Call) -> Tensor:
    tables = call.mask.tables(call.rotary, call.q.dtype)
    return softmax_attention(call, *coca_features(call.q, call.k, *tables, form=call.form))


def _reference(call: Call) -> Tensor:
    rotated = rotations(call.rotary, call.mask, call.q.shape[-1], call.q.dtype)
    return attend(scores_coca(call.q, call.k, *rotated, call.form) * call.scale, call.v, visible(call.mask))


COCA = Table(
    Implementation("decode_triton", ("auto", "triton"), decode_triton, why_not_decode_triton, "cuda"),
    Implementation("decode_cpu", ("auto",), decode_cpu, why_not_decode_cpu, "cpu"),
    Implementation("fused", ("auto", "triton"), _fused, _why_not_fused, "cuda", DOT_PRODUCT),
    Implementation("sdpa", ("auto", "sdpa"), _sdpa, then=DOT_PRODUCT),
    Implementation("reference", ("reference",), _reference),
    key_name="t",
)
"""decode_triton: half-width kernel, reads t as it is cached. decode_cpu: one query, t times one table of cosines.
fused: features by a kernel, then SDPA. sdpa: features by torch, then SDPA. reference: the equations."""

coca_attention_reference = reference_twin(coca_attention)


# Polar form (PoPE, arXiv 2509.10534): queries and keys are magnitudes, positions are their angles.
# score(m, n) = Σ_c q_c k_c cos((m-n)θ_c + δ_c) is Eq. 17 with q_c ≥ 0 in place of ‖q_j‖². PoPE has d frequencies per
# head, `coca-polar` d/2.


@operation(SoftmaxOptions)
def pope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    phase: Tensor | None = None,
    **options: Unpack[SoftmaxOptions],
) -> Call:
    """Compute polar attention: score(m, n) = Σ_c q_c k_c cos((m-n)θ_c + δ_c).

    Its dot-product form is 2r wide, twice as wide as a rotary score of r numbers. That is cheap in windows.

    Args:
        q: (b, h, n, r) magnitudes ≥ 0. If n < m they are the last n positions.
        k: (b, g, m, r) magnitudes ≥ 0, un-rotated; g divides h.
        v: (b, g, m, dv) values.
        rotary: the angles, ``Rotary(2 * r)``, which has r frequencies; None for no positions.
        phase: (h, r) δ, learned; None for 0.
        scale: multiplies the scores; default 1/√r.
        backend: "auto", "sdpa" (dot-product form, O(N) memory), "triton" (features and masks by kernels) or
            "reference".

    The other arguments are those of :func:`farspan.ops.coca_attention`. Return (b, h, n, dv) in q's dtype.

    >>> q, k, v = torch.rand(1, 4, 6, 8), torch.rand(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    >>> pope_attention(q, k, v, rotary=Rotary(16), window=3).shape
    torch.Size([1, 4, 6, 8])
    """
    if phase is not None:
        require(rotary is not None, "phase needs angles, got rotary=None; leave the phase out")
        wanted = (q.shape[1], q.shape[-1])
        require(
            tuple(phase.shape) == wanted,
            lambda: f"phase must have shape {wanted}, one per head and frequency, got {tuple(phase.shape)}",
        )
    return check_call(POPE, q, k, v, rotary=rotary, phase=phase, **options)


def polar_features(x: Tensor, table: Tensor | None, phase: Tensor | None = None) -> Tensor:
    """Compute x_c (cos, sin) of the angles and phases, (b, h, n, 2r); x itself without a table.

    `table` holds cosines and sines (b|1, 1, n, 2, r), see :class:`~farspan.ops.rotary.Angles`; `phase` is (h, r).

    >>> quarter = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2, 1)
    >>> polar_features(torch.full((1, 1, 1, 1), 3.0), quarter).flatten().tolist()
    [0.0, 3.0]
    """
    if table is None:
        return x
    wide = x.to(working_dtype(x.dtype))
    if phase is None:
        return (wide[..., None, :] * table).flatten(-2).to(x.dtype)
    (cos, sin), phase = table.unbind(-2), phase[:, None].to(table.dtype)
    a, b = wide * phase.cos(), wide * phase.sin()  # at angle δ; a table per head would be larger than x
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(a * sin, b, cos)), dim=-1).to(x.dtype)


def _polar_sdpa(call: Call) -> Tensor:
    query, key = call.mask.tables(call.rotary, call.q.dtype)
    return softmax_attention(call, polar_features(call.q, query, call.phase), polar_features(call.k, key))


def _polar_reference(call: Call) -> Tensor:
    if call.rotary is None:
        scores = scores_nope(call.q, call.k)
    else:
        rotated = rotations(call.rotary, call.mask, call.rotary.dim, call.q.dtype)
        scores = scores_polar(call.q, call.k, call.phase, *rotated)
    return attend(scores * call.scale, call.v, visible(call.mask))


def _polar_fused(call: Call) -> Tensor:
    if call.rotary is None:
        return _polar_sdpa(call)
    features = kernel_features(call.q, call.k, call.mask.angles(call.rotary), "polar", call.phase)
    return softmax_attention(call, *features)


POPE = Table(
    Implementation("fused", ("auto", "triton"), _polar_fused, _why_not_fused, "cuda", DOT_PRODUCT),
    Implementation("sdpa", ("auto", "sdpa"), _polar_sdpa, then=DOT_PRODUCT),
    Implementation("reference", ("reference",), _polar_reference),
    rotary_width=2,
)

pope_attention_reference = reference_twin(pope_attention)
