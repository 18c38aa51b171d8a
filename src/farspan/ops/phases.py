"""Frequencies as whole numbers, so that a kernel finds the angle of any position exactly.

A float32 angle is wrong by 0.004 at position 100 000. A frequency kept as a 64-bit fraction of a turn is not: position
times step wraps by itself at whole turns, and what is left after the wrap *is* the reduced angle. The steps are as
exact as the float64 frequencies they come from, and the product loses nothing at any position.
"""

import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.ops.launch import is_captured, is_traced
from farspan.ops.positions import Positions
from farspan.ops.rotary import Angles, Rotary, Segment, working_dtype


def steps_of(frequencies: Tensor) -> Tensor:
    """θ_j (…, d/2) float64 → θ_j/2π in units of 2⁻⁶⁴ turns, int64; (d/2) becomes (1, d/2).

    >>> quarter = steps_of(torch.tensor([math.pi / 2], dtype=torch.float64))
    >>> (quarter * 5).item() / 2**64  # five quarter turns are one
    0.25
    """
    turns = frequencies / (2 * math.pi)
    turns = turns - turns.round()
    return (turns * 2.0**64).to(torch.int64).reshape(-1, frequencies.shape[-1])


class Phases(NamedTuple):
    """The angles of positions as a kernel finds them by itself: what :class:`Angles` are, with no table made."""

    step: Tensor
    """(1|b, d/2) int64, see :func:`steps_of`."""
    first: int
    """Where position 0 stands, from which the others count on."""
    positions: Tensor | None
    """(1|b, n), where they do not."""
    factor: float

    def angles(self, n: int, dtype: torch.dtype) -> Angles:
        """The table of n positions after all.

        >>> quarter = steps_of(torch.tensor([math.pi / 2], dtype=torch.float64))
        >>> Phases(quarter, 4, None, 1.0).angles(2, torch.float32).sin.flatten().tolist()
        [0.0, 1.0]
        """
        at = self.positions
        if at is None:
            at = torch.arange(self.first, self.first + n, device=self.step.device)[None]
        turns = (at.long()[:, None, :, None] * self.step[:, None, None, :]).to(torch.float64)
        angles = turns * (2 * math.pi / 2.0**64)
        both = torch.stack((angles.cos(), angles.sin()), dim=-2) * self.factor
        return Angles(both.to(working_dtype(dtype)))


PhasePlan = tuple[Segment[Phases], ...]


def phase_plan(rotary: Rotary, places: Positions, *, causal: bool) -> PhasePlan:
    """:meth:`Rotary.plan` for a kernel: frequencies and positions, and no tables.

    >>> [part] = phase_plan(Rotary(8), Positions(2, 5, torch.device("cpu"), 10, None, True), causal=True)
    >>> part.query.first, part.key.first, part.keys
    (13, 10, 5)
    """
    plan = []
    for start, stop, length, member in rotary.runs(places):
        keys = places.seen(stop, causal=causal)
        step = rotary_steps(rotary, length, places.device)
        query = key = None
        if places.first is None:
            query, key = places.query[:, start:stop], places.key[:, :keys]
        first = places.first or 0
        begin = first + places.m - places.n + start
        of_queries, of_keys = Phases(step, begin, query, rotary.factor), Phases(step, first, key, rotary.factor)
        plan.append(Segment(start, stop, keys, of_queries, of_keys, member))
    return tuple(plan)


_Key = tuple[Rotary, int | None, torch.device]
MOST_KEPT = 256
_KEPT: dict[_Key, Tensor] = {}
"""Steps for later calls, the newest last: at a decoding step, a handful of tiny launches would cost more than the
attention, and a CUDA graph that had made them would replay them each time."""
_LOCK = threading.Lock()
_HELD: dict[_Key, Tensor] = {}
"""Those of them which CUDA graphs read: nothing says when a graph is gone, so they stay."""


def rotary_steps(rotary: Rotary, length: int | Tensor | None, device: torch.device) -> Tensor:
    """The steps (1|b, d/2) of a rotary at the length that governs it; those of a call before, if there was one."""
    if isinstance(length, Tensor) or is_traced():  # a traced graph makes its own, and fuses the making
        return steps_of(rotary.frequencies(length, device))
    key = (rotary, length, device)
    if is_captured():
        with _LOCK:
            if key in _KEPT:
                _HELD.setdefault(key, _KEPT[key])
        return _HELD[key] if key in _HELD else steps_of(rotary.frequencies(length, device))
    with _LOCK:
        steps = _KEPT.pop(key, None)
        if steps is None:
            with torch.inference_mode(False):  # the first call may be inference, and a later one training
                steps = steps_of(rotary.frequencies(length)).to(device)
        _KEPT[key] = steps  # last again
        if len(_KEPT) > MOST_KEPT:
            del _KEPT[next(iter(_KEPT))]
    return steps
