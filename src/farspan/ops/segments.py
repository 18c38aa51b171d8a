"""From a rotary to attention: the angles of a call, and the loop over runs of queries that share them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.call import Call
from farspan.ops.positions import Positions
from farspan.ops.rotary import A, Plan, Rotary, Run, Segment
from farspan.ops.softmax.core import softmax_attention

Prepare = Callable[[Tensor, Tensor, A, A], tuple[Tensor, Tensor]]
"""(q, k, angles of q, angles of k) → queries and keys whose dot product is the score."""


def make_plan(rotary: Rotary | Plan | None, places: Positions, q: Tensor, *, causal: bool) -> Plan | None:
    """The angles of a call: computed here from a Rotary, or handed in ready-made by a model that shares them."""
    if not isinstance(rotary, Rotary):
        return rotary
    check_dim(rotary, q)
    return rotary.plan(places, places.n, places.m, causal=causal, dtype=q.dtype)


def check_dim(rotary: Rotary, q: Tensor) -> None:
    """Refuse angles for another width than that of q."""
    require(
        rotary.dim == q.shape[-1],
        lambda: f"rotary must have dim {q.shape[-1]}, the width of q, got {rotary.dim}; build Rotary(head_dim)",
    )


def attend_by_segment(
    plan: Sequence[Segment[A]],
    prepare: Prepare[A],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
) -> Tensor:
    """Run `prepare` (angles in, ready queries and keys out) and softmax attention on each segment of the plan."""
    outputs = []
    for part in plan:
        ready = prepare(q[:, :, part.start : part.stop], k[:, :, : part.keys], part.query, part.key)
        sight = call.sight.narrow(part.start, part.stop, part.keys)
        outputs.append(softmax_attention(*ready, v[:, :, : part.keys], sight=sight, scale=call.scale))
    return join(plan, outputs)


def join(runs: Sequence[Run | Segment[A]], outputs: list[Tensor]) -> Tensor:
    """The outputs (b, h, stop-start, dv) of runs of queries, put together to (b, h, n, dv)."""
    if all(run.member is None for run in runs):
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    (b, h, _, width), n = outputs[0].shape, max(run.stop for run in runs)
    whole = outputs[0].new_zeros(b, h, n, width)
    for run, out in zip(runs, outputs, strict=True):
        rows = slice(run.start, run.stop)
        if run.member is not None:
            out = torch.where(run.member[:, None, :, None], out, whole[:, :, rows])
        whole[:, :, rows] = out
    return whole
