"""Frequencies as whole numbers, so that a kernel finds the angle of any position exactly.

A float32 angle is wrong by 0.004 at position 100 000. A frequency kept as a 64-bit fraction of a turn is not: position
times step wraps by itself at whole turns, and what is left after the wrap *is* the reduced angle. The steps are as
exact as the float64 frequencies they come from, and the product loses nothing at any position.
"""

import math
import threading

import torch
from torch import Tensor

from farspan.ops.launch import is_captured, is_traced
from farspan.ops.rotary import Rotary


def steps_of(frequencies: Tensor) -> Tensor:
    """θ_j (…, d/2) float64 → θ_j/2π in units of 2⁻⁶⁴ turns, int64; (d/2) becomes (1, d/2).

    >>> quarter = steps_of(torch.tensor([math.pi / 2], dtype=torch.float64))
    >>> (quarter * 5).item() / 2**64  # five quarter turns are one
    0.25
    """
    turns = frequencies / (2 * math.pi)
    turns = turns - turns.round()
    return (turns * 2.0**64).to(torch.int64).reshape(-1, frequencies.shape[-1])


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
