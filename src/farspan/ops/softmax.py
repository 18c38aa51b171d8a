"""Softmax attention in dot-product form: RoPE, NoPE, ALiBi, and the SDPA calls that CoCA shares with them.

Causal and unmasked calls are one scaled_dot_product_attention. Other calls run in blocks of queries, so that memory is
O(N): a block reads only the keys it sees and builds only its own part of the mask. Where there are several blocks, the
backward pass computes them again instead of keeping their masks.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from farspan.errors import require
from farspan.ops.device import wants_gradient
from farspan.ops.dispatch import TABLES_BY_OP, Call, Implementation, Table, check_call, reference_twin, run
from farspan.ops.masking import AttentionMask, Positions
from farspan.ops.reference import attend, rotations, scores_alibi, scores_nope, scores_rope, visible
from farspan.ops.rotary import Rotary

CUDNN = (torch.bfloat16, torch.float16)
"""Dtypes whose gradients cuDNN may compute."""
MASK_ELEMENTS = 2**23
"""Upper bound on the elements of one block's mask on a CPU (32 MiB in float32)."""
GPU_TIMES = 64
"""A GPU needs larger blocks to be busy, and has the memory; its kernels copy a mask for every row and head."""


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
    call = check_call(
        ROPE,
        q,
        k,
        v,
        rotary=rotary,
        mask=mask,
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        scale=scale,
        backend=backend,
    )
    return run(ROPE, call)


def _rope_reference(call: Call) -> Tensor:
    q, k, v = call.q, call.k, call.v
    if call.rotary is None:
        scores = scores_nope(q, k)
    else:
        scores = scores_rope(q, k, *rotations(call.rotary, call.mask, q.shape[-1], q.dtype))
    return attend(scores * call.scale, v, visible(call.mask))


def _rope_sdpa(call: Call) -> Tensor:
    q, k = call.q, call.k
    if call.rotary is not None:
        angles = call.mask.angles(call.rotary)
        q, k = angles.rotate_queries(q), angles.rotate_keys(k)
    return softmax_attention(q, k, call.v, call.mask, call.scale)


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
    call = _check_alibi(
        ALIBI,
        q,
        k,
        v,
        slopes=slopes,
        mask=mask,
        positions=positions,
        causal=causal,
        window=window,
        padding_mask=padding_mask,
        documents=documents,
        scale=scale,
        backend=backend,
    )
    return run(ALIBI, call)


def _check_alibi(
    table: Table, q: Tensor, k: Tensor, v: Tensor, *, slopes: Tensor | None = None, **options: Any
) -> Call:
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
    return check_call(table, q, k, v, slopes=slopes, **options)


def _alibi_reference(call: Call) -> Tensor:
    assert call.slopes is not None
    return attend(scores_alibi(call.q, call.k, call.slopes, call.mask, call.scale), call.v, visible(call.mask))


def _alibi_sdpa(call: Call) -> Tensor:
    return softmax_attention(call.q, call.k, call.v, call.mask, call.scale, call.slopes)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Compute 2^(-8i/h), i = 1 … h; if h is no power of two, every second slope of the next power fills up.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    steps = [8 * i / power for i in range(1, power + 1)]
    steps += [8 * i / (2 * power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0**-step for step in steps], dtype=torch.float32, device=device)


ROPE = Table(
    Implementation("sdpa", ("auto", "sdpa"), _rope_sdpa),
    Implementation("reference", ("reference",), _rope_reference),
)
ALIBI = Table(
    Implementation("sdpa", ("auto", "sdpa"), _alibi_sdpa),
    Implementation("reference", ("reference",), _alibi_reference),
    check=_check_alibi,
)
TABLES_BY_OP[rope_attention], TABLES_BY_OP[alibi_attention] = ROPE, ALIBI

rope_attention_reference = reference_twin(rope_attention)
alibi_attention_reference = reference_twin(alibi_attention)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None = None
) -> Tensor:
    """Compute softmax(scale·q·k - slope·distance)·v over the visible keys.

    q (b, h, n, d), k (b, g, m, d), v (b, g, m, dv) → (b, h, n, dv). A query that sees no key returns zeros, not NaN,
    and has zero gradients.
    """
    width = v.shape[-1]
    if q.shape[-1] != width:
        q, k, v = _equal_width(q, k, v)
    if scale <= 0:  # the CPU kernel finds its maximum before it applies the scale
        q, scale = q * scale, 1.0
    if slopes is None and mask.shows_everything:
        out = _sdpa(q, k, v, scale)
    elif slopes is None and mask.is_triangle and mask.n == mask.m:
        out = _sdpa(q, k, v, scale, causal=True)
    elif slopes is None and mask.is_triangle and q.is_cuda:
        out = _lower_right(q, k, v, scale)
    else:
        out = _blocked(q, k, v, mask, scale, slopes)
    return out if out.shape[-1] == width else out[..., :width]


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None) -> Tensor:
    copies = (q.shape[0] if not mask.is_plain or q.is_cuda else 1) * (
        q.shape[1] if slopes is not None or q.is_cuda else 1
    )
    keys = mask.m if mask.window is None else min(mask.m, 2 * mask.window)
    elements = MASK_ELEMENTS * (GPU_TIMES if q.is_cuda else 1)
    rows = min(mask.n, max(16, elements // (copies * keys)))
    if mask.window is not None and mask.aligned:
        rows = min(rows, max(mask.window, 64))  # longer blocks would read keys that most of their queries cannot see
    if rows == mask.n:
        return _block(q, k, v, mask, 0, rows, scale, slopes)
    spans = [(start, min(start + rows, mask.n)) for start in range(0, mask.n, rows)]
    if wants_gradient(q, k, v):
        again = partial(checkpoint, _block, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(q, k, v, mask, *span, scale, slopes) for span in spans], dim=2)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for start, stop in spans:
        out[:, :, start:stop] = _block(q, k, v, mask, start, stop, scale, slopes)
    return out


def _block(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, start: int, stop: int, scale: float, slopes: Tensor | None
) -> Tensor:
    low, high = mask.key_range(start, stop)
    if stop - start == mask.n and not torch.compiler.is_compiling():  # layers share the only block of a mask
        seen, blind = mask.share("block", lambda: _visible(mask, start, stop, low, high))
    else:
        seen, blind = _visible(mask, start, stop, low, high)
    if slopes is not None:
        distance = mask.distance(start, stop, low, high).abs().to(q.dtype)[:, None]
        seen = torch.where(seen, distance * -slopes.to(q.dtype)[:, None, None], -torch.inf)
    if stop - start < mask.n or high - low < mask.m:
        q, k, v = q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high]
    out = _sdpa(q, k, v, scale, seen)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _visible(mask: AttentionMask, start: int, stop: int, low: int, high: int) -> tuple[Tensor, Tensor | None]:
    """Compute a block's mask, and which of its queries see nothing; those see everything in the mask."""
    seen, blind = mask.block(start, stop, low, high), None
    if mask.padding is not None or not mask.aligned:
        blind = ~seen.any(dim=-1, keepdim=True)
        seen = seen | blind  # a softmax over nothing is NaN: let it see everything, then discard the result
    return seen, blind


def _equal_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the narrower of (q, k) and v with zeros: flash kernels want one width, and zeros change nothing."""
    gap = v.shape[-1] - q.shape[-1]
    if gap > 0:
        return F.pad(q, (0, gap)), F.pad(k, (0, gap)), v
    return (q, k, F.pad(v, (0, -gap))) if gap < 0 else (q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    (b, h, n, d), g = q.shape, k.shape[1]
    grouped = False
    if h != g:  # an `if`, not an assignment: torch.compile then specialises on it, even with symbolic head counts
        grouped = True
    if grouped and n == 1 and q.device.type == "cpu" and (mask is None or mask.shape[1] == 1) and _folds(b, h, g):
        return _sdpa(q.reshape(b, g, h // g, d), k, v, scale, mask).reshape(b, h, 1, -1)
    if grouped and q.is_cuda and mask is not None:  # no CUDA kernel takes a mask and grouped heads together
        (k, v), grouped = _repeat(q, k, v), False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return fix_layout(out) if out.is_cuda and out.requires_grad and out.dtype in CUDNN else out


def fix_layout(out: Tensor) -> Tensor:
    """Return `out` (b, h, n, d) such that its gradient is laid out as (b, n, h, d).

    Work around a bug of torch 2.11: its cache of cuDNN backward graphs ignores the strides of the gradient. A second
    gradient of the same shape but other strides is read with the strides of the first, even beyond its end. The layout
    is the one that follows from the transpose to (b, n, h·d) before an output projection, so that nothing is copied
    there. In a compiled graph an expanded gradient, such as that of a sum, still arrives as it is.

    >>> fix_layout(torch.zeros(2, 3, 4, 8)).transpose(1, 2).is_contiguous()
    True
    """
    tokens = out.transpose(1, 2)
    flat = tokens.reshape(-1)  # in the backward pass the gradient is then contiguous or expanded
    if flat.requires_grad and not torch.compiler.is_compiling():
        flat.register_hook(Tensor.contiguous)  # an expanded one torch would lay out as the queries are
    return flat.view(tokens.shape).transpose(1, 2)


def _folds(b: int, h: int, g: int) -> bool:
    """Whether the heads of a group should become queries of their key head, which is then read once for all of them.

    A CPU's threads share the heads: with many threads and few key heads some threads would be idle.
    """
    if torch.compiler.is_compiling():
        return False
    threads = torch.get_num_threads()
    return 2 * -(-b * g // threads) <= -(-b * h // threads)


def _lower_right(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Run a causal call whose queries are the last of the keys."""
    n, m = q.shape[2], k.shape[2]
    if torch.compiler.is_compiling():  # not every version of torch can trace the lower-right bias
        return _sdpa(q, k, v, scale, torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n))
    from torch.nn.attention.bias import causal_lower_right  # imports the whole of torch.compile

    k, v = _repeat(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n, m), scale=scale)
    return fix_layout(out) if out.requires_grad and out.dtype in CUDNN else out


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))
