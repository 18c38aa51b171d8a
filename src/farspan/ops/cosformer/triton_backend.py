"""Linear attention on Triton kernels: when they can run, and how a call becomes one of theirs.

In bfloat16 the gradient of q loses digits where values have a large mean: its part δ_i = -(g_i·o_i) comes from the
output as it was rounded, and nearly cancels against g_i·v_j. Measured at d = 64: an error of 3.3e-3 against the 1.6e-3
of backend="chunked", which computes the output again in float32. The raised cosine, whose weights nearly cancel at
distance 2M, is multiplied in float32 throughout.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.errors import require
from farspan.ops.call import drop_trivial
from farspan.ops.cosformer import chunked
from farspan.ops.cosformer.chunked import Keys
from farspan.ops.cosformer.run import check_state, run, silenced
from farspan.ops.cosformer.state import LinearState
from farspan.ops.cosformer.weights import ACTIVATIONS, EPSILON, Kernel, Shape
from farspan.ops.launch import cannot_derive_forwards, cannot_launch, is_hopper, may_keep, power_of_2
from farspan.ops.positions import Positions

WIDEST = 128


def auto_takes_triton(
    kernel: Kernel, q: Tensor, v: Tensor, places: Positions, causal: bool, documents: Tensor | None
) -> bool:
    """Whether backend="auto" hands a call to the kernels: what was timed, and faster by 9 to 13 times.

    That is the paper's cosFormer over its own keys, causal, in bfloat16, on a Hopper GPU; timed from 1 024 tokens on,
    without padding, documents and states (docs/reproducing.md). The kernels have no second derivatives.
    """
    papers = kernel.numerator == kernel.denominator == Shape(0, 1) and kernel.query_map is ACTIVATIONS["relu"]
    timed = papers and causal and q.dtype == torch.bfloat16 and places.n == places.m > 1
    if not (timed and q.is_cuda and is_hopper(q.device.index)):
        return False
    return triton_refusal(kernel, q, v, places, causal, documents) is None


def triton_refusal(
    kernel: Kernel, q: Tensor, v: Tensor, places: Positions, causal: bool, documents: Tensor | None
) -> str | None:
    """Why backend="triton" cannot take a call, and what to do about it; None when it can."""
    widest = max(q.shape[-1], v.shape[-1])
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"backend='triton' takes float32, bfloat16 or float16, got {q.dtype}; use backend='chunked'"
    if widest > WIDEST:
        return f"backend='triton' takes heads up to {WIDEST} wide, got {widest}; use backend='chunked'"
    if kernel.decay:
        return "backend='triton' has no decay: its sums would have to fade from token to token; use backend='chunked'"
    if causal and not places.aligned:
        return "backend='triton' takes queries that are the last keys; for free positions use backend='chunked'"
    if not causal and documents is not None:
        return "backend='triton' sees documents only with causal=True; use backend='chunked'"
    return cannot_derive_forwards("backend", "chunked") or cannot_launch(q.device.type, "backend", "chunked")


def triton_run(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Positions,
    *,
    causal: bool,
    padding_mask: Tensor | None,
    documents: Tensor | None,
    state: LinearState | None,
    return_state: bool,
) -> tuple[Tensor, LinearState | None]:
    """:func:`farspan.ops.cosformer.run.run` on the kernels; raises where :func:`triton_refusal` has a reason.

    A single query with a state's past is a handful of numbers, and is left to torch.
    """
    reason = triton_refusal(kernel, q, v, places, causal, documents)
    require(reason is None, str(reason))
    if places.n == 1 and causal and documents is None:
        return run(kernel, q, k, v, places, causal=True, padding_mask=padding_mask, documents=None, state=state)
    if state is not None:
        check_state(kernel, k, v, state)
    keep = drop_trivial(padding_mask)
    before = places.m - places.n if causal else 0
    with torch.autocast(q.device.type, enabled=False):
        padded = F.pad(q, (0, 0, before, 0)) if before else q  # the queries of earlier keys, which nobody asks
        out, numerator, denominator = _launch(
            kernel, padded, k, v, places, causal, keep, documents, state, return_state
        )
    out = silenced(out[:, :, before:], places, keep)
    if not return_state:
        return out, None
    key = places.key.double()
    keys = Keys(
        k, v, key.expand(max(key.shape[0], 1 if state is None else state.position.shape[0]), -1), keep, documents
    )
    return out, chunked.advance(keys, state or chunked.start(kernel, keys), numerator, denominator)


def _launch(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Positions,
    causal: bool,
    keep: Tensor | None,
    documents: Tensor | None,
    state: LinearState | None,
    remember: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and sums after it, of n = m queries if causal."""
    from farspan.ops.triton.linear import linear_attention_op

    assert kernel.shared or kernel.denominator == Shape(1, 0)
    query, key = _angles(kernel, places, causal, state)
    out, _, _, _, numerator, denominator = linear_attention_op(
        q,
        k,
        v,
        None if state is None else state.numerator,
        None if state is None else state.denominator,
        query,
        key,
        keep,
        documents,
        float(kernel.numerator.still),
        float(kernel.numerator.wave),
        kernel.shared,
        kernel.query_map is ACTIVATIONS["relu"],
        EPSILON[q.dtype],
        causal,
        0,
        remember,
    )
    return out, numerator, denominator


def _angles(
    kernel: Kernel, places: Positions, causal: bool, state: LinearState | None
) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin (b|1, 2, ·) of queries and keys, counted from where the sums have their anchor."""
    if not kernel.numerator.wave:
        return None, None
    if state is None and places.first is not None:
        angles = _counted(kernel, places.m, places.device)
        return angles if causal else angles[:, :, places.m - places.n :], angles
    anchor = places.key[:, :1].double() if state is None else state.anchor
    key = _table(kernel, places.key - anchor)
    return key if causal else _table(kernel, places.query - anchor), key


def _counted(kernel: Kernel, n: int, device: torch.device) -> Tensor:
    """The angles of 0 … n-1."""
    if not may_keep():
        return _table(kernel, torch.arange(n, dtype=torch.float64, device=device)[None])
    return _cached(kernel, power_of_2(n), device)[:, :, :n]


@lru_cache(maxsize=16)
def _cached(kernel: Kernel, n: int, device: torch.device) -> Tensor:
    """Made once: in a short text, a handful of tiny launches would cost more than the attention."""
    with torch.inference_mode(False):  # the first call may be inference, and a later one training
        return _table(kernel, torch.arange(n, dtype=torch.float64, device=device)[None])


def _table(kernel: Kernel, positions: Tensor) -> Tensor:
    return torch.cat([x[:, :, :, 0] for x in kernel.angles(positions.double(), torch.float32)], dim=1)
