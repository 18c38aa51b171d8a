"""Softmax attention over queries and keys in dot-product form, in O(N) memory, on any device.

RoPE, ALiBi and every form of CoCA end here. A call that needs no mask is one scaled_dot_product_attention. Every other
call runs in blocks of queries: a block reads only the keys it sees and builds only its own part of the mask, which the
backward pass computes again instead of keeping it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from farspan.ops.device import wants_gradient
from farspan.ops.masking import AttentionMask

MASK_ELEMENTS = 2**23
"""Upper bound on the elements of one block's mask on a CPU (32 MiB in float32)."""
GPU_TIMES = 64
"""A GPU needs larger blocks to be busy, and has the memory; its kernels copy a mask for every row and head."""


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None = None
) -> Tensor:
    """Compute softmax(scale·q·k - slope·distance)·v over the visible keys.

    q (b, h, n, d), k (b, g, m, d), v (b, g, m, dv) → (b, h, n, dv). A query that sees no key returns zeros, not NaN,
    and has zero gradients.
    """
    width = v.shape[-1]
    q, k, v = _equal_width(q, k, v)
    if scale <= 0:  # the CPU kernel finds its maximum before it applies the scale
        q, scale = q * scale, 1.0
    if slopes is None and mask.shows_everything:
        out = _sdpa(q, k, v, scale)
    elif slopes is None and mask.is_triangle and (mask.n == mask.m or q.is_cuda):
        out = _causal(q, k, v, scale)
    else:
        out = _blocked(q, k, v, mask, scale, slopes)
    return out if out.shape[-1] == width else out[..., :width]


def _blocked(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None
) -> Tensor:
    plain = mask.padding is None and mask.documents is None and mask.aligned
    copies = (q.shape[0] if not plain or q.is_cuda else 1) * (q.shape[1] if slopes is not None or q.is_cuda else 1)
    keys = mask.m if mask.window is None else min(mask.m, 2 * mask.window)
    elements = MASK_ELEMENTS * (GPU_TIMES if q.is_cuda else 1)
    rows = min(mask.n, max(16, elements // (copies * keys)))
    if mask.window is not None and mask.aligned:
        rows = min(rows, max(mask.window, 64))  # longer blocks would read keys that most of their queries cannot see
    if rows == mask.n:
        return _block(q, k, v, mask, 0, rows, scale, slopes)
    spans = [(start, min(start + rows, mask.n)) for start in range(0, mask.n, rows)]
    if wants_gradient(q, k, v):
        parts = [checkpoint(_block, q, k, v, mask, *span, scale, slopes, use_reentrant=False) for span in spans]
        return torch.cat(parts, dim=2)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for start, stop in spans:
        out[:, :, start:stop] = _block(q, k, v, mask, start, stop, scale, slopes)
    return out


def _block(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, start: int, stop: int, scale: float, slopes: Tensor | None
) -> Tensor:
    low, high = mask.key_range(start, stop)
    if stop - start == mask.n:  # layers share the only block of a mask
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
    return _with_fixed_layout(out)


def _with_fixed_layout(out: Tensor) -> Tensor:
    """Apply :func:`fix_layout` where cuDNN may compute the gradient."""
    by_cudnn = out.requires_grad and out.is_cuda and out.dtype in (torch.bfloat16, torch.float16)
    return fix_layout(out) if by_cudnn else out


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


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    if n == m:
        return _sdpa(q, k, v, scale, causal=True)
    if torch.compiler.is_compiling():  # not every version of torch can trace the lower-right bias
        return _sdpa(q, k, v, scale, torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n))
    from torch.nn.attention.bias import causal_lower_right  # imports the whole of torch.compile

    k, v = _repeat(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n, m), scale=scale)
    return _with_fixed_layout(out)


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))
