"""What every attention op asks of its arguments, and how it reads them."""

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.positions import Positions, PositionsArgument, resolve
from farspan.ops.softmax.core import Sight

P = ParamSpec("P")
R = TypeVar("R")

BACKENDS = ("auto", "reference", "sdpa")
"""What every op can run on."""


def reference_twin(op: Callable[P, R]) -> Callable[P, R]:
    """`op` by its definition: the same signature, always with backend="reference"."""

    @wraps(op)
    def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        kwargs["backend"] = "reference"
        return op(*args, **kwargs)

    twin.__name__ = twin.__qualname__ = f"{op.__name__}_reference"
    twin.__doc__ = f":func:`{op.__name__}` by its definition, with all N×N scores: for checking, not for use."
    return twin


class Call(NamedTuple):
    """The arguments of an attention op, checked and resolved."""

    places: Positions
    sight: Sight
    scale: float


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_name: str,
    key_width: int,
    positions: PositionsArgument,
    causal: bool,
    window: int | None,
    padding_mask: Tensor | None,
    documents: Tensor | None,
    scale: float | None,
    backend: str,
    backends: tuple[str, ...] = BACKENDS,
) -> Call:
    """Refuse what cannot be meant, with argument, value and remedy; resolve the rest."""
    require_choice("backend", backend, backends)
    check_tensors(q, k, v, key_name, key_width)
    (b, _, n, d), m = q.shape, k.shape[2]
    free = isinstance(positions, tuple)
    require(
        free or n <= m,
        lambda: (
            f"queries are the last keys, so there must be at least as many keys as queries, got {n} queries and {m} "
            "keys; pass the cached keys, or positions=(of queries, of keys)"
        ),
    )
    check_window(window)
    check_mask("padding_mask", padding_mask, (b, m), boolean=True)
    check_mask("documents", documents, (b, m), boolean=False)
    require(not (free and documents is not None), "documents cannot be combined with a pair of positions; use a tensor")
    places = resolve(positions, n, m, q.device, documents)
    require(
        places.tensors is None or {rows.shape[0] for rows in places.tensors} <= {1, b},
        lambda: (
            f"positions must have 1 or {b} rows, like the batch, got {max(places.query.shape[0], places.key.shape[0])}"
        ),
    )
    sight = Sight(
        n=n,
        m=m,
        causal=causal,
        window=window,
        padding=drop_trivial(padding_mask),
        documents=documents,
        offset=m - n,
        positions=None if places.first is not None else (places.query, places.key),
        aligned=places.aligned,
    )
    return Call(places, sight, d**-0.5 if scale is None else scale)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_name: str, key_width: int) -> None:
    for name, x in (("q", q), (key_name, k), ("v", v)):
        check_axes(name, x)
        require(
            x.is_floating_point() and x.dtype == q.dtype,
            f"{name} must have the floating dtype of q ({q.dtype}), got {x.dtype}; convert it first",
        )
    check_width(q, k, key_name, key_width)
    require(
        q.shape[0] == k.shape[0] == v.shape[0],
        lambda: f"q, {key_name} and v must share the batch size, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}",
    )
    require(
        k.shape[1:3] == v.shape[1:3],
        lambda: f"{key_name} and v must share heads and positions, got {tuple(k.shape[1:3])} and {tuple(v.shape[1:3])}",
    )
    check_heads(q, k)


# The checks below raise by themselves: a decoding step makes them in every layer, and a call of `require` costs as much
# as the question.


def check_axes(name: str, x: Tensor) -> None:
    if x.ndim != 4:
        raise ValueError(f"{name} must have shape (batch, heads, positions, width), got {tuple(x.shape)}; add the axis")
    if x.shape[0] == 0:
        raise ValueError(f"{name} must hold at least one row, got batch size 0; skip the call")
    if x.shape[2] == 0:
        raise ValueError(f"{name} must hold at least one position, got length 0; skip the call")


def check_width(q: Tensor, k: Tensor, key_name: str, key_width: int) -> None:
    if k.shape[-1] != key_width:
        raise ValueError(
            f"{key_name} must have width {key_width} for q of width {q.shape[-1]}, got {k.shape[-1]}; "
            "check the projection"
        )


def check_heads(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"key heads must divide query heads, got {k.shape[1]} for {q.shape[1]}; "
            "choose num_key_value_heads accordingly"
        )


def check_window(window: int | None) -> None:
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"window must be a whole number of keys ≥ 1 or None, got {window}; a query always sees itself")


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, int], *, boolean: bool) -> None:
    if mask is None:
        return
    right_kind = mask.dtype == torch.bool if boolean else not (mask.is_floating_point() or mask.dtype == torch.bool)
    wanted = "bool (True = keep)" if boolean else "integer"
    require(
        right_kind, f"{name} must be {wanted}, got {mask.dtype}; convert it with .{'bool' if boolean else 'long'}()"
    )
    require(
        tuple(mask.shape) == shape,
        lambda: f"{name} must have shape (batch, keys) = {shape}, got {tuple(mask.shape)}; it covers cached keys too",
    )


def drop_trivial(mask: Tensor | None) -> Tensor | None:
    """None for a mask that hides nothing, where looking is free."""
    if mask is None or mask.device.type != "cpu" or torch.compiler.is_compiling() or not mask.all():
        return mask
    return None
