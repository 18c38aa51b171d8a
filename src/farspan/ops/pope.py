"""Polar attention (PoPE, arXiv 2509.10534): queries and keys are magnitudes, positions are their angles.

With r magnitudes per head, score(m, n) = Σ_c q_c k_c cos((m-n)θ_c + δ_c), q, k ≥ 0: the collinear form of CoCA (Eq. 17)
with q_c in place of ‖q_j‖². PoPE has r = d frequencies, and `coca-polar` r = d/2.
"""

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.device import working_dtype
from farspan.ops.dispatch import TABLES_BY_OP, Call, Implementation, Table, check_call, reference_twin, run
from farspan.ops.masking import AttentionMask, Positions
from farspan.ops.reference import attend, rotations, scores_nope, scores_polar, visible
from farspan.ops.rotary import Rotary
from farspan.ops.softmax import DOT_PRODUCT, softmax_attention


def pope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    phase: Tensor | None = None,
    positions: Positions = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute polar attention: score(m, n) = Σ_c q_c k_c cos((m-n)θ_c + δ_c).

    Its dot-product form is 2r wide, twice as wide as a rotary score of r numbers. That is cheap in windows. Keys are
    cached un-rotated, r numbers each; every decoded token rotates all that it sees.

    Args:
        q: (b, h, n, r) magnitudes ≥ 0. If n < m they are the last n positions.
        k: (b, g, m, r) magnitudes ≥ 0, un-rotated; g divides h.
        v: (b, g, m, dv) values.
        rotary: the angles, ``Rotary(2 * r)``, which has r frequencies; None for no positions.
        phase: (h, r) δ, learned; None for 0.
        scale: multiplies the scores; default 1/√r.
        backend: "auto", "sdpa" (dot-product form, O(N) memory), "triton" (masks by a kernel) or "reference".

    The other arguments are those of :func:`farspan.ops.coca_attention`. Return (b, h, n, dv) in q's dtype.

    >>> q, k, v = torch.rand(1, 4, 6, 8), torch.rand(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    >>> pope_attention(q, k, v, rotary=Rotary(16), window=3).shape
    torch.Size([1, 4, 6, 8])
    """
    call = _check_pope(
        POPE,
        q,
        k,
        v,
        rotary=rotary,
        phase=phase,
        mask=mask,
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        scale=scale,
        backend=backend,
    )
    return run(POPE, call)


def _check_pope(
    table: Table, q: Tensor, k: Tensor, v: Tensor, *, phase: Tensor | None = None, **options: object
) -> Call:
    if phase is not None:
        wanted = (q.shape[1], q.shape[-1])
        require(
            tuple(phase.shape) == wanted,
            lambda: f"phase must have shape {wanted}, one per head and frequency, got {tuple(phase.shape)}",
        )
    return check_call(table, q, k, v, phase=phase, **options)  # type: ignore[arg-type]


def polar_features(x: Tensor, table: Tensor | None, phase: Tensor | None = None) -> Tensor:
    """Compute x_c (cos, sin) of the angles and phases, (b, h, n, 2r); x itself without a table.

    `table` holds cosines and sines (b|1, 1, n, 2, r), see :class:`~farspan.ops.rotary.Angles`; `phase` is (h, r).

    >>> quarter = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2, 1)
    >>> polar_features(torch.full((1, 1, 1, 1), 3.0), quarter).flatten().tolist()
    [0.0, 3.0]
    """
    if table is None:
        return x
    if phase is not None:
        (cos, sin), phase = table.unbind(-2), phase[:, None].to(table.dtype)
        table = torch.stack((cos * phase.cos() - sin * phase.sin(), sin * phase.cos() + cos * phase.sin()), dim=-2)
    return (x.to(working_dtype(x.dtype))[..., None, :] * table).flatten(-2).to(x.dtype)


def _sdpa(call: Call) -> Tensor:
    query = key = None
    if call.rotary is not None:
        angles = call.mask.angles(call.rotary)
        query, key = angles.query(call.q.dtype), angles.key(call.q.dtype)
    return softmax_attention(call, polar_features(call.q, query, call.phase), polar_features(call.k, key))


def _reference(call: Call) -> Tensor:
    if call.rotary is None:
        scores = scores_nope(call.q, call.k)
    else:
        rotated = rotations(call.rotary, call.mask, call.rotary.dim, call.q.dtype)
        scores = scores_polar(call.q, call.k, call.phase, *rotated)
    return attend(scores * call.scale, call.v, visible(call.mask))


POPE = Table(
    Implementation("sdpa", ("auto", "sdpa", "triton"), _sdpa, then=DOT_PRODUCT),
    Implementation("reference", ("reference",), _reference),
    check=_check_pope,
    rotary_width=2,
)
TABLES_BY_OP[pope_attention] = POPE

pope_attention_reference = reference_twin(pope_attention)
