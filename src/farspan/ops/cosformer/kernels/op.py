"""Linear attention as an operator of torch: forward, backward, and shapes for tracing."""

from typing import Any

import torch
from torch import Tensor

from farspan.ops.cosformer.kernels.attention import (
    NOTHING,
    Sums,
    Text,
    Weight,
    add_up,
    chosen,
    count_segments,
    find_deltas,
    held_dtype,
    mix,
)
from farspan.ops.kernels.layout import Room, row_major


@torch.library.custom_op("farspan::linear_attention", mutates_args=())
def linear_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    initial_sum: Tensor | None,
    query_angles: Tensor | None,
    key_angles: Tensor | None,
    padding: Tensor | None,
    documents: Tensor | None,
    still: float,
    wave: float,
    shared: bool,
    relu: bool,
    epsilon: float,
    causal: bool,
    segment: int,
    remember: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q (b, h, n, d), k (b, g, m, d), v (b, g, m, dv) → output (b, h, n, dv), denominators (b, h, n), the sums before
    each segment (of so many tokens; for the backward pass), and the sums of the whole text (if `remember`).

    `causal` needs n = m, and goes on from the sums `initial` (b, g, parts·d, dv) and `initial_sum` (b, g, sums·d).
    The angles (b|1, 2, ·), cos and sin, are those of the sums; None without a wave. What there is none of comes back
    empty. `segment` is a multiple of 64; 0 leaves it to :func:`farspan.ops.cosformer.kernels.attention.chosen`.
    """
    weight, segment = Weight(still, wave, shared, relu, epsilon), segment or chosen(q, v, causal)
    q, k, v = (row_major(x) for x in (q, k, v))
    text = Text.of(key_angles, padding, documents)
    before, total, kept = _held(initial, initial_sum, weight, k, v), NOTHING, NOTHING
    if remember or not causal or count_segments(k, segment) > 1:
        whole = remember or not causal
        before, total = add_up(k, v, weight, text, None, None, segment, 1, before, causal=causal, whole=whole)
        kept = before if causal else total
    if not causal:
        before, text = total, Text.of(query_angles, None, None)
    out = Room.like(q, (*q.shape[:3], v.shape[-1])).view
    denominators = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    mix(q, k, v, out, weight, text, before, denominators, None, segment, causal=causal)
    return out, denominators, *_or_empty(kept, q), *_flat(total if remember else NOTHING, q)


@torch.library.custom_op("farspan::linear_attention_backward", mutates_args=())
def linear_attention_backward_op(
    gradient: Tensor,
    final: Tensor | None,
    final_sum: Tensor | None,
    out: Tensor,
    denominators: Tensor,
    states: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    initial_sum: Tensor | None,
    query_angles: Tensor | None,
    key_angles: Tensor | None,
    padding: Tensor | None,
    documents: Tensor | None,
    still: float,
    wave: float,
    shared: bool,
    relu: bool,
    epsilon: float,
    causal: bool,
    segment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of the initial sums, given those of the output and of the sums after the text."""
    weight, segment = Weight(still, wave, shared, relu, epsilon), segment or chosen(q, v, causal)
    q, k, v, out, gradient = (row_major(x) for x in (q, k, v, out, gradient))
    queries, keys = Text.of(query_angles, None, documents), Text.of(key_angles, padding, documents)
    deltas = find_deltas(out, gradient, denominators, weight)
    rest = (denominators, deltas, segment)
    before = Sums(states, sums) if states.numel() else _held(initial, initial_sum, weight, k, v)
    dq = Room.like(q, q.shape).view
    mix(gradient, v, k, dq, weight, keys if causal else queries, before, *rest, causal=causal, source=q)
    after, total = _held(final, final_sum, weight, k, v), NOTHING
    if initial is not None or not causal or count_segments(k, segment) > 1:
        groups = q.shape[1] // k.shape[1]
        whole = initial is not None or not causal
        after, total = add_up(q, gradient, weight, queries, *rest, groups, after, causal=causal, whole=whole)
    after = after if causal else total
    dk, dv = (Room.like(x, x.shape).view for x in (k, v))  # only now: the totals that add_up held are free again
    mix(v, gradient, q, dk, weight, keys, after, *rest, causal=causal, reverse=True, source=k)
    mix(k, q, gradient, dv, weight, keys, after, *rest, causal=causal, reverse=True)
    return dq, dk, dv, *_flat(total if initial is not None else NOTHING, q)


def _held(states: Tensor | None, sums: Tensor | None, weight: Weight, k: Tensor, v: Tensor) -> Sums:
    """Sums as a state has them, (b, g, parts·d, dv) and (b, g, sums·d); where only one is given, the other is zero."""
    if states is None and sums is None:
        return NOTHING
    room = weight.like(k, v, 1)
    assert room.states is not None
    assert room.sums is not None
    room.states.zero_() if states is None else room.states.copy_(states.reshape(room.states.mT.shape).mT)
    room.sums.zero_() if sums is None else room.sums.copy_(sums.reshape(room.sums.shape))
    return room


def _flat(total: Sums, x: Tensor) -> tuple[Tensor, Tensor]:
    """The reverse of `_held`, for sums held once."""
    states, sums = _or_empty(total, x)
    return (states[:, :, 0].mT.flatten(2, 3), sums[:, :, 0].flatten(2, 3)) if states.numel() else (states, sums)


def _or_empty(sums: Sums, x: Tensor) -> tuple[Tensor, Tensor]:
    states, sums_ = (x.new_empty(0, dtype=torch.float32) if y is None else y for y in sums)
    return states, sums_


@linear_attention_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None, initial_sum: Tensor | None, *rest: Any
) -> tuple[Any, ...]:
    *_, still, wave, shared, relu, epsilon, causal, segment, remember = rest
    weight = Weight(still, wave, shared, relu, epsilon)
    q, k, v = (row_major(x) for x in (q, k, v))
    segments = count_segments(k, segment or chosen(q, v, causal))
    made = remember or not causal or segments > 1
    kept = NOTHING
    if made:
        kept = weight.like(k, v, segments, held_dtype(weight.dtype(q.dtype))) if causal else weight.like(k, v, 1)
    final = weight.like(k, v, 1) if remember else NOTHING
    out = Room.like(q, (*q.shape[:3], v.shape[-1])).view
    return out, q.new_empty(q.shape[:3], dtype=torch.float32), *_or_empty(kept, q), *_flat(final, q)


@linear_attention_backward_op.register_fake
def _(gradient: Tensor, final: Any, final_sum: Any, *saved: Any) -> tuple[Any, ...]:
    _, _, _, _, q, k, v, initial, *_, still, wave, shared, relu, epsilon, _, _ = saved
    weight = Weight(still, wave, shared, relu, epsilon)
    q, k, v = (row_major(x) for x in (q, k, v))
    start = NOTHING if initial is None else weight.like(k, v, 1)
    return *(Room.like(x, x.shape).view for x in (q, k, v)), *_flat(start, q)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.remember = inputs
    tensors, ctx.numbers = tensors[:9], tensors[9:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[:4], *tensors)


def _backward(ctx: Any, gradient: Tensor | None, *rest: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(saved[0])
    *_, final, final_sum = rest
    dq, dk, dv, initial, initial_sum = linear_attention_backward_op(gradient, final, final_sum, *saved, *ctx.numbers)
    has_initial = saved[7] is not None
    return dq, dk, dv, *((initial, initial_sum) if has_initial else (None, None)), *(None,) * 12


linear_attention_op.register_autograd(_backward, setup_context=_remember)
