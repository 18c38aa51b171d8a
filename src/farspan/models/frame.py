"""What all layers of one forward pass share: where the tokens stand, what is padding, and the angles.

A cache stores nothing about positions. They follow from the attention mask and the position of the newest real token:
slot s of a row holds the token of rank (number of real tokens up to s) - 1, and ranks and positions differ by one
constant a row. So any transformers cache will do, with left padding, right padding or none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from farspan.layers.attention import Attention
from farspan.ops.positions import PositionsArgument, resolve
from farspan.ops.rotary import Plan, Rotary


@dataclass(frozen=True)
class View:
    """A frame as one layer sees it: the keys it will get from the cache, and what is known about them."""

    keys: int
    positions: PositionsArgument
    padding_mask: Tensor | None
    documents: Tensor | None
    plan: Plan | None


class Frame:
    """Positions, masks and angles of one forward pass of n tokens after those in the cache."""

    def __init__(
        self,
        hidden: Tensor,
        *,
        rotary: Rotary,
        causal: bool,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
    ) -> None:
        self.batch, self.n = hidden.shape[:2]
        self.device, self.dtype = hidden.device, hidden.dtype
        self.rotary, self.causal, self.cache = rotary, causal, cache
        self.padding = _real_padding(attention_mask)
        self.position_ids = position_ids
        self.documents = None
        if position_ids is not None and cache is None and attention_mask is None:
            self.documents = _packed_documents(position_ids, self.batch)
        self._plans: dict[tuple[bool, int, int], Plan] = {}

    def view(self, layer: Attention, layer_idx: int, *, rotated_cache: bool) -> View:
        """What `layer` needs to attend; layers that cache alike share angles."""
        past, length, offset = 0, self.n, 0
        if self.cache is not None:
            past = self.cache.get_seq_length(layer_idx)
            length, offset = self.cache.get_mask_sizes(self.n, layer_idx)
        aligned = isinstance(past, int)
        keys = past + self.n - offset if aligned else length
        positions = self._positions(past, offset, keys, aligned)
        padding = None if self.padding is None else _window(self.padding, offset, keys)
        plan = None
        if layer.rotary is not None:
            key = (rotated_cache, keys, offset)
            if key not in self._plans:
                self._plans[key] = self._plan(positions, keys, rotated_cache)
            plan = self._plans[key]
        return View(keys, positions, padding, self.documents, plan)

    def _plan(self, positions: PositionsArgument, keys: int, rotated_cache: bool) -> Plan:
        places = resolve(positions, self.n, keys, self.device, self.documents)
        if rotated_cache:  # only the new tokens are turned; the cache holds the others ready
            places = resolve(places.query, self.n, self.n, self.device, self.documents)
        return self.rotary.plan(places, places.n, places.m, causal=self.causal, dtype=self.dtype)

    def _positions(self, past: int | Tensor, offset: int, keys: int, aligned: bool) -> PositionsArgument:
        if self.position_ids is None and self.padding is None:
            if aligned:
                return offset
            slots = torch.arange(offset, offset + keys, device=self.device)[None]
            return past + torch.arange(self.n, device=self.device)[None], slots
        if self.cache is None and self.padding is None:
            return self.position_ids
        ranks = self._ranks(offset + keys)
        places = ranks + self._shift(ranks, past)
        if self.cache is None and self.position_ids is not None:
            places = torch.where(self.padding, self.position_ids, places)  # type: ignore[arg-type]
        keys_at = places[:, offset:]
        return keys_at if aligned else (self._at_queries(places, past), keys_at)

    def _ranks(self, slots: int) -> Tensor:
        if self.padding is None:
            return torch.arange(slots, device=self.device)[None]
        return _window(self.padding, 0, slots).long().cumsum(-1) - 1

    def _at_queries(self, slots: Tensor, past: int | Tensor) -> Tensor:
        return slots.index_select(1, past + torch.arange(self.n, device=self.device))

    def _shift(self, ranks: Tensor, past: int | Tensor) -> Tensor | int:
        """position - rank, read at each row's last real query."""
        if self.position_ids is None:
            return 0
        last = torch.full((self.position_ids.shape[0], 1), self.n - 1, device=self.device)
        if self.padding is not None:
            real = self._at_queries(_window(self.padding, 0, ranks.shape[1]), past)
            last = (real * torch.arange(self.n, device=self.device)).amax(-1, keepdim=True)
        rows = max(last.shape[0], ranks.shape[0], self.position_ids.shape[0])
        last = last.expand(rows, 1)
        at = self._at_queries(ranks, past).expand(rows, -1).gather(1, last)
        return self.position_ids.expand(rows, -1).gather(1, last) - at


def _real_padding(attention_mask: Tensor | None) -> Tensor | None:
    """The mask as bool, or None when it hides nothing (one look, as transformers takes it; not while tracing)."""
    if attention_mask is None:
        return None
    mask = attention_mask.bool()
    return mask if torch.compiler.is_compiling() or not mask.all() else None


def _packed_documents(position_ids: Tensor, batch: int) -> Tensor | None:
    """Positions that do not go on by one start a new document, as in transformers."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1)
    documents = (steps != 1).cumsum(-1).expand(batch, -1)
    if torch.compiler.is_compiling() or documents.any():
        return documents
    return None


def _window(mask: Tensor, offset: int, length: int) -> Tensor:
    """Columns offset … offset+length-1 of a (b, slots) mask; slots it does not reach are empty."""
    missing = offset + length - mask.shape[1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing), value=False)
    return mask[:, offset : offset + length]
