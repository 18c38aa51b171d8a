"""Which keys each query sees, and the positions of both.

An op takes ``positions`` in one of four forms:

==========================  ==================================================================================
``None``                    keys at 0 … m-1, the queries are the last n of them
an int ``s``                keys at s … s+m-1, the queries are the last n of them (a cache that dropped its past)
a tensor (m) or (b, m)      one position per key, the queries are the last n of them (padding, packed documents)
a pair (b, n), (b, m)       queries and keys at any positions (a static cache with empty slots)
==========================  ==================================================================================

In the first three the index of a key decides what comes before what. With a pair the positions decide.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.rotary import Angles, Rotary

LIMIT = 2**31 - 1
"""Largest position: beyond it float64 angles lose the digits that separate neighbours at high frequency."""

Positions = int | Tensor | tuple[Tensor, Tensor] | None
"""What ops take as ``positions``."""

T = TypeVar("T")


@dataclass(eq=False)
class AttentionMask:
    """Positions of n queries and m keys, and which keys each query sees. Layers of one forward pass share it.

    ::

        causal, offset 2      causal, window 2      documents 0 0 1 1
        k 0 1 2 3             k 0 1 2 3             k 0 1 2 3
        q ■ ■ ■ ·             q · ■ ■ ·             q · · ■ ·
        q ■ ■ ■ ■             q · · ■ ■             q · · ■ ■
    """

    n: int
    m: int
    device: torch.device
    causal: bool = True
    window: int | None = None
    first: int | None = 0
    """Position of key 0 if positions count on from there; None if only `positions` knows."""
    positions: tuple[Tensor, Tensor] | None = None
    """Positions of queries (b|1, n) and keys (b|1, m), where they do not count on."""
    aligned: bool = True
    """Query i is key offset + i, so the index decides what is seen; otherwise the positions do."""
    padding: Tensor | None = None
    """(b, m) bool, True = a real key."""
    documents: Tensor | None = None
    """(b, m) int; a query sees its own document only."""
    offset: int = -1
    """Index of query 0 among the keys; -1 is m - n."""
    lengths: Tensor | None = None
    """(b) int, slots of a static cache that hold tokens; the queries are the last of them."""
    firsts: Tensor | None = None
    """(b) int, position of slot 0 per row, where slots count on from there (with `lengths` or padding)."""
    is_clean: bool = False
    """Padded keys and values are known to be finite."""
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.offset < 0:
            self.offset = self.m - self.n

    @property
    def key_positions(self) -> Tensor:
        """Positions of the keys, (b|1, m)."""
        if self.positions is not None:
            return self.positions[1]
        first = self.first or 0
        return self.share("keys", lambda: torch.arange(first, first + self.m, device=self.device)[None])

    @property
    def query_positions(self) -> Tensor:
        """Positions of the queries, (b|1, n)."""
        if self.positions is not None:
            return self.positions[0]
        return self.key_positions[:, self.offset : self.offset + self.n]

    def share(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key before, or call it: computed once for all layers."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def angles(self, rotary: Rotary) -> Angles:
        """Return the angles of queries and keys."""
        return self.share(rotary, lambda: Angles(rotary, self))

    def part(self, start: int, stop: int) -> "AttentionMask":
        """Return the mask of queries start … stop-1 on the keys that they can see."""
        keys = self.offset + stop if self.causal and self.aligned else self.m
        return replace(
            self,
            n=stop - start,
            m=keys,
            offset=self.offset + start,
            padding=None if self.padding is None else self.padding[:, :keys],
            documents=None if self.documents is None else self.documents[:, :keys],
            positions=None
            if self.positions is None
            else (self.positions[0][:, start:stop], self.positions[1][:, :keys]),
            _shared={},
        )

    @property
    def shows_everything(self) -> bool:
        """Whether every query sees every key."""
        last = self.n == 1 and self.offset == self.m - 1
        return self._is_plain and (not self.causal or last) and (self.window is None or self.window >= self.m)

    @property
    def is_triangle(self) -> bool:
        """Whether the mask is the causal triangle whose last row is full."""
        unbounded = self.window is None or self.window >= self.m
        return self._is_plain and self.causal and unbounded and self.offset == self.m - self.n

    @property
    def _is_plain(self) -> bool:
        return self.padding is None and self.documents is None and self.aligned

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return low, high: queries start … stop-1 see no key outside low … high-1, by index."""
        low, high = 0, self.m
        if self.aligned:
            first, last = self.offset + start, self.offset + stop - 1
            if self.window is not None:
                low = min(max(0, first - self.window + 1), self.m - 1)
                high = min(high, last + self.window)
            if self.causal:
                high = min(high, last + 1)
        return low, high

    def distance(self, start: int, stop: int, low: int, high: int, *, by_index: bool = False) -> Tensor:
        """Compute how far each of keys low … high-1 lies behind each of queries start … stop-1: (b|1, ·, ·) int64."""
        if self.positions is None or by_index:
            query = torch.arange(self.offset + start, self.offset + stop, device=self.device)[None]
            key = torch.arange(low, high, device=self.device)[None]
        else:
            query, key = self.positions[0][:, start:stop], self.positions[1][:, low:high]
        return query[:, :, None] - key[:, None, :]

    def block(self, start: int, stop: int, low: int, high: int) -> Tensor:
        """Compute the boolean mask of a block of queries and keys: (b|1, 1, queries, keys), True = seen."""
        distance = self.distance(start, stop, low, high, by_index=self.aligned)
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance < self.window) & (distance > -self.window)
        if self.documents is not None:
            rows = self.documents[:, self.offset + start : self.offset + stop]
            seen = seen & (rows[:, :, None] == self.documents[:, None, low:high])
        if self.padding is not None:
            seen = seen & self.padding[:, None, low:high]
        return seen[:, None]

    def clean(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Zero what padded keys or values (b, g, m, ·) hold: a weight of zero times NaN is not zero."""
        if self.padding is None or self.is_clean:
            return tensors
        hidden = ~self.padding[:, None, :, None]
        return tuple(x.masked_fill(hidden, 0.0) for x in tensors)


def make_mask(
    n: int,
    m: int,
    batch: int,
    device: torch.device,
    *,
    positions: Positions = None,
    causal: bool = True,
    window: int | None = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
) -> AttentionMask:
    """Check an op's mask arguments and combine them.

    Values of tensors are read only on the CPU and outside torch.compile: on a GPU that would stall the stream.

    >>> make_mask(1, 3, 1, torch.device("cpu"), positions=5).query_positions
    tensor([[7]])
    """
    pair = isinstance(positions, tuple)
    if not pair and n > m:
        raise ValueError(
            f"queries are the last keys, so there must be at least as many keys as queries, got {n} queries and {m} "
            "keys; pass the cached keys, or positions=(of queries, of keys)"
        )
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"window must be a whole number of keys ≥ 1 or None, got {window}; a query always sees itself")
    if padding_mask is not None:
        _check_rows("padding_mask", padding_mask, (batch, m), boolean=True)
        if padding_mask.device.type == "cpu" and not torch.compiler.is_compiling() and padding_mask.all():
            padding_mask = None  # hides nothing
    if documents is not None:
        _check_rows("documents", documents, (batch, m), boolean=False)
        require(not pair, "documents cannot be combined with a pair of positions; use a tensor")
    if positions is None or isinstance(positions, int):
        first = positions or 0
        if first < -LIMIT or first + m > LIMIT:
            raise ValueError(f"positions must stay within ±{LIMIT}, got {first} … {first + m - 1}; split the sequence")
        return AttentionMask(n, m, device, causal, window, first, padding=padding_mask, documents=documents)
    if pair:
        query, key = (_rows(p, name, batch) for p, name in zip(positions, ("positions[0]", "positions[1]"), strict=True))
        _check_length(query, n, "positions[0]", "queries")
        _check_values(query, None)
    else:
        key = _rows(positions, "positions", batch)
        query = key[:, m - n :]
    _check_length(key, m, "positions[1]" if pair else "positions", "keys")
    _check_values(key, documents)
    return AttentionMask(n, m, device, causal, window, None, (query, key), not pair, padding_mask, documents)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_name: str, key_width: int) -> None:
    """Check shapes and dtypes of queries, keys and values: (batch, heads, positions, width) each."""
    for name, x in (("q", q), (key_name, k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have shape (batch, heads, positions, width), got {tuple(x.shape)}; add the axis"
            )
        if x.shape[0] == 0 or x.shape[2] == 0:
            what = "row, got batch size 0" if x.shape[0] == 0 else "position, got length 0"
            raise ValueError(f"{name} must hold at least one {what}; skip the call")
        if x.dtype != q.dtype or not x.is_floating_point():
            raise ValueError(f"{name} must have the floating dtype of q ({q.dtype}), got {x.dtype}; convert it first")
    if k.shape[-1] != key_width:
        raise ValueError(
            f"{key_name} must have width {key_width} for q of width {q.shape[-1]}, got {k.shape[-1]}; "
            "check the projection"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, {key_name} and v must share the batch size, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}"
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"{key_name} and v must share heads and positions, got {tuple(k.shape[1:3])} and {tuple(v.shape[1:3])}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"key heads must divide query heads, got {k.shape[1]} for {q.shape[1]}; "
            "choose num_key_value_heads accordingly"
        )


def _check_rows(name: str, mask: Tensor, shape: tuple[int, int], *, boolean: bool) -> None:
    right = mask.dtype == torch.bool if boolean else not (mask.is_floating_point() or mask.dtype == torch.bool)
    wanted, method = ("bool (True = keep)", "bool") if boolean else ("integer", "long")
    require(right, f"{name} must be {wanted}, got {mask.dtype}; convert it with .{method}()")
    require(
        tuple(mask.shape) == shape,
        lambda: f"{name} must have shape (batch, keys) = {shape}, got {tuple(mask.shape)}; it covers cached keys too",
    )


def _rows(positions: Tensor, name: str, batch: int) -> Tensor:
    require(
        not positions.is_floating_point() and positions.dtype != torch.bool,
        f"{name} must hold integers, got {positions.dtype}; use positions.long()",
    )
    require(positions.ndim in (1, 2), f"{name} must have shape (length,) or (batch, length), got {positions.ndim}-D")
    rows = positions[None] if positions.ndim == 1 else positions
    require(
        rows.shape[0] in (1, batch),
        lambda: f"positions must have 1 or {batch} rows, like the batch, got {rows.shape[0]}",
    )
    return rows


def _check_length(positions: Tensor, length: int, name: str, what: str) -> None:
    require(
        positions.shape[-1] == length,
        lambda: f"{name} must give one position to each of the {length} {what}, got shape {tuple(positions.shape)}",
    )


def _check_values(positions: Tensor, documents: Tensor | None) -> None:
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or positions.numel() == 0:
        return
    low, high = int(positions.min()), int(positions.max())
    require(
        low >= -LIMIT and high <= LIMIT,
        f"positions must stay within ±{LIMIT}, got {low} … {high}; count from the start of the document",
    )
    falls = positions[:, 1:] < positions[:, :-1]
    if documents is not None:
        falls = falls & (documents[:, 1:] == documents[:, :-1])
    if falls.any():
        row, at = (int(i) for i in falls.nonzero()[0])
        before, after = int(positions[row, at]), int(positions[row, at + 1])
        raise ValueError(
            f"positions must not decrease, got {before} then {after} in row {row}; "
            "pass documents= if several documents are packed into one row"
        )
