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
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.errors import require
from farspan.ops.rotary import Angles, Rotary

LIMIT = 2**31 - 1
"""Largest position: beyond it float64 angles lose the digits that separate neighbours at high frequency."""

Positions = int | Tensor | tuple[Tensor, Tensor] | None
"""What ops take as ``positions``."""

T = TypeVar("T")


class MaskOptions(TypedDict, total=False):
    """The options of an op that make its mask, see :func:`make_mask`."""

    positions: Positions
    causal: bool
    window: int | None
    padding_mask: Tensor | None
    documents: Tensor | None


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
    """Position of key 0 if positions are consecutive; None if only `positions` knows."""
    positions: tuple[Tensor, Tensor] | None = None
    """Positions of queries (b|1, n) and keys (b|1, m), where they are not consecutive."""
    aligned: bool = True
    """Query i is key offset + i, so the index decides what is seen; otherwise the positions do."""
    padding: Tensor | None = None
    """(b, m) bool, True = a real key."""
    documents: Tensor | None = None
    """(b, m) int; a query sees its own document only."""
    offset: int = -1
    """Index of query 0 among the keys; -1 becomes m - n."""
    lengths: Tensor | None = None
    """(b) int, slots of a static cache that hold tokens; the queries are the last of them."""
    firsts: Callable[[], int | Tensor | None] | None = None
    """Find the position of slot 0, for all rows or (b), where slots are consecutive: a kernel needs no more."""
    is_clean: bool = False
    """Padded keys and values are known to be finite."""
    sees_itself: bool = False
    """Every query is known to see a key, at least its own."""
    rotary_length: int | Tensor | None = None
    """The length that sets `per_request` dynamic NTK, for all rows or (b); None = that of the queries."""
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    is_plain: bool = field(init=False)
    """Whether index, window and causality are all that matters."""
    shows_everything: bool = field(init=False)
    """Whether every query sees every key."""
    is_triangle: bool = field(init=False)
    """Whether the mask is the causal triangle whose last row is full."""
    batch: int = field(init=False)
    """Rows that the mask is for; 1 serves any number."""

    def __post_init__(self) -> None:
        if self.offset < 0:
            self.offset = self.m - self.n
        self.is_plain = self.padding is None and self.documents is None and self.aligned
        self.sees_itself = self.sees_itself or (self.padding is None and self.aligned)
        # A compiled graph serves all lengths: it must not ask which of them a window covers.
        covered = self.window is None or (not torch.compiler.is_compiling() and self.window >= self.m)
        unbounded = self.is_plain and covered
        last = self.n == 1 and self.offset == self.m - 1
        self.shows_everything = unbounded and (not self.causal or last)
        self.is_triangle = unbounded and self.causal and self.offset == self.m - self.n
        self.batch = 1
        for x in (self.padding, self.documents, *(self.positions or ())):
            if x is not None and x.shape[0] > 1:
                self.batch = x.shape[0]

    @property
    def key_positions(self) -> Tensor:
        """Positions of the keys, (b|1, m)."""
        if self.positions is not None:
            return self.positions[1]
        first = self.first or 0
        return torch.arange(first, first + self.m, device=self.device)[None]

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
        found = self._shared.get(rotary)
        if found is None:
            found = self._shared[rotary] = Angles(rotary, self)
        return found

    def tables(self, rotary: Rotary | None, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return cosines and sines of the angles of queries and of keys; None without rotation."""
        if rotary is None:
            return None, None
        angles = self.angles(rotary)
        return angles.query(dtype), angles.key(dtype)

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
            lengths=None if self.lengths is None else self.lengths - (self.n - stop),
            _shared={},
        )

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

    def mix_neighbours(self, x: Tensor, share: Tensor) -> Tensor:
        """Return x (b, g, m, ·) with a share of the token before, in its document and past padding, in each token."""
        before = F.pad(x, (0, 0, 1, 0))[:, :, :-1]
        for rows in (self.padding, self.documents):
            if rows is not None:  # padding has nothing to give, and gives nothing
                apart = F.pad(rows[:, 1:] != rows[:, :-1], (1, 0), value=True)
                before = before.masked_fill(apart[:, None, :, None], 0.0)
        return torch.lerp(x, before, share)

    def clean(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Zero what padded keys and values (b, g, m, ·) hold: a weight of zero times NaN is not zero."""
        if self.padding is None or self.is_clean:
            return k, v
        hidden = ~self.padding[:, None, :, None]
        return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


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
    if isinstance(positions, tuple):
        query = _rows("positions[0]", positions[0], batch, n, "queries")
        key = _rows("positions[1]", positions[1], batch, m, "keys")
        _check_values(query, None)
    else:
        key = _rows("positions", positions, batch, m, "keys")
        query = key[:, m - n :]
    _check_values(key, documents)
    return AttentionMask(n, m, device, causal, window, None, (query, key), not pair, padding_mask, documents)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_name: str, key_width: int) -> None:
    """Check shapes and dtypes of queries, keys and values: (batch, heads, positions, width) each."""
    for name, x in (("q", q), (key_name, k), ("v", v)):
        shape = tuple(x.shape)
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (batch, heads, positions, width), got {shape}; add the axis")
        if x.shape[0] == 0 or x.shape[2] == 0:
            what = "row, got batch size 0" if x.shape[0] == 0 else "position, got length 0"
            raise ValueError(f"{name} must hold at least one {what}; skip the call")
        if x.dtype != q.dtype or not x.is_floating_point():
            raise ValueError(f"{name} must have the floating dtype of q ({q.dtype}), got {x.dtype}; convert it first")
    wanted = f"{key_name} must have width {key_width} for q of width"
    require(k.shape[-1] == key_width, lambda: f"{wanted} {q.shape[-1]}, got {k.shape[-1]}; check the projection")
    rows = q.shape[0], k.shape[0], v.shape[0]
    if not rows[0] == rows[1] == rows[2]:
        raise ValueError(f"q, {key_name} and v must share the batch size, got {rows[0]}, {rows[1]} and {rows[2]}")
    if k.shape[1:3] != v.shape[1:3]:
        found = f"{tuple(k.shape[1:3])} and {tuple(v.shape[1:3])}"
        raise ValueError(f"{key_name} and v must share heads and positions, got {found}")
    heads = k.shape[1], q.shape[1]
    if heads[1] % heads[0]:
        remedy = "choose num_key_value_heads accordingly"
        raise ValueError(f"key heads must divide query heads, got {heads[0]} for {heads[1]}; {remedy}")


def _check_rows(name: str, mask: Tensor, shape: tuple[int, int], *, boolean: bool) -> None:
    right = mask.dtype == torch.bool if boolean else not (mask.is_floating_point() or mask.dtype == torch.bool)
    wanted, method = ("bool (True = keep)", "bool") if boolean else ("integer", "long")
    require(right, f"{name} must be {wanted}, got {mask.dtype}; convert it with .{method}()")
    require(
        tuple(mask.shape) == shape,
        lambda: f"{name} must have shape (batch, keys) = {shape}, got {tuple(mask.shape)}; it covers cached keys too",
    )


def _rows(name: str, positions: Tensor, batch: int, length: int, what: str) -> Tensor:
    """Check positions of queries or keys, and return them as (1 or b, length)."""
    require(
        isinstance(positions, Tensor),
        lambda: f"{name} must be None, an int, a tensor or a pair of tensors, got {positions!r}",
    )
    dtype, shape = positions.dtype, tuple(positions.shape)
    integers = not positions.is_floating_point() and dtype != torch.bool
    require(integers, f"{name} must hold integers, got {dtype}; use positions.long()")
    require(
        len(shape) in (1, 2) and shape[-1] == length and shape[:-1] in ((), (1,), (batch,)),
        lambda: f"{name} must have shape ({length},) or ({batch}, {length}), one for each of the {what}, got {shape}",
    )
    return positions.reshape(-1, length)


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


class AttentionContext:
    """Positions, padding and documents of one forward pass: n new tokens after those in a cache.

    Layers ask it for their :class:`AttentionMask`; layers that see the same keys share one. A cache stores nothing
    about positions. They follow from the attention mask and the position of the newest real token: slot s of a row
    holds the token of rank (real tokens up to s) - 1, and ranks and positions differ by one constant per row. Positions
    with gaps, or several documents, can therefore not be continued from a cache.

    Args:
        hidden: (b, n, ·) the new tokens, for their number and device.
        causal: a token sees those up to itself.
        attention_mask: (b, tokens so far) 1 = real, 0 = padding.
        position_ids: (b, n) or (1, n); positions that restart mark packed documents.
        past: tokens in the cache; a tensor if the cache is static.
        cached: a cache is in use.
        static: the cache is static, so the attention mask may be wider than the tokens so far.
        whole_cache: attention reads every slot of a static cache, with a mask of that width.
        has_windows: some layers cache only a window.
        rotary_length: the length that sets `per_request` dynamic NTK for the whole request, for all rows or (b).
    """

    def __init__(
        self,
        hidden: Tensor,
        *,
        causal: bool = True,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past: int | Tensor = 0,
        cached: bool = False,
        static: bool = False,
        whole_cache: bool = False,
        has_windows: bool = False,
        rotary_length: int | Tensor | None = None,
    ) -> None:
        self.batch, self.n = hidden.shape[:2]
        self.device, self.causal, self.cached, self.whole_cache = hidden.device, causal, cached, whole_cache
        self.rotary_length = rotary_length
        self.is_fresh = isinstance(past, int) and past == 0
        self.padding = None if attention_mask is None else self._read_padding(attention_mask, past, static)
        self.position_ids = position_ids
        self.documents: Tensor | None = None
        if position_ids is not None:
            self._read_positions(position_ids)
        if has_windows and self.padding is not None and not self.is_fresh and not torch.compiler.is_compiling():
            require(
                not _has_holes(self.padding[:, :past]),
                "attention_mask has padding after real tokens in the cache, which window layers cannot continue; "
                "pad on the left",
            )
        self._masks: dict[Hashable, AttentionMask] = {}

    def _read_padding(self, mask: Tensor, past: int | Tensor, static: bool) -> Tensor | None:
        """Return the mask as bool, or None if it hides nothing (not looked up while tracing)."""
        require(
            mask.ndim == 2,
            f"attention_mask must have shape (batch, tokens so far), got {tuple(mask.shape)}; position_ids that start "
            "again keep packed documents apart",
        )
        if mask.is_floating_point() and not torch.compiler.is_compiling():  # PEFT's are
            require(
                bool(((mask == 0) | (mask == 1)).all()),
                f"attention_mask must hold 1 for real tokens and 0 for padding, got {mask.dtype} of other values",
            )
        if isinstance(past, int):
            wanted = past + self.n
            fits = mask.shape[1] >= wanted if static else mask.shape[1] == wanted
            require(
                fits and mask.shape[0] == self.batch,
                f"attention_mask must have shape {(self.batch, wanted)}, cached tokens included, "
                f"got {tuple(mask.shape)}",
            )
        mask = mask.bool()
        return mask if torch.compiler.is_compiling() or not mask.all() else None

    def _read_positions(self, position_ids: Tensor) -> None:
        """Check position_ids; positions that fall back start a new document."""
        require(
            tuple(position_ids.shape) in ((self.batch, self.n), (1, self.n)),
            f"position_ids must have shape {(self.batch, self.n)}, one for each new token, "
            f"got {tuple(position_ids.shape)}",
        )
        if not self.cached:
            falls = position_ids[:, 1:] <= position_ids[:, :-1]
            if self.padding is not None:  # positions of padding mean nothing
                falls = falls & self.padding[:, 1:] & self.padding[:, :-1]
            if torch.compiler.is_compiling() or falls.any():
                self.documents = F.pad(falls.long().cumsum(-1), (1, 0)).expand(self.batch, -1)
        elif not torch.compiler.is_compiling():
            require(
                self.padding is not None or is_consecutive(position_ids),
                "position_ids must go on by one where a cache is used, got gaps or packed documents; "
                "pass use_cache=False and no cache",
            )

    def to(self, device: torch.device | str, *_: Any, **__: Any) -> "AttentionContext":
        """Return this context on another device, for models that are spread over several."""
        moved = copy(self)
        moved.device, moved._masks = torch.device(device), {}
        for name in ("padding", "position_ids", "documents"):
            x: Tensor | None = getattr(self, name)
            setattr(moved, name, None if x is None else x.to(device))
        return moved

    def mask(
        self, window: int | None = None, *, past: int | Tensor = 0, length: int | None = None, offset: int | Tensor = 0
    ) -> AttentionMask:
        """Return the mask of a layer with a window over `length` cached slots from token `offset` on.

        `past`, `length` and `offset` are what the layer's cache tells; without a cache leave them out.
        """
        length = self.n if length is None else length
        compiling = torch.compiler.is_compiling()
        aligned = isinstance(offset, Tensor)  # a static window: the newest token is always in the last slot
        key: Hashable = (window, length) if aligned else window
        if not isinstance(offset, Tensor):
            # Ints that grow with the sequence would make torch.compile start anew at each token: then tensors decide.
            if not isinstance(past, Tensor) and not (self.cached and compiling):
                filled = past + self.n - offset
                if not (self.whole_cache and length > filled):
                    length, aligned = filled, True
            if self.cached and not compiling:
                key = (window, length, offset, aligned)
        if key not in self._masks:
            self._masks[key] = self._make_mask(window, past, length, offset, aligned)
        return self._masks[key]

    def _make_mask(
        self, window: int | None, past: int | Tensor, length: int, offset: int | Tensor, aligned: bool
    ) -> AttentionMask:
        """Make the mask of slots that hold tokens offset … offset+length-1; below 0 there are none yet."""
        first, positions, lengths = None, None, None
        if isinstance(past, Tensor):
            past = past.clone()  # a static cache counts in place, and `firsts` may be asked for later
        if isinstance(offset, int) and aligned and self.position_ids is None and self.padding is None:
            first = offset
        else:
            positions = self._positions(past, length, offset, aligned)
        if not aligned:
            lengths = torch.zeros(self.batch, dtype=torch.long, device=self.device) + (past + self.n - offset)
        padding = None if self.padding is None else _columns(self.padding, offset, length)
        if isinstance(offset, Tensor):
            exists = (offset + torch.arange(length, device=self.device))[None] >= 0
            padding = exists if padding is None else exists & padding
        return AttentionMask(
            n=self.n,
            m=length,
            device=self.device,
            causal=self.causal,
            window=window,
            first=first,
            positions=positions,
            aligned=aligned,
            padding=padding,
            documents=self.documents,
            lengths=lengths,
            firsts=(lambda: self._first_slot(past, offset)) if self.cached and isinstance(offset, int) else None,
            is_clean=True,  # empty slots hold zeros
            sees_itself=self.padding is None,
            rotary_length=self.rotary_length,
        )

    def _positions(self, past: int | Tensor, length: int, offset: int | Tensor, aligned: bool) -> tuple[Tensor, Tensor]:
        """Compute the positions of the new tokens (b|1, n) and of the slots (b|1, length)."""
        fresh = self.is_fresh and aligned and self.position_ids is not None
        if fresh and self.padding is None:
            return self.position_ids, self.position_ids  # type: ignore[return-value]
        ranks = self._ranks(length, offset)
        keys = ranks + self._shift(past)
        if fresh:
            keys = torch.where(self.padding, self.position_ids, keys)  # type: ignore[arg-type]
        new = slice(length - self.n, None)
        return (keys[:, new] if aligned else self._of_new(keys, past - offset)), keys

    def _first_slot(self, past: int | Tensor, offset: int) -> int | Tensor | None:
        """Find the position of slot 0, for all rows or (b), if positions count on from there; else None."""
        compiling = torch.compiler.is_compiling()
        if self.padding is None and self.position_ids is None:  # an int that grows would make a graph per token
            return torch.full((self.batch,), offset, device=self.device) if compiling else offset
        if self.padding is not None:
            if compiling or (self.is_fresh and self.position_ids is not None):
                return None  # reading the values would synchronise with the GPU
            if _has_holes(self.padding[:, : past + self.n]):
                return None
        newest = (self._ranks(self.n, past) if self.position_ids is None else self.position_ids)[:, -1]
        return (newest - (past + self.n - 1 - offset)).expand(self.batch).contiguous()

    def _ranks(self, length: int, offset: int | Tensor) -> Tensor:
        """Count the real tokens before each of tokens offset … offset+length-1: (b|1, length)."""
        if self.padding is None:
            return (offset + torch.arange(length, device=self.device))[None]
        slots = self.padding.shape[1] if isinstance(offset, Tensor) else offset + length
        ranks = _columns(self.padding, 0, slots).long().cumsum(-1) - 1
        return _columns(ranks.clamp(min=0), offset, length)  # that of padding before the first token is not used

    def _of_new(self, x: Tensor, past: int | Tensor) -> Tensor:
        return x.index_select(1, past + torch.arange(self.n, device=self.device))

    def _shift(self, past: int | Tensor) -> Tensor | int:
        """Compute position - rank, read at each row's last real new token."""
        if self.position_ids is None:
            return 0
        ranks, real = self._ranks(self.n, past), self.new_padding(past)
        rows = max(ranks.shape[0], self.position_ids.shape[0])
        last = torch.full((rows, 1), self.n - 1, device=self.device)
        if real is not None:
            last = (real * torch.arange(self.n, device=self.device)).amax(-1, keepdim=True)
        return (self.position_ids.expand(rows, -1) - ranks.expand(rows, -1)).gather(1, last)

    def new_tokens(self, past: int | Tensor = 0) -> AttentionMask:
        """Return the mask of the new tokens among themselves, at their positions."""
        if isinstance(past, int) and not (self.cached and torch.compiler.is_compiling()):
            return self.mask(past=past, offset=past)
        if "new tokens" not in self._masks:
            positions = self._ranks(self.n, past) + self._shift(past)
            self._masks["new tokens"] = AttentionMask(
                n=self.n,
                m=self.n,
                device=self.device,
                causal=self.causal,
                first=None,
                positions=(positions, positions),
                padding=self.new_padding(past),
                documents=self.documents,
                is_clean=True,
            )
        return self._masks["new tokens"]

    def new_padding(self, past: int | Tensor = 0) -> Tensor | None:
        """Return which of the new tokens are real, (b, n) bool; None if all are."""
        return None if self.padding is None else self._of_new(self.padding, past)

    def clean(self, hidden: Tensor, past: int | Tensor) -> Tensor:
        """Zero hidden states (b, n, ·) of padding: NaN there would reach real tokens through keys and values."""
        real = self.new_padding(past)
        return hidden if real is None else hidden.masked_fill(~real[..., None], 0.0)


def is_consecutive(position_ids: Tensor, padding: Tensor | None = None) -> bool:
    """Return whether every position (b, n) is its neighbour's plus one, except at padding (b, n)."""
    follows = position_ids[..., 1:] == position_ids[..., :-1] + 1
    if padding is not None:
        follows = follows | ~(padding[:, 1:] & padding[:, :-1])
    return bool(follows.all())


def _has_holes(padding: Tensor) -> bool:
    """Return whether a row has padding after real tokens."""
    return bool((padding[:, 1:] < padding[:, :-1]).any())


def _columns(rows: Tensor, offset: int | Tensor, length: int) -> Tensor:
    """Return columns offset … offset+length-1 of (b, slots); 0 where there are none, below 0 those of column 0."""
    if isinstance(offset, Tensor):
        return rows.index_select(1, (offset + torch.arange(length, device=rows.device)).clamp(min=0))
    missing = offset + length - rows.shape[1]
    if missing > 0:
        rows = F.pad(rows, (0, missing), value=False)
    return rows[:, offset : offset + length]
