"""The baselines under the same contract as CoCA: rotary attention (RoFormer) and ALiBi."""

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.call import check_call, reference_twin
from farspan.ops.positions import PositionsArgument
from farspan.ops.rotary import Angles, Plan, Rotary, rotate
from farspan.ops.rotary_reference import turns
from farspan.ops.segments import attend_by_segment, make_plan
from farspan.ops.softmax.core import softmax_attention
from farspan.ops.softmax.reference import attend, scores_alibi, scores_nope, scores_rope, visible


def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | Plan | None,
    positions: PositionsArgument = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Rotary attention (Eq. 2): q (b, h, n, d) and k (b, g, m, d), both before rotation; v (b, g, m, dv).

    The other arguments are those of :func:`farspan.ops.coca_attention`; rotary=None means no position at all (NoPE).

    >>> q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8)  # decoding: one query, six keys
    >>> rope_attention(q, k, k, rotary=Rotary(8)).shape
    torch.Size([1, 4, 1, 8])
    """
    call = check_call(
        q,
        k,
        v,
        key_name="k",
        key_width=q.shape[-1],
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        scale=scale,
        backend=backend,
    )
    if backend == "reference":
        require(
            rotary is None or isinstance(rotary, Rotary), "backend='reference' needs a Rotary, got a plan of angles"
        )
        if rotary is None:
            scores = scores_nope(q, k)
        else:
            scores = scores_rope(q, k, *turns(rotary, call.places, q.shape[-1], q.dtype))
        mask = visible(call.places, causal=causal, window=window, padding_mask=padding_mask, documents=documents)
        return attend(scores * call.scale, v, mask)
    plan = make_plan(rotary, call.places, q, causal=causal)
    if plan is None:
        return softmax_attention(q, k, v, sight=call.sight, scale=call.scale)
    return attend_by_segment(plan, rotated, q, k, v, call)


def rotated(q: Tensor, k: Tensor, query: Angles, key: Angles) -> tuple[Tensor, Tensor]:
    """f(q, m) and f(k, n), whose dot product is Eq. 2."""
    return rotate(q, query), rotate(k, key)


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor | None = None,
    positions: PositionsArgument = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention with linear biases (Press et al. 2022): scores q·k - slope·|m-n|, one slope a head.

    The bias is built for one block of queries at a time, so memory grows with N, not N². `slopes` (h) defaults to
    :func:`alibi_slopes`; the other arguments are those of :func:`farspan.ops.coca_attention`.

    >>> q = torch.randn(1, 2, 5, 8)
    >>> alibi_attention(q, q, q).shape
    torch.Size([1, 2, 5, 8])
    """
    call = check_call(
        q,
        k,
        v,
        key_name="k",
        key_width=q.shape[-1],
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        scale=scale,
        backend=backend,
    )
    slopes = alibi_slopes(q.shape[1], device=q.device) if slopes is None else slopes
    require(
        slopes.shape == (q.shape[1],),
        f"slopes must have shape ({q.shape[1]},), one a query head, got {tuple(slopes.shape)}",
    )
    if slopes.device.type == "cpu" and not torch.compiler.is_compiling():
        require(
            bool((slopes >= 0).all()), f"slopes must be ≥ 0, got {float(slopes.min())}; distance only lowers scores"
        )
    if backend == "reference":
        scores = scores_alibi(q, k, slopes, call.places, call.scale)
        mask = visible(call.places, causal=causal, window=window, padding_mask=padding_mask, documents=documents)
        return attend(scores, v, mask)
    return softmax_attention(q, k, v, sight=call.sight, scale=call.scale, slopes=slopes)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """2^(-8i/h), i = 1 … h; for other than powers of two, every second slope of the next power fills up (published).

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    steps = [8 * i / power for i in range(1, power + 1)]
    steps += [8 * i / (2 * power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0**-step for step in steps], dtype=torch.float32, device=device)


rope_attention_reference = reference_twin(rope_attention)
alibi_attention_reference = reference_twin(alibi_attention)
