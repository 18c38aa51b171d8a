"""The baselines under CoCA's contract: rotary attention (RoFormer, LLaMA), no positions (NoPE), and ALiBi."""

from typing import Any

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.dispatch import PREPARE, Call, Implementation, check_call, reference_twin, run
from farspan.ops.masking import AttentionMask, Positions
from farspan.ops.reference import attend, rotations, scores_alibi, scores_nope, scores_rope, visible
from farspan.ops.rotary import Rotary, rotate
from farspan.ops.sdpa import softmax_attention


def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    positions: Positions = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute rotary attention (Eq. 2) from q (b, h, n, d), k (b, g, m, d) and v (b, g, m, dv).

    `rotary` rotates q and k by their positions; None takes them as they are: without positions (NoPE), or rotated
    already. The other arguments are those of :func:`farspan.ops.coca_attention`.

    >>> q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8)  # decoding: one query, six keys
    >>> rope_attention(q, k, k, rotary=Rotary(8)).shape
    torch.Size([1, 4, 1, 8])
    """
    call = _rope_call(
        q,
        k,
        v,
        rotary=rotary,
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        mask=mask,
        scale=scale,
        backend=backend,
    )
    return run(ROPE, call)


def _rope_call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
    return check_call(ROPE, q, k, v, **options)


def _rope_reference(call: Call) -> Tensor:
    q, (k, v) = call.q, call.mask.clean(call.k, call.v)
    if call.rotary is None:
        scores = scores_nope(q, k)
    else:
        scores = scores_rope(q, k, *rotations(call.rotary, call.mask, q.shape[-1], q.dtype))
    return attend(scores * call.scale, v, visible(call.mask))


def _rope_sdpa(call: Call) -> Tensor:
    q, (k, v) = call.q, call.mask.clean(call.k, call.v)
    if call.rotary is not None:
        angles = call.mask.angles(call.rotary)
        q, k = rotate(q, angles.query(q.dtype)), rotate(k, angles.key(k.dtype))
    return softmax_attention(q, k, v, call.mask, call.scale)


def alibi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slopes: Tensor | None = None,
    positions: Positions = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute attention with linear biases (Press et al. 2022): scores q·k - slope·|m-n|, one slope per head.

    The bias is built for one block of queries at a time, so memory grows with N, not N². `slopes` (h) defaults to
    :func:`alibi_slopes`; the other arguments are those of :func:`farspan.ops.coca_attention`.

    >>> q = torch.randn(1, 2, 5, 8)
    >>> alibi_attention(q, q, q).shape
    torch.Size([1, 2, 5, 8])
    """
    call = _alibi_call(
        q,
        k,
        v,
        slopes=slopes,
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        mask=mask,
        scale=scale,
        backend=backend,
    )
    return run(ALIBI, call)


def _alibi_call(q: Tensor, k: Tensor, v: Tensor, *, slopes: Tensor | None, **options: Any) -> Call:
    if slopes is None:
        slopes = alibi_slopes(q.shape[1], device=q.device)
    require(
        slopes.shape == (q.shape[1],),
        f"slopes must have shape ({q.shape[1]},), one per query head, got {tuple(slopes.shape)}",
    )
    if slopes.device.type == "cpu" and not torch.compiler.is_compiling():
        require(
            bool((slopes >= 0).all()), f"slopes must be ≥ 0, got {float(slopes.min())}; distance only lowers scores"
        )
    return check_call(ALIBI, q, k, v, slopes=slopes, **options)


def _alibi_reference(call: Call) -> Tensor:
    assert call.slopes is not None
    k, v = call.mask.clean(call.k, call.v)
    return attend(scores_alibi(call.q, k, call.slopes, call.mask, call.scale), v, visible(call.mask))


def _alibi_sdpa(call: Call) -> Tensor:
    k, v = call.mask.clean(call.k, call.v)
    return softmax_attention(call.q, k, v, call.mask, call.scale, call.slopes)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Compute 2^(-8i/h), i = 1 … h; if h is no power of two, every second slope of the next power fills up.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    steps = [8 * i / power for i in range(1, power + 1)]
    steps += [8 * i / (2 * power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0**-step for step in steps], dtype=torch.float32, device=device)


ROPE = (
    Implementation("sdpa", ("auto", "sdpa"), lambda call: None, _rope_sdpa),
    Implementation("reference", ("reference",), lambda call: None, _rope_reference),
)
ALIBI = (
    Implementation("sdpa", ("auto", "sdpa"), lambda call: None, _alibi_sdpa),
    Implementation("reference", ("reference",), lambda call: None, _alibi_reference),
)
PREPARE[rope_attention] = ROPE, _rope_call
PREPARE[alibi_attention] = ALIBI, _alibi_call

rope_attention_reference = reference_twin(rope_attention)
alibi_attention_reference = reference_twin(alibi_attention)
