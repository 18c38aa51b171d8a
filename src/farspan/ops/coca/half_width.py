"""CoCA on a cache of un-rotated t as a server keeps it: rows of different lengths."""

import torch
from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.call import check_axes, check_heads, check_mask, check_width, check_window
from farspan.ops.coca.decoding import Slots, Steps, attend_half_width, wants_gradient
from farspan.ops.coca.interface import FORMS
from farspan.ops.coca.reference import scores_coca
from farspan.ops.coca.triton_backend import triton_refusal
from farspan.ops.positions import LIMIT, Positions, resolve
from farspan.ops.rotary import Rotary, odd_width
from farspan.ops.rotary_reference import turns
from farspan.ops.segments import check_dim
from farspan.ops.softmax.reference import attend, visible


def half_width_attention(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    form: str = "exact",
    lengths: Tensor | None = None,
    first: int | Tensor = 0,
    positions: tuple[Tensor, Tensor] | None = None,
    padding_mask: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """CoCA of the last n tokens of each row against its cache, on the Triton kernel; no gradients.

    Nothing is read from the device but by the kernel, so a CUDA graph of this call follows `lengths` as they grow
    (`per_query` dynamic NTK: for one query; more may cross into other frequencies row by row, which must be looked up).

    Args:
        q: (b, h, n, d) queries, before rotation: the last n of their row's keys.
        t: (b, g, m, d/2) coefficients, un-rotated.
        v: (b, g, m, dv) values.
        rotary: the angles; None for no rotation.
        form: "exact" or "slack".
        lengths: (b) int, keys of each row that count; the rest of the cache is never read. None = all, as is a length
            beyond m.
        first: position of key 0, for all rows or (b) int, from which the others count on.
        positions: of queries (b, n) and keys (b, m), where they do not count on; then without `first`. They turn
            queries and keys; what a query sees goes by the index, as everywhere here.
        padding_mask: (b, m) bool, True = keep.
        causal, window, scale: as in :func:`farspan.ops.coca_attention`.

    Returns:
        (b, h, n, dv); zeros for a query before the first key.

    >>> from farspan.ops.coca.triton_backend import triton_refusal
    >>> q, t, v = torch.randn(2, 4, 1, 8), torch.rand(2, 2, 6, 4), torch.randn(2, 2, 6, 8)
    >>> if triton_refusal(q, t, v, Rotary(8), None) is None:
    ...     out = half_width_attention(q, t, v, rotary=Rotary(8), lengths=torch.tensor([6, 3]))
    ...     assert out.shape == (2, 4, 1, 8)
    """
    _check(q, t, v, form, lengths, first, window)
    m = t.shape[2]
    _check_keys(q, m, lengths, first, positions, padding_mask)
    wanted = wants_gradient(q, t, v)
    require(not wanted, "half_width_attention has no gradients; call it under torch.no_grad()")
    reason = triton_refusal(q, t, v, rotary, None)
    require(reason is None, str(reason))
    slots, steps = Slots(lengths, first, positions, padding_mask), None
    if rotary is not None:
        check_dim(rotary, q)
        steps = Steps.of(rotary, slots.places(q.shape[2], m, q.device))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend_half_width(q, t, v, steps, slots, form=form, causal=causal, window=window, scale=scale)


def half_width_attention_reference(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    form: str = "exact",
    lengths: Tensor | None = None,
    first: int | Tensor = 0,
    positions: tuple[Tensor, Tensor] | None = None,
    padding_mask: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """:func:`half_width_attention` by its definition: each row alone, its keys laid out, by the equations."""
    _check(q, t, v, form, lengths, first, window)
    m = t.shape[2]
    _check_keys(q, m, lengths, first, positions, padding_mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for row in range(q.shape[0]):
        keys, values = t[row], v[row]
        held = m if lengths is None else min(m, int(lengths[row]))
        n = min(q.shape[2], held)
        if n:
            begin = int(first[row]) if isinstance(first, Tensor) else first
            places = Positions(n, held, q.device, begin, None, True)
            if positions is not None:
                query, key = (x.expand(q.shape[0], -1)[row : row + 1] for x in positions)
                places = Positions(n, held, q.device, None, (query[:, -n:], key[:, :held]), True)
            last, keys, values = (x[None] for x in (q[row, :, -n:], keys[:, :held], values[:, :held]))
            weights = scores_coca(last, keys, *turns(rotary, places, q.shape[-1], q.dtype), form) * scale
            keep = None if padding_mask is None else padding_mask[row : row + 1, :held]
            seen = visible(places, causal=causal, window=window, padding_mask=keep, documents=None)
            out[row, :, -n:] = attend(weights, values, seen)[0]
    return out


def _check(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    form: str,
    lengths: Tensor | None,
    first: int | Tensor,
    window: int | None,
) -> None:
    require_choice("form", form, FORMS)
    for name, x in (("q", q), ("t", t), ("v", v)):
        check_axes(name, x)
    (b, _, n, d), (rows, _, m, _) = q.shape, t.shape
    require(d % 2 == 0, lambda: odd_width(d))
    check_width(q, t, "t", d // 2)
    require(t.shape[:3] == v.shape[:3], f"t and v must agree but in width, got {tuple(t.shape)} and {tuple(v.shape)}")
    check_heads(q, t)
    for name, row in (("lengths", lengths), ("first", first)):
        if isinstance(row, Tensor):
            whole = not row.is_floating_point() and tuple(row.shape) == (b,)
            require(whole, f"{name} must hold {b} integers, one a row, got {row.dtype} {tuple(row.shape)}")
            _check_device(name, row, q)
    require(rows == b, f"t must have the batch size of q, {b}, got {rows}")
    require(lengths is not None or n <= m, f"there must be at least as many keys as queries, got {n} and {m}")
    check_window(window)
    require(t.dtype == q.dtype == v.dtype, f"q, t and v must share a dtype, got {q.dtype}, {t.dtype} and {v.dtype}")


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    require(x.device == q.device, f"{name} must lie where q does, on {q.device}, got {x.device}; move it")


def _check_keys(
    q: Tensor,
    m: int,
    lengths: Tensor | None,
    first: int | Tensor,
    positions: tuple[Tensor, Tensor] | None,
    padding_mask: Tensor | None,
) -> None:
    """What is said about each of m keys a row."""
    _check_first(first, m)
    check_mask("padding_mask", padding_mask, (q.shape[0], m), boolean=True)
    if positions is not None:
        plain = not isinstance(first, Tensor) and first == 0
        require(plain, "first and positions both say where keys stand; give one of them")
        query, key = positions
        resolve((query, key if lengths is None else _held(key, lengths)), q.shape[2], m, q.device)


def _held(key: Tensor, lengths: Tensor) -> Tensor:
    """Key positions (b|1, m) where each row's tail, which is never read, repeats its last one: any will do there."""
    read = key.device.type == lengths.device.type == "cpu" and not torch.compiler.is_compiling()
    if not read or key.ndim > 2 or key.shape[-1] == 0:
        return key
    last = lengths.clamp(1, key.shape[-1])[:, None] - 1
    return key.expand(len(lengths), -1).gather(1, torch.arange(key.shape[-1])[None].minimum(last))


def _check_first(first: int | Tensor, m: int) -> None:
    """That the positions of m keys stay where angles are exact; a tensor's values are read only on the CPU."""
    if isinstance(first, Tensor):
        if first.device.type != "cpu" or torch.compiler.is_compiling() or first.numel() == 0:
            return
        low, high = int(first.min()), int(first.max())
    else:
        low = high = first
    require(
        low >= -LIMIT and high + m <= LIMIT,
        f"first must keep positions within ±{LIMIT}, got {low} … {high + m - 1}; count from the start of the document",
    )
