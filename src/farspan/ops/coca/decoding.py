"""Decoding on the half-width kernel: whether it takes a call, and what it must know of one; asking needs no Triton.

A model decides before it makes angles: where the kernel runs, nothing is turned and no table is made.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.launch import cannot_launch, has_sound_wgmma, is_hopper
from farspan.ops.phases import rotary_steps
from farspan.ops.positions import Positions
from farspan.ops.rotary import Rotary, Run
from farspan.ops.segments import join

BACKENDS = ("auto", "sdpa", "triton")
"""What a layer can be told to decode on."""
TIMED_WIDTHS = (64, 128)
"""Of heads that "auto" decodes on the kernel: those with which it was measured to be faster (docs/reproducing.md)."""
TIMED_ROWS = 8
"""Queries a key head, likewise: what one tile of the kernel holds."""
FOLD_ROWS = 32
"""Up to this many queries a key head (those of its group counted apart) the kernel turns queries instead of keys."""
WIDEST = 256


class Case(NamedTuple):
    """What the choice depends on, all of it known before a key is projected."""

    n: int
    group: int
    """Query heads a key head."""
    width: int
    """The wider of q and v."""
    dtype: torch.dtype
    device: torch.device
    gradient: bool
    documents: bool


def takes_half_width(case: Case, backend: str, argument: str = "backend") -> bool:
    """Whether a CoCA call runs on the half-width kernel; the one place where that is decided.

    "triton" takes every call with few queries, no documents and no gradient, and raises where device, dtype or width
    forbid it; "auto" takes such as were timed and faster; the rest is for SDPA. `argument` is what the caller
    chose the backend by, for the message.

    >>> case = Case(1, 4, 64, torch.float32, torch.device("cpu"), gradient=False, documents=False)
    >>> takes_half_width(case, "sdpa"), takes_half_width(case._replace(n=9), "triton")
    (False, False)
    """
    require_choice(argument, backend, BACKENDS)
    reason = half_width_refusal(case, backend, argument)
    if reason is not None and _not_decoding(case) is None:
        require(backend != "triton", reason)
        if backend == "auto" and case.device.type == "cuda" and not torch.compiler.is_compiling():
            _tell(reason, logging.WARNING if is_hopper(case.device.index) else logging.INFO)
    return reason is None


@cache
def _tell(reason: str, level: int) -> None:
    """Once for each reason: a GPU that could decode faster should not be silent about it."""
    logging.getLogger(__name__).log(level, "decoding with SDPA on keys that are turned anew at each step: %s", reason)


def half_width_refusal(case: Case, backend: str, argument: str = "backend") -> str | None:
    """Why :func:`takes_half_width` says no, or would raise; None when it says yes.

    >>> half_width_refusal(Case(1, 4, 64, torch.float32, torch.device("cpu"), gradient=False, documents=False), "auto")
    "backend='auto' decodes on the half-width kernel on CUDA alone, got cpu"
    """
    not_asked = _not_chosen(case, backend, argument) or _not_decoding(case)
    return not_asked or kernel_refusal(case.dtype, case.width, case.device, argument)


def kernel_refusal(dtype: torch.dtype, width: int, device: torch.device, argument: str = "backend") -> str | None:
    """Why no kernel can run such tensors, and what to do about it; None when one can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{argument}='triton' takes float32, bfloat16 or float16, got {dtype}; use {argument}='sdpa'"
    if width > WIDEST:
        return f"{argument}='triton' takes heads up to {WIDEST} wide, got {width}; use {argument}='sdpa'"
    return cannot_launch(device.type, argument)


def wants_gradient(*inputs: Tensor | None) -> bool:
    """Whether a gradient is wanted of some input, which the kernel has not: grad mode alone is no wish."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _not_chosen(case: Case, backend: str, argument: str) -> str | None:
    if backend == "sdpa":
        return f"{argument}='sdpa' asks for ready keys"
    if backend == "auto" and case.device.type != "cuda":
        return f"{argument}='auto' decodes on the half-width kernel on CUDA alone, got {case.device.type}"
    return _not_timed(case, argument) if backend == "auto" else None


def _not_timed(case: Case, argument: str) -> str | None:
    if case.dtype != torch.bfloat16 or case.width not in TIMED_WIDTHS or not is_hopper(case.device.index):
        return (
            f"{argument}='auto' decodes on the half-width kernel where that was timed, bfloat16 heads of width 64 or "
            f"128 on a Hopper GPU; elsewhere ask for it with {argument}='triton'"
        )
    if case.n * case.group > TIMED_ROWS:
        return f"{argument}='auto' decodes up to {TIMED_ROWS} queries a key head; ask for more with {argument}='triton'"
    if case.n * case.group > 1 and cannot_launch(case.device.type) is None and not has_sound_wgmma():
        return (
            f"{argument}='auto' decodes several queries a key head with ptxas 12.9 or later; set TRITON_PTXAS_PATH to "
            "one, such as the ptxas-blackwell that Triton 3.6 brings along"
        )
    return None


def _not_decoding(case: Case) -> str | None:
    """No numbers in these: a number of tokens in a message would become a constant of a compiled graph."""
    if case.gradient:
        return "the half-width kernel has no gradients; decode under torch.no_grad()"
    if case.documents:
        return "the half-width kernel does not see documents"
    if case.n * case.group > FOLD_ROWS:
        return f"more than {FOLD_ROWS} queries a key head are faster on ready keys"
    return None


@dataclass(frozen=True)
class Steps:
    """The frequencies of a call as the kernel wants them: what a plan is to ready keys, with no table of angles."""

    runs: tuple[Run, ...]
    turns: tuple[Tensor, ...]
    """Of each run (1|b, d/2), see :mod:`farspan.ops.phases`."""
    factor: float

    @classmethod
    def of(cls, rotary: Rotary, places: Positions) -> "Steps":
        """The steps of a rotary for queries at their places; a model makes them once for all layers."""
        runs = tuple(rotary.runs(places))
        turns = tuple(rotary_steps(rotary, run.length, places.device) for run in runs)
        return cls(runs, turns, rotary.factor)


@dataclass(frozen=True)
class Slots:
    """Which keys of a cache count, and where they stand; the queries are the last of them."""

    lengths: Tensor | None = None
    """(b) int, keys of each row that count; None = all."""
    first: int | Tensor = 0
    """Position of key 0, for all rows or (b) int, from which the others count on."""
    positions: tuple[Tensor, Tensor] | None = None
    """Positions of queries (b|1, n) and of keys (b|1, m), where they do not."""
    padding: Tensor | None = None
    """(b, m) bool, True = keep."""
    by_position: bool = False
    """Positions, not the index, decide what a query sees."""

    def places(self, n: int, m: int, device: torch.device) -> Positions:
        """Where n queries stand, for the law that may depend on it."""
        if self.positions is not None:
            return Positions(n, m, device, None, self.positions, not self.by_position)
        if self.lengths is None and not isinstance(self.first, Tensor):
            return Positions(n, m, device, self.first, None, True)
        end = m if self.lengths is None else self.lengths[:, None].clamp(max=m)
        query = end - n + torch.arange(n, device=device)[None]
        query = query + (self.first[:, None] if isinstance(self.first, Tensor) else self.first)
        return Positions(n, n, device, None, (query, query), True)


def attend_half_width(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    steps: Steps | None,
    slots: Slots,
    *,
    form: str,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """q (b, h, n, d), un-rotated t (b, g, m, d/2) and v (b, g, m, dv) → (b, h, n, dv) on the kernel, unchecked."""
    from farspan.ops.triton.coca_decode import decode_op

    n = q.shape[2]
    runs, turns = ((Run(0, n, None),), (None,)) if steps is None else (steps.runs, steps.turns)
    query, key = (None, None) if slots.positions is None else slots.positions
    outputs = [
        decode_op(
            q[:, :, run.start : run.stop],
            t,
            v,
            turn,
            slots.lengths,
            slots.first if isinstance(slots.first, Tensor) else None,
            None if query is None else query[:, run.start : run.stop],
            key,
            slots.padding,
            0 if isinstance(slots.first, Tensor) else slots.first,
            n - run.stop,
            form,
            slots.by_position,
            causal,
            window,
            scale if steps is None else scale * steps.factor**2,
        )
        for run, turn in zip(runs, turns, strict=True)
    ]
    return join(runs, outputs)
