"""From a checked call to the implementation that runs it. Each op has one table; the first entry that can run wins."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.device import wants_gradient
from farspan.ops.masking import AttentionMask, Positions, check_tensors, make_mask
from farspan.ops.rotary import DynamicNTK, Rotary

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Call:
    """The checked arguments of a softmax attention op."""

    q: Tensor
    k: Tensor
    """Keys, or CoCA's coefficients t."""
    v: Tensor
    mask: AttentionMask
    scale: float
    backend: str
    rotary: Rotary | None = None
    form: str = "exact"
    slopes: Tensor | None = None

    @property
    def gradient(self) -> bool:
        """Whether autograd will ask for a gradient."""
        return wants_gradient(self.q, self.k, self.v)


class Implementation(NamedTuple):
    """One way to run an op. Softmax ops run a :class:`Call`; other calls need a `backend` only."""

    name: str
    backends: tuple[str, ...]
    """The values of `backend` that may choose it."""
    why_not: Callable[[Any], str | None]
    """Why it cannot, or should not, run a call; None if it can."""
    run: Callable[[Any], Any]


Table = Sequence[Implementation]


def check_call(
    table: Table,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_name: str = "k",
    key_width: int | None = None,
    rotary: Rotary | None = None,
    mask: AttentionMask | None = None,
    positions: Positions = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    **rest: Any,
) -> Call:
    """Check the arguments that all softmax ops share; raise ValueError with argument, value and remedy."""
    require_choice("backend", backend, dict.fromkeys(name for entry in table for name in entry.backends))
    check_tensors(q, k, v, key_name, q.shape[-1] if key_width is None else key_width)
    if rotary is not None and rotary.dim != q.shape[-1]:
        raise ValueError(
            f"rotary must have dim {q.shape[-1]}, the width of q, got {rotary.dim}; build Rotary(head_dim)"
        )
    if mask is None:
        mask = make_mask(
            q.shape[2],
            k.shape[2],
            q.shape[0],
            q.device,
            positions=positions,
            causal=causal,
            window=window,
            padding_mask=padding_mask,
            documents=documents,
        )
    elif mask.n != q.shape[2] or mask.m != k.shape[2]:
        raise ValueError(
            f"mask is for {mask.n} queries and {mask.m} keys, got {q.shape[2]} and {k.shape[2]}; make it for this call"
        )
    return Call(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, backend, rotary, **rest)


def run(table: Table, call: Call) -> Tensor:
    """Run a call on the first implementation that can; per-query dynamic NTK runs once per set of frequencies."""
    if call.rotary is not None and call.rotary.follows_query and call.backend != "reference":
        return _run_by_bucket(table, call)
    return choose(table, call).run(call)


def choose(table: Table, call: Any) -> Implementation:
    """Return the first implementation that can run a call; raise the reason if there is none."""
    reason = None
    for entry in table:
        if call.backend in entry.backends:
            reason = entry.why_not(call)
            if reason is None:
                return entry
    raise ValueError(reason)


def _run_by_bucket(table: Table, call: Call) -> Tensor:
    """Run per-query dynamic NTK: queries whose positions share a bucket share frequencies."""
    rotary = call.rotary
    assert rotary is not None
    buckets = call.mask.share(("buckets", rotary), lambda: list(_buckets(rotary, call.mask)))
    outputs = []
    for mask, fixed, start, _ in buckets:
        q, k, v = call.q[:, :, start : start + mask.n], call.k[:, :, : mask.m], call.v[:, :, : mask.m]
        part = replace(call, q=q, k=k, v=v, mask=mask, rotary=fixed)
        outputs.append(choose(table, part).run(part))
    if all(member is None for *_, member in buckets):
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    whole = outputs[0].new_zeros(*call.q.shape[:3], outputs[0].shape[-1])
    for (mask, _, start, member), out in zip(buckets, outputs, strict=True):
        rows = slice(start, start + mask.n)
        whole[:, :, rows] = out if member is None else torch.where(member[:, None, :, None], out, whole[:, :, rows])
    return whole


def _buckets(rotary: Rotary, mask: AttentionMask) -> Iterator[tuple[AttentionMask, Rotary, int, Tensor | None]]:
    """Yield (mask, rotary, first query, which queries (b, n) belong or None for all) per set of frequencies."""
    scaling, n = rotary.scaling, mask.n
    assert isinstance(scaling, DynamicNTK)
    if mask.first is not None:
        begin, start = mask.first + mask.offset, 0
        while start < n:
            length = scaling.bucket(begin + start)
            stop = min(n, length - begin)
            yield (mask if stop - start == n else mask.part(start, stop)), rotary.at_length(length), start, None
            start = stop
    elif n == 1:  # one bucket per row, found on the device
        yield mask, rotary, 0, None
    else:
        require(
            not torch.compiler.is_compiling(),
            "per_query dynamic NTK cannot be compiled with padding or position_ids for more than one query; "
            "compile without them, or use mode 'per_request'",
        )
        lengths = scaling.buckets(mask.query_positions)
        for length in lengths.unique().tolist():
            member = lengths == length
            columns = member.any(0).nonzero()
            start, stop = int(columns[0]), int(columns[-1]) + 1
            inside = member[:, start:stop]
            part = mask if stop - start == n else mask.part(start, stop)
            yield part, rotary.at_length(length), start, None if inside.all() else inside


class Choice(NamedTuple):
    """What :func:`explain` returns: the implementation that would run, and why those before it would not."""

    name: str
    skipped: dict[str, str]


PREPARE: dict[Callable[..., Any], tuple[Table, Callable[..., Any]]] = {}
"""Op → its table, and the function that checks its arguments."""


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Return which implementation a call would take, and why not the ones before it. Nothing is computed.

    >>> from farspan.ops import Rotary, coca_attention
    >>> q, t, v = torch.randn(1, 4, 1, 8), torch.rand(1, 2, 6, 4), torch.randn(1, 2, 6, 8)
    >>> explain(coca_attention, q, t, v, rotary=Rotary(8)).name
    'decode_cpu'
    """
    require(op in PREPARE, f"op must be one of {', '.join(sorted(f.__name__ for f in PREPARE))}, got {op!r}")
    table, prepare = PREPARE[op]
    bound = inspect.signature(op).bind(*args, **kwargs)
    bound.apply_defaults()
    call = prepare(**bound.arguments)
    skipped: dict[str, str] = {}
    for entry in table:
        reason = f"backend is {call.backend!r}" if call.backend not in entry.backends else entry.why_not(call)
        if reason is None:
            return Choice(entry.name, skipped)
        skipped[entry.name] = reason
    return Choice("none", skipped)


def reference_twin(op: Callable[P, R]) -> Callable[P, R]:
    """Return `op` with the same signature and backend="reference"."""

    @wraps(op)
    def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        kwargs["backend"] = "reference"
        return op(*args, **kwargs)

    twin.__name__ = twin.__qualname__ = f"{op.__name__}_reference"
    twin.__doc__ = f"Compute :func:`{op.__name__}` by its definition, with all N×N scores: for checks, not for use."
    return twin
