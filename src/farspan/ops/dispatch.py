"""From a checked call to the implementation that runs it. Each op has one table; the first entry that can run wins."""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, Unpack, get_type_hints

import torch
from torch import Tensor

from farspan.errors import require, unknown
from farspan.ops.device import wants_gradient
from farspan.ops.masking import AttentionMask, MaskOptions, check_tensors, make_mask
from farspan.ops.rotary import DynamicNTK, Rotary, odd_width

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

FORMS = ("exact", "slack")
"""Forms of CoCA."""
DEFAULTS = {"causal": True, "backend": "auto", "return_state": False}
"""Defaults of shared options; those of all others are None."""


class SoftmaxOptions(MaskOptions, total=False):
    """What all softmax ops take beside their own arguments, see :func:`farspan.ops.coca_attention`."""

    mask: AttentionMask | None
    scale: float | None
    backend: str


class Runs(Protocol[R_co]):
    """A checked call, which can run."""

    def run(self) -> R_co: ...


OPS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Each public op, and the function that checks its arguments and returns its call."""


def operation(options: type[Any], returns: Any = Tensor) -> Callable[[Callable[P, Runs[R_co]]], Callable[P, R_co]]:
    """Make an op of a function that checks its arguments: the op runs the call that the function returns.

    The names that `**options` stands for, and what the call `returns`, are written into the signature.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(name, keyword, default=DEFAULTS.get(name), annotation=kind)
        for name, kind in get_type_hints(options).items()
    ]

    def make(check: Callable[P, Runs[R_co]]) -> Callable[P, R_co]:
        @wraps(check)
        def op(*args: P.args, **kwargs: P.kwargs) -> R_co:
            return check(*args, **kwargs).run()

        signature = inspect.signature(check)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        op.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *shared], return_annotation=returns
        )
        op.__annotations__ = {**check.__annotations__, "return": returns}
        OPS[op] = check
        return op

    return make


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
    phase: Tensor | None = None
    table: "Table | None" = None

    @property
    def gradient(self) -> bool:
        """Whether autograd will ask for a gradient."""
        return wants_gradient(self.q, self.k, self.v)

    def run(self) -> Tensor:
        """Run on the first implementation that can; per-query dynamic NTK runs once per set of frequencies."""
        mask, call, scaling = self.mask, self, None if self.rotary is None else self.rotary.scaling
        assert self.table is not None
        if mask.padding is not None and not mask.is_clean:
            k, v = mask.clean(self.k, self.v)
            call = replace(self, k=k, v=v)
        if isinstance(scaling, DynamicNTK) and scaling.mode == "per_query" and self.backend != "reference":
            return _run_by_bucket(self.table, call)
        return self.table.choose(call).run(call)


class Implementation(NamedTuple):
    """One way to run an op."""

    name: str
    backends: tuple[str, ...]
    """The values of `backend` that may choose it."""
    run: Callable[..., Any]
    why_not: Callable[[Any], str | None] | None = None
    """Return why it cannot, or should not, run a call; None if it can. No function: it always can."""
    device: str | None = None
    """The only type of device on which "auto" considers it."""
    then: "Table | None" = None
    """The table that chooses what runs after it."""


class Table:
    """The implementations of one op; the first that can run a call wins."""

    def __init__(self, *entries: Implementation, key_name: str = "k", rotary_width: int = 1) -> None:
        self.entries, self.key_name, self.rotary_width = entries, key_name, rotary_width
        self.backends = tuple(dict.fromkeys(name for entry in entries for name in entry.backends))

    def choose(self, call: Any, skipped: dict[str, str] | None = None) -> Implementation:
        """Return the first implementation that can run a call; note in `skipped` why others cannot."""
        backend, device, reason = call.backend, call.q.device.type, ""
        for entry in self.entries:
            if backend not in entry.backends:
                note = f"backend is {backend!r}"
            elif backend == "auto" and entry.device not in (None, device):
                note = f"it is for {entry.device} tensors, got {device}"
            else:
                found = None if entry.why_not is None else entry.why_not(call)
                if found is None:
                    return entry
                note = reason = found
            if skipped is not None:
                skipped[entry.name] = note
        raise ValueError(reason)


def check_call(
    table: Table,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None = None,
    form: str = "exact",
    slopes: Tensor | None = None,
    phase: Tensor | None = None,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    backend: str = "auto",
    **masking: Unpack[MaskOptions],
) -> Call:
    """Check the arguments of a softmax op; raise ValueError with argument, value and remedy."""
    width = q.shape[-1]
    if backend not in table.backends:
        raise unknown("backend", backend, table.backends)
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    if table.key_name == "t" and width % 2:
        raise ValueError(odd_width(width))
    if mask is None or not mask.is_clean:  # a model's masks come with tensors that its layers made
        check_tensors(q, k, v, table.key_name, width // 2 if table.key_name == "t" else width)
        if not isinstance(rotary, Rotary | None):
            raise ValueError(f"rotary must be a Rotary or None, got {rotary!r}; build Rotary(head_dim)")
        if isinstance(scale, float) and not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}; leave it out for 1/sqrt(width)")
    if rotary is not None and rotary.dim != width * table.rotary_width:
        wanted, remedy = f"{width}, the width of q", "Rotary(head_dim)"
        if table.rotary_width == 2:
            wanted, remedy = f"{2 * width}, twice the width of q", "Rotary(2 * width)"
        raise ValueError(f"rotary must have dim {wanted}, got {rotary.dim}; build {remedy}")
    mask = mask_of(q, k, mask, masking)
    scale = width**-0.5 if scale is None else scale
    return Call(q, k, v, mask, scale, backend, rotary, form, slopes, phase, table)


def mask_of(q: Tensor, k: Tensor, mask: AttentionMask | None, masking: MaskOptions) -> AttentionMask:
    """Make the mask of queries q and keys k, or check the ready one that replaces its options."""
    if mask is None:
        return make_mask(q.shape[2], k.shape[2], q.shape[0], q.device, **masking)
    if masking and any(x is not DEFAULTS.get(name) for name, x in masking.items()):
        raise ValueError("mask replaces positions, causal, window, padding_mask and documents, got both; give one")
    if mask.n != q.shape[2] or mask.m != k.shape[2] or mask.batch not in (1, q.shape[0]):
        raise ValueError(
            f"mask is for {mask.batch} × {mask.n} queries and {mask.m} keys, got {q.shape[0]} × {q.shape[2]} and "
            f"{k.shape[2]}; make it for this call"
        )
    return mask


def _run_by_bucket(table: Table, call: Call) -> Tensor:
    """Run per-query dynamic NTK: queries whose positions share a bucket share frequencies."""
    parts = _parts(call)
    outputs = [table.choose(part).run(part) for part, *_ in parts]
    if all(member is None for *_, member in parts):
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    whole = outputs[0].new_zeros(*call.q.shape[:3], outputs[0].shape[-1])
    for (part, start, member), out in zip(parts, outputs, strict=True):
        rows = slice(start, start + part.mask.n)
        whole[:, :, rows] = out if member is None else torch.where(member[:, None, :, None], out, whole[:, :, rows])
    return whole


def _parts(call: Call) -> list[tuple[Call, int, Tensor | None]]:
    """Split a per-query call into calls with fixed frequencies: each with its first query, and see :func:`_buckets`."""
    rotary = call.rotary
    assert rotary is not None
    if call.mask.first is None and call.mask.n == 1:  # one bucket per row, found on the device
        return [(call, 0, None)]
    buckets = call.mask.share(("buckets", rotary), lambda: list(_buckets(rotary, call.mask)))
    parts: list[tuple[Call, int, Tensor | None]] = []
    for mask, fixed, start, member in buckets:
        q, k, v = call.q[:, :, start : start + mask.n], call.k[:, :, : mask.m], call.v[:, :, : mask.m]
        parts.append((replace(call, q=q, k=k, v=v, mask=mask, rotary=fixed), start, member))
    return parts


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
    then: "Choice | None" = None
    """What runs after it, such as SDPA after the features of CoCA."""


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Return which implementation a call would take, and why not the ones before it. Nothing is computed.

    >>> from farspan.ops import Rotary, coca_attention
    >>> q, t, v = torch.randn(1, 4, 1, 8), torch.rand(1, 2, 6, 4), torch.randn(1, 2, 6, 8)
    >>> explain(coca_attention, q, t, v, rotary=Rotary(8)).name
    'decode_cpu'
    """
    known = ", ".join(sorted(known.__name__ for known in OPS))
    require(op in OPS, f"op must be one of {known}, got {op!r}")
    call = OPS[op](*args, **kwargs)
    if isinstance(call, Call) and call.rotary is not None and call.rotary.follows_query:
        call = _parts(call)[0][0]  # of per-query dynamic NTK, the first set of frequencies
    return _explain(call.table, call)


def _explain(table: Table, call: Any) -> Choice:
    skipped: dict[str, str] = {}
    entry = table.choose(call, skipped)
    return Choice(entry.name, skipped, None if entry.then is None else _explain(entry.then, call))


def reference_twin(op: Callable[P, R]) -> Callable[P, R]:
    """Return `op` with the same signature and backend="reference"."""

    @wraps(op)
    def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        kwargs["backend"] = "reference"
        return op(*args, **kwargs)

    twin.__name__ = twin.__qualname__ = f"{op.__name__}_reference"
    twin.__doc__ = f"Compute :func:`{op.__name__}` by its definition, with all N×N scores: for checks, not for use."
    return twin
