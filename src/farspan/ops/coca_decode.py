"""Decoding CoCA from un-rotated t, d/2 numbers per key: on a GPU by a Triton kernel, on a CPU in torch (docs/math.md).

On a CPU one query needs no products of sines: all heads share cos((m-n)θ_j), so score(n) = (t_n ∘ wave_n)·‖q‖² is half
as wide as a rotary score. Slack has two such waves; the only query of a key head mixes them into one. t∘wave is
computed for one block of keys at a time, which stays in the processor's cache until it meets the query.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from farspan.ops.device import (
    is_ampere,
    is_traced,
    power_of_2,
    takes_forward_derivatives,
    why_not_triton,
    working_dtype,
)
from farspan.ops.dispatch import Call
from farspan.ops.masking import AttentionMask
from farspan.ops.rotary import Angles, Rotary, cos_sin

TIMED_WIDTHS = (64, 128)
"""Head widths for which the kernel was measured to be faster than SDPA on rotated keys, on an H200."""
MOST_ROWS = 8
"""Queries per key head, likewise: what one tile of the kernel holds."""
WIDEST = 256
BLOCK_ELEMENTS = 2**18
"""Elements of t∘wave per thread in one block: a MiB in float32, about a core's own cache."""


def why_not_decode_triton(call: Call) -> str | None:
    """Return why the half-width kernel does not take a call, or None.

    backend="triton" takes every step of few queries; "auto" takes what was measured to be faster on a Hopper GPU; other
    GPUs from Ampere on take the same calls, which were not timed there.
    """
    q, v = call.q, call.v
    width, group = max(q.shape[-1], v.shape[-1]), q.shape[1] // call.k.shape[1]
    timed = q.dtype == torch.bfloat16 and width in TIMED_WIDTHS
    if call.backend == "auto" and not (timed and is_ampere(q.device.index)):
        return (
            "the half-width kernel is chosen for bfloat16 heads of width 64 or 128 on Nvidia GPUs from Ampere on; "
            "backend='triton' asks for it elsewhere"
        )
    if q.shape[2] * group > MOST_ROWS:  # numbers in a message would become constants of a compiled graph
        return f"the half-width kernel takes at most {MOST_ROWS} queries per key head; more are faster on rotated keys"
    if call.gradient:
        return "the half-width kernel has no gradients; decode under torch.no_grad()"
    mask = call.mask
    if mask.documents is not None or mask.window is not None or not mask.causal:
        return "the half-width kernel takes causal calls without windows and documents"
    if not (mask.offset == mask.m - mask.n if mask.aligned else mask.lengths is not None):
        return "the half-width kernel takes queries that are the last keys"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"backend='triton' takes float32 or bfloat16, got {q.dtype}; use backend='sdpa'"
    if width > WIDEST:
        return f"backend='triton' takes heads up to {WIDEST} wide, got {width}; use backend='sdpa'"
    if takes_forward_derivatives():
        return "backend='triton' has no forward-mode derivatives; use backend='sdpa'"
    return why_not_triton(q.device.type)


def decode_triton(call: Call) -> Tensor:
    """Run the half-width kernel: q (b, h, n, d), un-rotated t (b, g, m, d/2), v (b, g, m, dv) → (b, h, n, dv)."""
    from farspan.ops.triton.coca_decode import DecodeCall, decode_op

    mask, steps, scale = call.mask, None, call.scale
    if call.rotary is not None:
        steps, scale = mask.angles(call.rotary).steps, scale * call.rotary.factor**2
    first: int | Tensor | None = mask.first
    if first is None and mask.firsts is not None:
        first = mask.share("firsts", mask.firsts)
    query, key = (None, None) if first is not None or mask.positions is None else mask.positions
    kernel = DecodeCall(
        q=call.q,
        t=call.k,
        v=call.v,
        step=steps,
        lengths=mask.lengths,
        firsts=first if isinstance(first, Tensor) else None,
        query_positions=query,
        key_positions=key,
        padding=mask.padding,
        first=first if isinstance(first, int) else 0,
        form=call.form,
        scale=scale,
    )
    return decode_op(*kernel)


def why_not_decode_cpu(call: Call) -> str | None:
    """Return why the CPU path for one query does not take a call, or None."""
    if call.q.shape[2] != 1:
        return "it takes one query"
    if call.gradient:
        return "it has no gradients"
    if call.mask.documents is not None:
        return "it does not support documents"
    return "it is not for compiled graphs" if torch.compiler.is_compiling() else None


def decode_cpu(call: Call) -> Tensor:
    """Compute q (b, h, 1, d), un-rotated t (b, g, m, d/2) and v (b, g, m, dv) → (b, h, 1, dv) in q's dtype."""
    q, t, v, mask = call.q, call.k, call.v, call.mask
    key, query = mask.share(("waves", call.rotary, call.form, q.dtype), lambda: _waves(call))
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        scores = _scores(*_amplitudes(q, query, call.scale, grouped=q.shape[1] > t.shape[1]), t, key)
    blind = None
    if not mask.shows_everything:
        seen = mask.block(0, 1, 0, mask.m)
        blind = ~seen.any(dim=-1, keepdim=True)
        scores = scores.unflatten(0, t.shape[:2]).masked_fill(~(seen | blind), -torch.inf).flatten(0, 1)
    out = _means(scores, v.flatten(0, 1)).view(*q.shape[:3], v.shape[-1])
    return out if blind is None else out.masked_fill(blind, 0.0)


def _waves(call: Call) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
    """Compute what t is multiplied by, (b|1, 1, m, d/2) each, and for slack cos and tan of the query's own angle.

    Exact has one wave, cos (m-n)θ; slack has cos nθ and sin nθ. Without rotation there is none.

    >>> from farspan.ops.masking import make_mask
    >>> q, mask = torch.zeros(1, 1, 1, 2), make_mask(1, 3, 1, torch.device("cpu"))
    >>> _waves(Call(q, q[..., :1], q, mask, 1.0, "auto", Rotary(2)))[0][0].flatten()
    tensor([-0.4161,  0.5403,  1.0000])
    """
    mask, dtype = call.mask, call.q.dtype
    if call.rotary is None:
        return (), None
    angles = mask.angles(call.rotary)
    key_cos, key_sin = _key_angles(mask, angles, dtype)
    if mask.aligned:  # the query is one of the keys
        cos, sin = (x[:, :, mask.offset : mask.offset + 1] for x in (key_cos, key_sin))
    else:
        cos, sin = angles.query(dtype).unbind(-2)
    if call.form == "exact":
        return (torch.addcmul(key_cos * cos, key_sin, sin),), None
    return (key_cos, key_sin), (cos, sin / cos)  # no float's cosine is 0, or nearer to it than 1e-19


def _key_angles(mask: AttentionMask, angles: Angles, dtype: torch.dtype) -> Sequence[Tensor]:
    """Compute cosines and sines of the keys, (b|1, 1, m, d/2) each.

    Tables from earlier steps serve again where they can: making them costs as much as reading a layer's cache.
    """
    positions = None if mask.first is not None else mask.key_positions
    first = mask.first or 0
    least, most = (first, first + mask.m - 1) if positions is None else (int(positions.min()), int(positions.max()))
    varies = isinstance(angles.length, Tensor) or angles.rotary.follows_length
    if least < 0 or most >= 2 * mask.m or varies or is_traced():
        return angles.key(dtype).unbind(-2)
    table = _kept_table(angles.rotary, angles.length, power_of_2(most + 1), dtype)
    chosen = table[:, None, least : most + 1] if positions is None else table[:, positions]
    return chosen[:, :, None].unbind()


@lru_cache(maxsize=2)
def _kept_table(rotary: Rotary, length: int | None, count: int, dtype: torch.dtype) -> Tensor:
    """Compute cosines and sines of positions 0 … count-1 once for many steps: (2, count, d/2)."""
    with torch.inference_mode(False), torch.no_grad():  # a first call in inference mode serves training later
        positions = torch.arange(count, device="cpu")[None]
        table = cos_sin(positions, rotary.frequencies(length, "cpu"), rotary.factor, dtype)
        return table[0, 0].movedim(-2, 0).contiguous()


def _amplitudes(
    q: Tensor, query: tuple[Tensor, Tensor] | None, scale: float, *, grouped: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Compute what t∘wave is multiplied by, times the scale: one amplitude per wave, or one and the share of the sine.

    With (a, b) a pair of q and φ the query's angle, slack's score is t times
    (a²+b²)cos φ cos nθ + ((b²-a²)cos φ + 2ab sin φ)sin nθ. A single query mixes both into the wave cos + share·sin.
    Queries of a group would each need their own mixture, which costs more than two products. All are (b, h, 1, d/2).
    """
    a, b = q.to(working_dtype(q.dtype)).chunk(2, dim=-1)
    if query is None:
        return (torch.addcmul(a * a, b, b) * scale,), None
    cos, tan = query
    first, second = a * a, b * b
    square = first + second
    share = torch.addcmul(second - first, a * b, tan, value=2) / (square + torch.finfo(square.dtype).tiny)
    amplitude = square * (cos * scale)
    return ((amplitude, amplitude * share), None) if grouped else ((amplitude,), share)


def _scores(amplitudes: tuple[Tensor, ...], share: Tensor | None, t: Tensor, waves: tuple[Tensor, ...]) -> Tensor:
    """Compute amplitude·(t∘wave), summed over the waves: (b·g, h/g, m) in the working dtype."""
    b, g, m, width = t.shape
    amplitudes = tuple([each.reshape(b * g, -1, width) for each in amplitudes])
    if not waves:
        (amplitude,) = amplitudes
        return torch.bmm(amplitude, t.to(amplitude.dtype).flatten(0, 1).mT)
    blocks = max(1, round(b * g * m * width / (BLOCK_ELEMENTS * torch.get_num_threads())))
    if blocks == 1:
        return _block_scores(amplitudes, share, t, waves, None)
    rows = -(-m // blocks)  # of equal length: a short block takes as many operations as a long one
    product, parts = amplitudes[0].new_empty(b, g, rows, width), []
    for block, *tables in zip(t.split(rows, dim=2), *(wave.split(rows, dim=2) for wave in waves), strict=True):
        parts.append(_block_scores(amplitudes, share, block, tables, product[:, :, : block.shape[2]]))
    return torch.cat(parts, dim=-1)


def _block_scores(
    amplitudes: tuple[Tensor, ...], share: Tensor | None, t: Tensor, waves: Sequence[Tensor], product: Tensor | None
) -> Tensor:
    """Compute the scores of a block of keys; `product` is where t∘wave goes."""
    if share is not None:  # the mixture of both waves
        cos, sin = waves
        keys = torch.addcmul(cos, sin, share, out=product).mul_(t)
        return torch.bmm(amplitudes[0], keys.flatten(0, 1).mT)
    scores = torch.bmm(amplitudes[0], torch.mul(t, waves[0], out=product).flatten(0, 1).mT)
    for amplitude, wave in zip(amplitudes[1:], waves[1:], strict=True):  # one at a time: both need twice the memory
        scores.baddbmm_(amplitude, torch.mul(t, wave, out=product).flatten(0, 1).mT)
    return scores


def _means(scores: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(scores)·v: (b·g, h/g, dv) in v's dtype."""
    if scores.dtype == v.dtype:
        return torch.bmm(scores.softmax(dim=-1), v)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()  # divided later: small weights would lose digits
    wide = v.float() if v.dtype == torch.float16 else v  # sums over many keys leave float16's range
    return (torch.bmm(weights.to(wide.dtype), wide) / weights.sum(dim=-1, keepdim=True)).to(v.dtype)
