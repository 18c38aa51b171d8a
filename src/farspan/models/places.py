"""Where the tokens of one forward pass stand, and what is padding.

A cache stores nothing about positions. They follow from the attention mask and the position of the newest real token:
slot s of a row holds the token of rank (number of real tokens up to s) - 1, and ranks and positions differ by one
constant a row. So any transformers cache will do. What this cannot describe is refused: positions with gaps or several
documents in a text that is to be continued.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from farspan.errors import require
from farspan.ops.coca.decoding import Slots
from farspan.ops.positions import PositionsArgument


class Extent(NamedTuple):
    """What attention gets of a layer's cache, the new tokens included."""

    past: int | Tensor
    """Tokens that were there before."""
    offset: int
    """The first slot."""
    length: int
    """The number of slots."""
    aligned: bool
    """Whether the new tokens are the last of these."""


class Places:
    """Positions and padding of n tokens after those in the cache."""

    def __init__(
        self,
        hidden: Tensor,
        *,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        whole_cache: bool,
    ) -> None:
        """`whole_cache`: attention will get all slots of a static cache, with a mask of that width."""
        self.batch, self.n = hidden.shape[:2]
        self.device, self.cache, self.whole_cache = hidden.device, cache, whole_cache
        past = 0 if cache is None else cache.get_seq_length()
        self.fresh = isinstance(past, int) and past == 0
        _check_mask(attention_mask, self.batch, past, self.n, static=getattr(cache, "is_compileable", False))
        _check_position_ids(position_ids, self.batch, self.n)
        self.padding = _real_padding(attention_mask)
        self.position_ids = position_ids
        self.documents: Tensor | None = None
        if position_ids is not None and self.padding is None:
            self._read_positions(position_ids)
        if self.padding is not None and not self.fresh and not torch.compiler.is_compiling():
            self._refuse_holes(past)

    def _read_positions(self, position_ids: Tensor) -> None:
        """Positions that fall back start a new document; with a cache they must simply go on by one."""
        if self.cache is None:
            self.documents = packed_documents(position_ids, self.batch)
        elif not torch.compiler.is_compiling():
            require(
                goes_on_by_one(position_ids),
                "position_ids must go on by one where a cache is used, got gaps or packed documents; "
                "pass use_cache=False and no cache",
            )

    def _refuse_holes(self, past: int | Tensor) -> None:
        """A window layer's cache drops by slot, so padding between real tokens would count as tokens."""
        windowed = any(getattr(layer, "is_sliding", False) for layer in self.cache.layers)  # type: ignore[union-attr]
        if windowed and self.padding is not None:
            require(
                not _has_holes(self.padding[:, :past]),
                "attention_mask has padding after real tokens in the cache, which window layers cannot continue; "
                "pad on the left",
            )

    def extent(self, layer_idx: int) -> Extent:
        """What a layer attends to."""
        past: int | Tensor = 0
        length, offset = self.n, 0
        if self.cache is not None:
            past = self.cache.get_seq_length(layer_idx)
            length, offset = self.cache.get_mask_sizes(self.n, layer_idx)
        # Ints that grow with the text would make torch.compile start anew at each token: then tensors decide.
        aligned = isinstance(past, int) and (self.cache is None or not torch.compiler.is_compiling())
        if aligned and not (self.whole_cache and length > past + self.n - offset):
            length = past + self.n - offset  # type: ignore[assignment]
        else:
            aligned = False
        return Extent(past, offset, length, aligned)

    def keep(self, extent: Extent) -> Tensor | None:
        """What is no padding, (b, length); None where nothing is."""
        return None if self.padding is None else _columns(self.padding, extent.offset, extent.length)

    def positions(self, extent: Extent) -> PositionsArgument:
        """Where its slots stand, or (of the new tokens, of the slots), as the ops take it."""
        past, offset, keys, aligned = extent
        if self.position_ids is None and self.padding is None:
            if aligned:
                return offset
            slots = torch.arange(keys, device=self.device)[None] + offset
            return past + torch.arange(self.n, device=self.device)[None], slots
        if self.fresh and self.padding is None and aligned:
            return self.position_ids
        ranks = self._ranks(offset + keys)
        places = ranks + self._shift(ranks, past)
        if self.fresh and self.position_ids is not None and self.padding is not None and aligned:
            places = torch.where(self.padding, self.position_ids, places)
        keys_at = places[:, offset:]
        return keys_at if aligned else (self._at_queries(places, past), keys_at)

    def slots(self, extent: Extent) -> Slots:
        """The places of a decoding step on the half-width kernel: lengths for the empty tail of a static cache, and
        positions a key only where they may not count on."""
        past, offset, _, aligned = extent
        lengths, positions = None, None
        first: int | Tensor = 0
        if not aligned:
            lengths = torch.zeros(self.batch, dtype=torch.long, device=self.device) + (past + self.n - offset)
        if self._counts_on(past):
            first = self._first(extent)
        else:
            places = self.positions(extent)
            assert not isinstance(places, int | None)
            positions = places if isinstance(places, tuple) else (places[:, -self.n :], places)
        return Slots(lengths, first, positions, self.keep(extent))

    def rows(self, table: int) -> Tensor:
        """Rows of an encoder's table of learned positions for its tokens, (1 or b, n).

        They count real tokens, unless `position_ids` say otherwise; padding gets row 0. Texts that leave the table
        are refused; while tracing, by the look-up itself.
        """
        require(
            self.cache is None, "past_key_values must be None where learned_positions are used, got a cache; drop it"
        )
        positions = self.positions(Extent(0, 0, self.n, aligned=True))
        if isinstance(positions, int):
            positions = torch.arange(self.n, device=self.device)[None]
        assert isinstance(positions, Tensor)
        # Ranks are below n: only longer texts and given positions are worth a look at the values.
        if (self.n > table or self.position_ids is not None) and not torch.compiler.is_compiling():
            real = positions if self.padding is None else positions.expand(self.batch, -1)[self.padding]
            for position in (int(real.min()), int(real.max())) if real.numel() else ():
                require(
                    0 <= position < table,
                    f"learned_positions is {table} and a token stands at position {position}, counted from 0; "
                    "shorten the text, or train with more of them",
                )
        # Padding before a row's first token counts as -1, which no table has.
        return positions if self.padding is None else positions.masked_fill(~self.padding, 0)

    def _counts_on(self, past: int | Tensor) -> bool:
        """Whether positions surely go on by one from slot to slot of a row, as those before its first token may do."""
        if self.padding is None:
            return self.position_ids is None or self.cache is not None
        if torch.compiler.is_compiling() or (self.fresh and self.position_ids is not None):
            return False  # it would take a look at the values
        return not _has_holes(self.padding[:, : past + self.n])

    def _first(self, extent: Extent) -> int | Tensor:
        """Position of its first slot, of all rows or (b), found from that of the newest token."""
        past, offset, length, _ = extent
        if self.position_ids is None and self.padding is None:
            return offset
        if self.position_ids is not None:
            newest = self.position_ids[:, -1]
        else:
            newest = self._at_queries(self._ranks(offset + length), past)[:, -1]
        return (newest - (past + self.n - 1 - offset)).expand(self.batch).contiguous()

    def _ranks(self, slots: int) -> Tensor:
        if self.padding is None:
            return torch.arange(slots, device=self.device)[None]
        ranks = _columns(self.padding, 0, slots).long().cumsum(-1) - 1
        return ranks.clamp(min=0)  # padding before the first token: any will do there, and some find 0 prepared

    def _at_queries(self, slots: Tensor, past: int | Tensor) -> Tensor:
        return slots.index_select(1, past + torch.arange(self.n, device=self.device))

    def _shift(self, ranks: Tensor, past: int | Tensor) -> Tensor | int:
        """position - rank, read at each row's last real query."""
        if self.position_ids is None:
            return 0
        rows = max(ranks.shape[0], self.position_ids.shape[0])
        last = torch.full((rows, 1), self.n - 1, device=self.device)
        if self.padding is not None:
            real = self._at_queries(_columns(self.padding, 0, ranks.shape[1]), past)
            last = (real * torch.arange(self.n, device=self.device)).amax(-1, keepdim=True)
        at = self._at_queries(ranks, past).expand(rows, -1).gather(1, last)
        return self.position_ids.expand(rows, -1).gather(1, last) - at


def _has_holes(padding: Tensor) -> bool:
    """Whether a row has padding after real tokens."""
    return bool((padding[:, 1:] < padding[:, :-1]).any())


def goes_on_by_one(position_ids: Tensor) -> bool:
    """Whether every position is its neighbour's plus one."""
    return bool((position_ids[..., 1:] == position_ids[..., :-1] + 1).all())


def packed_documents(position_ids: Tensor, batch: int) -> Tensor | None:
    """A number for each document of a packed row (b, n); None when nothing is packed (looked up outside tracing)."""
    falls = position_ids[:, 1:] <= position_ids[:, :-1]
    documents = F.pad(falls.long().cumsum(-1), (1, 0)).expand(batch, -1)
    return documents if torch.compiler.is_compiling() or falls.any() else None


def _check_mask(mask: Tensor | None, batch: int, past: int | Tensor, n: int, *, static: bool) -> None:
    if mask is None:
        return
    require(mask.ndim == 2, f"attention_mask must have shape (batch, tokens so far), got {tuple(mask.shape)}")
    require(
        not mask.is_floating_point(),
        f"attention_mask must hold 1 for real tokens and 0 for padding as integers or bool, got {mask.dtype}",
    )
    if isinstance(past, int):
        fits = mask.shape[1] >= past + n if static else mask.shape[1] == past + n
        require(
            fits and mask.shape[0] == batch,
            f"attention_mask must have shape {(batch, past + n)}, cached tokens included, got {tuple(mask.shape)}",
        )


def _check_position_ids(position_ids: Tensor | None, batch: int, n: int) -> None:
    require(
        position_ids is None or tuple(position_ids.shape) in ((batch, n), (1, n)),
        f"position_ids must have shape {(batch, n)}, one for each new token, "
        f"got {None if position_ids is None else tuple(position_ids.shape)}",
    )


def _real_padding(attention_mask: Tensor | None) -> Tensor | None:
    """The mask as bool, or None when it hides nothing (one look, as transformers takes it; not while tracing)."""
    if attention_mask is None:
        return None
    mask = attention_mask.bool()
    return mask if torch.compiler.is_compiling() or not mask.all() else None


def _columns(mask: Tensor, offset: int, length: int) -> Tensor:
    """Columns offset … offset+length-1 of a (b, slots) mask; slots it does not reach are empty."""
    missing = offset + length - mask.shape[1]
    if missing > 0:
        mask = F.pad(mask, (0, missing), value=False)
    return mask[:, offset : offset + length]
