"""Softmax attention in dot-product form: RoPE, NoPE, ALiBi, and what CoCA shares with them.

Unmasked and causal calls are one scaled_dot_product_attention. On a GPU kernels of Triton and cuDNN run most others.
Elsewhere windows run many blocks of queries in each call, and other masks one: memory is O(N) in each case.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from farspan.ops.device import (
    constant,
    is_ampere,
    is_traced,
    product_dtype,
    takes_forward_derivatives,
    wants_gradient,
    why_not_compiled_triton,
    why_not_triton,
)
from farspan.ops.dispatch import Call, Implementation, SoftmaxOptions, Table, check_call, operation, reference_twin
from farspan.ops.masking import AttentionMask
from farspan.ops.reference import attend, rotations, scores_alibi, scores_nope, scores_rope, visible
from farspan.ops.rotary import Rotary

CUDNN = (torch.bfloat16, torch.float16)
"""Dtypes whose gradients cuDNN may compute."""
MASK_ELEMENTS = 2**23
"""Upper bound on the elements of a mask on a CPU (32 MiB in float32): of one block, or of one chunk of a window."""
WIDEST_WINDOW = 2048
"""Widest window that runs many blocks at once: each key is read by every block of queries that may see it."""
CHUNK = 512
"""Queries of all rows in one chunk of a window on a CPU, about; each row has at least one block."""
WIDEST = 256
"""Widest head that the kernels of softmax attention take."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Kernels take larger scales; with others the queries are scaled."""
GPU_TIMES = 64
"""A GPU needs larger blocks to be busy, and has the memory; its kernels copy a mask for every row and head."""


@operation(SoftmaxOptions)
def rope_attention(
    q: Tensor, k: Tensor, v: Tensor, *, rotary: Rotary | None, **options: Unpack[SoftmaxOptions]
) -> Call:
    """Compute rotary attention (Eq. 2) from q (b, h, n, d), k (b, g, m, d) and v (b, g, m, dv).

    `rotary` rotates q and k by their positions; None takes them as they are: without positions (NoPE), or rotated
    already. The other arguments are those of :func:`farspan.ops.coca_attention`.

    >>> q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8)  # decoding: one query, six keys
    >>> rope_attention(q, k, k, rotary=Rotary(8)).shape
    torch.Size([1, 4, 1, 8])
    """
    return check_call(ROPE, q, k, v, rotary=rotary, **options)


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
    return softmax_attention(call, q, k)


@operation(SoftmaxOptions)
def alibi_attention(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[SoftmaxOptions]) -> Call:
    """Compute attention with linear biases (Press et al. 2022): scores q·k - slope·|m-n|, see :func:`alibi_slopes`.

    The bias is built for one block of queries at a time, so memory grows with N, not N². The arguments are those of
    :func:`farspan.ops.coca_attention`.

    >>> q = torch.randn(1, 2, 5, 8)
    >>> alibi_attention(q, q, q).shape
    torch.Size([1, 2, 5, 8])
    """
    return check_call(ALIBI, q, k, v, slopes=alibi_slopes(q.shape[1], device=q.device), **options)


def _alibi_reference(call: Call) -> Tensor:
    assert call.slopes is not None
    return attend(scores_alibi(call.q, call.k, call.slopes, call.mask, call.scale), call.v, visible(call.mask))


def _alibi_sdpa(call: Call) -> Tensor:
    return softmax_attention(call, call.q, call.k)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Compute 2^(-8i/h), i = 1 … h; if h is no power of two, every second slope of the next power fills up.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    steps = [8 * i / power for i in range(1, power + 1)]
    steps += [8 * i / (2 * power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0**-step for step in steps], dtype=torch.float32, device=device)


# Dot-product form: what RoPE, NoPE, ALiBi and CoCA end in


def softmax_attention(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """Compute softmax(scale·q·k - slope·distance)·v over the visible keys, with v, mask, scale and slopes of a call.

    q (b, h, n, d), k (b, g, m, d), v (b, g, m, dv) → (b, h, n, dv). A query that sees no key returns zeros, not NaN,
    and has zero gradients.
    """
    v, scale, width = call.v, call.scale, call.v.shape[-1]
    if scale <= 0 or (not torch.compiler.is_compiling() and scale < SMALLEST_SCALE):
        # The CPU kernel finds its maximum before it applies the scale, in float32.
        q, scale = q * scale, 1.0
    entry = DOT_PRODUCT.choose(call)
    if q.shape[-1] != width and entry not in (MASKED_KERNEL, WINDOW):
        q, k, v = _equal_width(q, k, v)
    out = entry.run(q, k, v, call.mask, scale, call.slopes)
    return out if out.shape[-1] == width else out[..., :width]


def _unmasked(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None) -> Tensor:
    return _sdpa(q, k, v, scale)


def _why_not_unmasked(call: Call) -> str | None:
    return None if call.mask.shows_everything and call.slopes is None else "some keys are hidden or biased"


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None) -> Tensor:
    return _sdpa(q, k, v, scale, causal=True) if mask.n == mask.m else _lower_right(q, k, v, scale)


def _why_not_causal(call: Call) -> str | None:
    mask = call.mask
    if not mask.is_triangle or call.slopes is not None:
        return "more than causality hides keys"
    return None if mask.n == mask.m or call.q.is_cuda else "on a CPU there must be as many queries as keys"


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None) -> Tensor:
    """Run cuDNN's kernel on one query whose mask hides keys, such as the empty slots of a static cache.

    SDPA itself takes a kernel that is five times slower at 32k keys.
    """
    low, high = mask.key_range(0, 1)
    if high - low < mask.m:
        k, v = k[:, :, low:high], v[:, :, low:high]
    seen, blind = _shared_block(mask, 0, 1, low, high, q.dtype)
    out = ONE_QUERY(q, k, v, seen, False, scale=scale)[0]
    return out if blind is None else out.masked_fill(blind, 0.0)


ONE_QUERY = torch.ops.aten._scaled_dot_product_cudnn_attention


def _why_not_one_query(call: Call) -> str | None:
    q, v, mask = call.q, call.v, call.mask
    if not q.is_cuda:  # the table looks at the device for "auto" alone
        return "the kernel needs CUDA tensors"
    if mask.n != 1:
        return "there are several queries"
    if call.gradient or call.slopes is not None or q.dtype not in CUDNN:
        return "the kernel takes bfloat16 and float16, without gradients and biases"
    low, high = mask.key_range(0, 1)
    if mask.batch > 1 or q.shape[1] != v.shape[1] or high - low < 64:
        return "the kernel was checked with one mask, as many key heads as query heads, and 64 keys or more"
    width = max(q.shape[-1] if call.rotary is None else call.rotary.dim, v.shape[-1])
    if width > 128 or width % 8 or v.shape[-1] % 8:
        return "the kernel takes heads up to 128 wide, in multiples of 8"
    return why_not_cudnn() or why_never_by_kernel(q.dtype, q.device)


@constant
def why_not_cudnn() -> str | None:
    """Return why cuDNN's attention cannot run, or the user does not want it to."""
    version = torch.backends.cudnn.version()
    there = version is not None and version >= 90_000 and torch.backends.cuda.cudnn_sdp_enabled()
    return None if there else "cuDNN 9 is missing, or its attention is switched off"


def _masked_kernel(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None) -> Tensor:
    """Run the Triton kernel, which reads only tiles that a window reaches and needs no mask in memory."""
    from farspan.ops.triton.attention import MaskedAttention, attention_op

    q, k, v = (x.to(product_dtype(x)) for x in (q, k, v))
    window = mask.m if mask.window is None else mask.window
    slopes = None if slopes is None else slopes.float()
    masking = (mask.padding, mask.documents, slopes, mask.offset, window, mask.causal, scale)
    return attention_op(q, k, v, *masking)[0] if is_traced() else MaskedAttention.apply(q, k, v, *masking)


def _why_not_masked_kernel(call: Call) -> str | None:
    q, mask, slopes = call.q, call.mask, call.slopes
    if not mask.aligned:
        return "the kernel takes queries that are among the keys"
    if slopes is not None and mask.positions is not None:
        return "the kernel takes ALiBi at consecutive positions"
    width = q.shape[-1] if call.rotary is None else call.rotary.dim  # of the features
    if max(width, call.v.shape[-1]) > WIDEST:  # not in the message: torch.compile may let widths vary
        return f"the kernel takes heads up to {WIDEST} wide"
    if takes_forward_derivatives():
        return "the kernel has no forward-mode derivatives"
    if call.backend == "auto":
        return why_never_by_kernel(q.dtype, q.device)
    return "the kernel does not take float64" if q.dtype == torch.float64 else why_not_triton(q.device.type)


@constant
def why_never_by_kernel(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why "auto" takes no kernel with gradients. A compiled graph may keep the answer, which it cannot trace."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernel takes bfloat16, float16 and float32, got {dtype}"
    if torch._C._are_functorch_transforms_active():
        return "the kernel has no rules for the transforms of torch.func"
    if torch.compiler.is_exporting():
        return "an exported graph should also run without Triton"
    if not is_ampere(device.index):
        return "the kernel needs an Nvidia GPU from Ampere on"
    return why_not_compiled_triton()


def _window(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None) -> Tensor:
    """Turn blocks of queries into rows of a batch, each with the blocks of keys that its window reaches.

    ::

        queries  | 0 | 1 | 2 | 3 |      block 2 reads  | 1 | 2 |
        keys     | 0 | 1 | 2 | 3 |      block 3 reads      | 2 | 3 |
    """
    if _takes_chunks(q):
        q, k, v = (x.to(product_dtype(x)) for x in (q, k, v))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # the kernel does not ask
        return WindowAttention.apply(q, k, v, mask, scale, slopes)
    assert mask.window is not None
    rows = _window_rows(mask.window)
    (query, key, value), bias, blind = _window_blocks(*_equal_width(q, k, v), mask, slopes, 0, -(-mask.n // rows), rows)
    out = _sdpa(query, key, value, scale, bias)[..., : v.shape[-1]]
    out = out if blind is None else out.masked_fill(blind, 0.0)
    return _tokens(out, q.shape[0])[:, : mask.n].transpose(1, 2)


def _takes_chunks(q: Tensor) -> bool:
    transformed = takes_forward_derivatives() or torch._C._are_functorch_transforms_active()
    return q.is_cpu and not (transformed or is_traced())


class WindowAttention(torch.autograd.Function):
    """Run the blocks of a window in small chunks, by the kernel that SDPA takes on a CPU.

    Neighbours read the same keys. Under autograd each of those keys would have a copy and a gradient for each block.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None
    ) -> Tensor:
        out, sums = q.new_empty(q.shape[0], mask.n, q.shape[1], v.shape[-1]).transpose(1, 2), []
        wide = _equal_width(q, k, v)
        for chunk in _chunks(mask, q, slopes):
            blocks, bias, blind = _window_blocks(*wide, mask, slopes, *chunk)
            found, total = FLASH(*blocks, attn_mask=bias, scale=scale)
            _put_blocks(out, found if blind is None else found.masked_fill(blind, 0.0), chunk[0])
            sums.append(total)
        ctx.rest = replace(mask, _shared={}), scale, slopes  # tables of angles would stay in memory
        ctx.save_for_backward(q, k, v, out, *sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, *sums), (mask, scale, slopes) = ctx.saved_tensors, ctx.rest
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        wide = _equal_width(q, k, v)
        gap = (0, wide[2].shape[-1] - v.shape[-1])
        for (start, count, rows), total in zip(_chunks(mask, q, slopes), sums, strict=True):
            blocks, bias, blind = _window_blocks(*wide, mask, slopes, start, count, rows)
            up, mean = (F.pad(_own(x, start, count, rows), gap) for x in (gradient, out))
            if blind is not None:
                up = up.masked_fill(blind, 0.0)
            changes = FLASH_BACKWARD(up, *blocks, mean, total, 0.0, False, attn_mask=bias, scale=scale)
            _put_blocks(dq, changes[0], start)
            low = mask.offset + start - _reach(mask, rows)
            for target, change in ((dk, changes[1]), (dv, changes[2])):
                for i in range(0, change.shape[2], rows):  # each block of keys was read by several blocks of queries
                    _put_blocks(target, change[:, :, i : i + rows], low + i, add=True)
        return dq, dk, dv, None, None, None


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _chunks(mask: AttentionMask, q: Tensor, slopes: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """Yield first query, blocks, and rows per block of each chunk."""
    assert mask.window is not None
    rows = _window_rows(mask.window)
    masks = q.shape[0] * (1 if slopes is None else q.shape[1]) * rows * (mask.window + rows)
    most = max(1, min(CHUNK // (q.shape[0] * rows), MASK_ELEMENTS // masks))
    for start in range(0, mask.n, most * rows):
        yield start, min(most, -(-(mask.n - start) // rows)), rows


def _window_rows(window: int) -> int:
    """Return the queries per block: small blocks read fewer hidden keys, large ones fewer keys twice."""
    return min(max(window, 64), 128)


def _reach(mask: AttentionMask, rows: int) -> int:
    """Return how many keys before a block are read with it."""
    assert mask.window is not None
    return -(-(mask.window - 1) // rows) * rows


def _window_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, slopes: Tensor | None, start: int, count: int, rows: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor | None]:
    """Return blocks (b·count, ·, ·, ·) of q, k and v, their bias, and which queries see nothing."""
    assert mask.window is not None
    reach = _reach(mask, rows)
    ahead = 0 if mask.causal else reach
    near = (mask.offset + start - reach, 1 + (reach + ahead) // rows, count, rows)
    key, value = (_near(x.transpose(1, 2), *near).flatten(0, 1).transpose(1, 2) for x in (k, v))
    distance = torch.arange(reach, reach + rows, device=q.device)[:, None] - torch.arange(
        reach + rows + ahead, device=q.device
    )
    seen = ((distance < mask.window) & (distance >= 0 if mask.causal else distance > -mask.window))[None]
    alike = mask.is_plain and mask.causal and near[0] >= 0 and (slopes is None or mask.positions is None)
    blind = None
    if not alike:
        real = torch.ones(1, mask.m, dtype=torch.bool, device=q.device) if mask.padding is None else mask.padding
        seen = seen & _near(real.expand(q.shape[0], -1), *near)[:, :, None]
        if mask.documents is not None:
            own = _cut(mask.documents, mask.offset + start, count, rows)
            seen = seen & (own[..., None] == _near(mask.documents, *near)[:, :, None])
        seen = seen.flatten(0, 1)
        blind = ~seen.any(dim=-1, keepdim=True)
        seen, blind = seen | blind, blind[:, None]  # see :func:`_visible`
    bias = torch.zeros((), dtype=q.dtype, device=q.device)
    if slopes is not None:
        if mask.positions is not None:
            own, others = _cut(mask.positions[0], start, count, rows), _near(mask.positions[1], *near)
            distance = (own[..., None] - others[:, :, None]).expand(q.shape[0], -1, -1, -1).flatten(0, 1)
        bias = distance.abs().to(q.dtype)[..., None, :, :] * -slopes.to(q.dtype)[:, None, None]
    return (_own(q, start, count, rows), key, value), torch.where(seen[:, None], bias, -torch.inf), blind


def _own(x: Tensor, start: int, count: int, rows: int) -> Tensor:
    """Return blocks of x (b, h, n, ·), (b·count, h, rows, ·)."""
    return _cut(x.transpose(1, 2), start, count, rows).flatten(0, 1).transpose(1, 2)


def _tokens(blocks: Tensor, batch: int) -> Tensor:
    """Join blocks (b·count, h, rows, ·) to (b, count·rows, h, ·)."""
    return blocks.transpose(1, 2).unflatten(0, (batch, -1)).flatten(1, 2)


def _put_blocks(x: Tensor, blocks: Tensor, low: int, *, add: bool = False) -> None:
    """Write or add blocks (b·count, h, rows, ·) to tokens from `low` on of x (b, h, n, ·), as far as there are any."""
    begin, end = max(0, low), min(x.shape[2], low + blocks.shape[0] * blocks.shape[2] // x.shape[0])
    if begin < end:
        part = _tokens(blocks, x.shape[0])[:, begin - low : end - low, :, : x.shape[-1]].transpose(1, 2)
        x[:, :, begin:end].add_(part) if add else x[:, :, begin:end].copy_(part)


def _why_not_window(call: Call) -> str | None:
    mask = call.mask
    if mask.window is None:
        return "there is no window"
    if not mask.aligned:
        return "positions decide what is seen, not the order of the keys"
    if mask.window > WIDEST_WINDOW:
        return f"windows beyond {WIDEST_WINDOW} are wide enough to run block by block"
    if mask.n == 1:
        return "one query is one block"
    if torch.compiler.is_compiling():
        return None
    if mask.n <= 2 * _window_rows(mask.window):
        return "there are few queries"
    if not mask.is_plain:
        copies = call.q.shape[0] * (1 if call.slopes is None else call.q.shape[1])
        queries = _window_rows(mask.window) if _takes_chunks(call.q) else mask.n
        if copies * queries * (mask.window + 128) > 4 * MASK_ELEMENTS:
            return "the masks of many blocks at once would take too much memory"
    return None


def _cut(x: Tensor, low: int, blocks: int, rows: int) -> Tensor:
    """Return tokens from `low` on of x (b, tokens, …) in blocks, (b, blocks, rows, …); zeros where there are none."""
    front, end = max(0, -low), low + blocks * rows - x.shape[1]
    x = x[:, max(0, low) :]
    if torch.compiler.is_compiling():  # padding by nothing keeps strides, which a graph takes for contiguous
        x = x.contiguous()
    if torch.compiler.is_compiling() or front or end:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (front, end))  # below 0 it takes away
    return x.unflatten(1, (blocks, rows))


def _near(x: Tensor, low: int, wide: int, count: int, rows: int) -> Tensor:
    """Return what each of `count` blocks of queries reads of x (b, m, …): (b, count, wide·rows, …).

    The first block reads `wide` blocks from token `low` on, each other one those a block further on.
    """
    return _cut(x, low, count + wide - 1, rows).flatten(1, 2).unfold(1, wide * rows, rows).movedim(-1, 2)


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, slopes: Tensor | None) -> Tensor:
    """Run blocks of queries one by one, each with its own part of the mask, so that memory is O(N)."""
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
    # What SDPA adds is small for one query, and SDPA would make it in each layer.
    bias = q.dtype if mask.n == 1 and slopes is None else None
    seen, blind = _shared_block(mask, start, stop, low, high, bias)
    if slopes is not None:
        distance = mask.distance(start, stop, low, high).abs().to(q.dtype)[:, None]
        seen = torch.where(seen, distance * -slopes.to(q.dtype)[:, None, None], -torch.inf)
    if stop - start < mask.n or high - low < mask.m:
        q, k, v = q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high]
    out = _sdpa(q, k, v, scale, seen)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _shared_block(
    mask: AttentionMask, start: int, stop: int, low: int, high: int, bias: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Return what :func:`_visible` does; layers share the only block of a mask."""
    if stop - start < mask.n or torch.compiler.is_compiling():
        return _visible(mask, start, stop, low, high, bias)
    return mask.share(("block", bias), lambda: _visible(mask, start, stop, low, high, bias))


def _visible(
    mask: AttentionMask, start: int, stop: int, low: int, high: int, bias: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute a block's mask, and which of its queries see nothing; those see everything in the mask.

    Given a dtype, the mask is what SDPA adds to the scores.
    """
    seen, blind = mask.block(start, stop, low, high), None
    if not mask.sees_itself:
        blind = ~seen.any(dim=-1, keepdim=True)
        seen = seen | blind  # a softmax over nothing is NaN: let it see everything, then discard the result
    if bias is not None:
        seen = torch.zeros_like(seen, dtype=bias).masked_fill_(~seen, -torch.inf)
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
    if grouped and n == 1 and (mask is None or mask.shape[1] == 1) and _folds(q, g, mask):
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


def _folds(q: Tensor, g: int, mask: Tensor | None) -> bool:
    """Whether the heads of a group should become queries of their key head, which is then read once for all of them.

    On a GPU it saves a copy of keys and values for each head, which a mask asks for. A CPU's threads share the heads:
    with many threads and few key heads some would be idle.
    """
    if q.is_cuda:
        return mask is not None
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    (b, h), threads = q.shape[:2], torch.get_num_threads()
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


_EVERY = ("auto", "sdpa", "triton")
MASKED_KERNEL = Implementation("masked_kernel", ("auto", "triton"), _masked_kernel, _why_not_masked_kernel, "cuda")
WINDOW = Implementation("window", _EVERY, _window, _why_not_window)
DOT_PRODUCT = Table(
    Implementation("unmasked", _EVERY, _unmasked, _why_not_unmasked),
    Implementation("causal", _EVERY, _causal, _why_not_causal),
    MASKED_KERNEL,
    Implementation("one_query", _EVERY, _one_query, _why_not_one_query, "cuda"),
    WINDOW,
    Implementation("blocked", _EVERY, _blocked),
)
"""unmasked, causal: one SDPA call. masked_kernel: one Triton kernel. one_query: cuDNN's kernel for a decoding step.
window: one SDPA call for many blocks of queries. blocked: one SDPA call per block of queries."""
ROPE = Table(
    Implementation("sdpa", _EVERY, _rope_sdpa, then=DOT_PRODUCT),
    Implementation("reference", ("reference",), _rope_reference),
)
ALIBI = Table(
    Implementation("sdpa", _EVERY, _alibi_sdpa, then=DOT_PRODUCT),
    Implementation("reference", ("reference",), _alibi_reference),
)

rope_attention_reference = reference_twin(rope_attention)
alibi_attention_reference = reference_twin(alibi_attention)
