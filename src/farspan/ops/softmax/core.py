"""Softmax attention over ready-made queries and keys in O(N) memory, on any device.

RoPE, ALiBi and every form of CoCA end here. What needs no mask goes to scaled_dot_product_attention in one piece
(flash where there is one). The rest runs in blocks of queries: each block looks only at the keys it can see and
builds only its own piece of the mask, which is made again in the backward pass instead of being kept.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MASK_ELEMENTS = 2**23
"""Upper bound on the elements of one block's mask on a CPU (32 MiB in float32)."""
GPU_TIMES = 64
"""A GPU needs larger blocks to be busy, and has the memory; its kernels copy a mask for every row and head."""


class Span(NamedTuple):
    """A block of queries and the keys it looks at, by index."""

    start: int
    stop: int
    low: int
    high: int


@dataclass(frozen=True)
class Sight:
    """Which of m keys each of n queries may see. Query i has index ``offset + i`` among the keys.

    ::

        causal, offset 2      causal, window 2      documents 0 0 1 1
        k 0 1 2 3             k 0 1 2 3             k 0 1 2 3
        q ■ ■ ■ ·             q · ■ ■ ·             q · · ■ ·
        q ■ ■ ■ ■             q · · ■ ■             q · · ■ ■
    """

    n: int
    m: int
    causal: bool
    window: int | None = None
    padding: Tensor | None = None
    """(b, m) bool, True = a real key."""
    documents: Tensor | None = None
    """(b, m) int, queries see keys of their own document only."""
    offset: int = 0
    positions: tuple[Tensor, Tensor] | None = None
    """Positions (b|1, n) and (b|1, m) that give the distance instead of the index."""
    aligned: bool = True
    """Query i is key offset + i, so that the index decides what is seen; otherwise the positions do."""

    def narrow(self, start: int, stop: int, keys: int) -> "Sight":
        """The sight of queries start … stop-1 on the first `keys` keys."""
        return replace(
            self,
            n=stop - start,
            m=keys,
            offset=self.offset + start,
            padding=None if self.padding is None else self.padding[:, :keys],
            documents=None if self.documents is None else self.documents[:, :keys],
            positions=None
            if self.positions is None
            else (self.positions[0][:, start:stop], self.positions[1][:, :keys]),
        )

    @property
    def everything(self) -> bool:
        """Every query sees every key."""
        last = self.offset == self.m - 1 and self.n == 1
        return self._plain and (not self.causal or last) and (self.window is None or self.window >= self.m)

    @property
    def lower_triangle(self) -> bool:
        """Exactly the causal triangle, its last row full."""
        unbounded = self.window is None or self.window >= self.m
        return self._plain and self.causal and unbounded and self.offset == self.m - self.n

    @property
    def _plain(self) -> bool:
        return self.padding is None and self.documents is None and self.aligned

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """Keys that queries start … stop-1 can see at all, from the index alone."""
        low, high = 0, self.m
        if self.aligned:
            first, last = self.offset + start, self.offset + stop - 1
            if self.window is not None:
                low = min(max(0, first - self.window + 1), self.m - 1)
                high = min(high, last + self.window)
            if self.causal:
                high = min(high, last + 1)
        return low, high

    def distance(self, span: Span, device: torch.device, *, by_index: bool = False) -> Tensor:
        """How far back each key lies from each query: (b|1, queries, keys) int64."""
        if self.positions is None or by_index:
            query = torch.arange(self.offset + span.start, self.offset + span.stop, device=device)[None]
            key = torch.arange(span.low, span.high, device=device)[None]
        else:
            query, key = self.positions[0][:, span.start : span.stop], self.positions[1][:, span.low : span.high]
        return query[:, :, None] - key[:, None, :]

    def mask(self, span: Span, device: torch.device) -> Tensor:
        """True where the key is seen: (b|1, 1, queries, keys)."""
        distance = self.distance(span, device, by_index=self.aligned)
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        if self.padding is not None:
            seen = seen & self.padding[:, None, span.low : span.high]
        if self.documents is not None:
            query = self.documents[:, self.offset + span.start : self.offset + span.stop]
            seen = seen & (query[:, :, None] == self.documents[:, None, span.low : span.high])
        return seen[:, None]


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, sight: Sight, scale: float, slopes: Tensor | None = None
) -> Tensor:
    """softmax(scale·q·k - slope·distance)·v over the keys in sight: (b, h, n, d), (b, g, m, d), (b, g, m, dv).

    A query that sees no key gives zeros, not NaN, and zero gradients.
    """
    width = v.shape[-1]
    q, k, v = _equal_width(q, k, v)
    if slopes is None and sight.everything:
        return _sdpa(q, k, v, scale)[..., :width]
    if slopes is None and sight.lower_triangle and (sight.n == sight.m or q.is_cuda):
        return _causal(q, k, v, scale)[..., :width]
    return _blocked(q, k, v, sight, scale, slopes)[..., :width]


def _blocked(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, slopes: Tensor | None) -> Tensor:
    copies = (q.shape[0] if not sight._plain or q.is_cuda else 1) * (
        q.shape[1] if slopes is not None or q.is_cuda else 1
    )
    seen_at_once = sight.m if sight.window is None else min(sight.m, 2 * sight.window)
    elements = MASK_ELEMENTS * (GPU_TIMES if q.is_cuda else 1)
    rows = min(sight.n, max(16, elements // (copies * seen_at_once)))
    if sight.window is not None and sight.aligned:
        rows = min(rows, max(sight.window, 64))  # longer blocks would look at keys most of their queries cannot see
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if rows == sight.n:
        return _block(q, k, v, sight, Span(0, rows, *sight.key_range(0, rows)), scale, slopes)
    spans = [
        Span(i, min(i + rows, sight.n), *sight.key_range(i, min(i + rows, sight.n))) for i in range(0, sight.n, rows)
    ]
    if needs_grad:
        parts = [checkpoint(_block, q, k, v, sight, span, scale, slopes, use_reentrant=False) for span in spans]
        return torch.cat(parts, dim=2)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for span in spans:
        out[:, :, span.start : span.stop] = _block(q, k, v, sight, span, scale, slopes)
    return out


def _block(q: Tensor, k: Tensor, v: Tensor, sight: Sight, span: Span, scale: float, slopes: Tensor | None) -> Tensor:
    mask = sight.mask(span, q.device)
    blind = None
    if sight.padding is not None or not sight.aligned:
        blind = ~mask.any(dim=-1, keepdim=True)
        mask = mask | blind  # softmax over nothing is NaN: look at everything, then discard it
    if slopes is not None:
        far = sight.distance(span, q.device).abs().to(q.dtype)[:, None]
        mask = torch.where(mask, far * -slopes.to(q.dtype)[:, None, None], -torch.inf)
    keys = slice(span.low, span.high)
    out = _sdpa(q[:, :, span.start : span.stop], k[:, :, keys], v[:, :, keys], scale, mask)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _equal_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the narrower of (q, k) and v with zeros: flash kernels want one width, and zeros change nothing."""
    gap = v.shape[-1] - q.shape[-1]
    if gap > 0:
        return F.pad(q, (0, gap)), F.pad(k, (0, gap)), v
    return (q, k, F.pad(v, (0, -gap))) if gap < 0 else (q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    (b, h, n, d), g = q.shape, k.shape[1]
    grouped = False
    if h != g:  # asked, not assigned: where torch.compile lets the numbers of heads vary, that makes it a fact
        grouped = True
    if grouped and n == 1 and q.device.type == "cpu" and (mask is None or mask.shape[1] == 1) and _folds(b, h, g):
        return _sdpa(q.reshape(b, g, h // g, d), k, v, scale, mask).reshape(b, h, 1, -1)
    if grouped and q.is_cuda and mask is not None:  # no CUDA kernel takes a mask and grouped heads together
        (k, v), grouped = _repeat(q, k, v), False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return _derivable(out)


def _derivable(out: Tensor) -> Tensor:
    """SDPA's output, :func:`steady` where cuDNN may take its gradient."""
    by_cudnn = out.requires_grad and out.is_cuda and out.dtype in (torch.bfloat16, torch.float16)
    return steady(out) if by_cudnn else out


def steady(out: Tensor) -> Tensor:
    """`out` (b, h, n, d), laid out as (b, n, h, d), as its gradient will be: what would arrive otherwise is copied.

    torch keeps cuDNN's backward graphs by the layout of queries, keys and values, not of the gradient. Of two gradients
    of one shape, the second would be read with the strides of the first, also beyond its end: as when the first was
    part of a longer one (runs of frequencies, joined), and the second was not. So all must have one layout, those of
    other libraries in the same process too: the one that the turn to (b, n, h·d) before a projection gives, there and
    back, so that where it follows nothing is copied that would not be copied there; parts that are joined are copied
    once more. (In a compiled graph a gradient that is one number for all, as a sum's, still arrives as it is.)

    >>> steady(torch.zeros(2, 3, 4, 8)).transpose(1, 2).is_contiguous()
    True
    """
    tokens = out.transpose(1, 2)
    flat = tokens.reshape(-1)  # backwards the gradient must be in one piece, or one number for all
    if flat.requires_grad and not torch.compiler.is_compiling():
        flat.register_hook(Tensor.contiguous)  # that number torch would write out as the queries lie
    return flat.view(tokens.shape).transpose(1, 2)


def _folds(b: int, h: int, g: int) -> bool:
    """Whether the heads of a group should become queries of their key head, which is then read once for all of them.

    A CPU's threads share out heads: with many threads and few key heads some would have nothing to do.
    """
    if torch.compiler.is_compiling():
        return False
    threads = torch.get_num_threads()
    return 2 * -(-b * g // threads) <= -(-b * h // threads)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    if n == m:
        return _sdpa(q, k, v, scale, causal=True)
    if torch.compiler.is_compiling():  # which does not trace the lower-right bias in every version of torch
        return _sdpa(q, k, v, scale, torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n))
    from torch.nn.attention.bias import causal_lower_right  # brings the whole of torch.compile with it

    k, v = _repeat(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n, m), scale=scale)
    return _derivable(out)


def _repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))
