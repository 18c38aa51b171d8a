"""The memory of one attention layer between calls, without transformers.

It keeps what the layer hands it: for CoCA the un-rotated t (d/2 numbers a head) and v, three quarters of what RoPE
keeps. A model's cache (:class:`farspan.FarspanCache`) holds one such memory a layer, of transformers' own classes;
both speak ``update`` and ``get_seq_length``, so a layer takes either.
"""

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops import LinearState

ONE_BY_ONE = 64
"""Up to so many new tokens, more of the kind are expected, and room is made for them."""


class Growing:
    """Tokens (b, g, n, width) with room for more at the end, so that a new token does not copy those before it.

    >>> grown, held = Growing(), torch.zeros(1, 1, 8, 2)
    >>> held = grown.append(held, torch.ones(1, 1, 1, 2))  # makes room
    >>> grown.append(held, torch.ones(1, 1, 1, 2)).data_ptr() == held.data_ptr()
    True
    """

    def __init__(self) -> None:
        self.room: Tensor | None = None

    def append(self, held: Tensor, new: Tensor) -> Tensor:
        """`held` and then `new`; in place where `held` is what this object returned last, or the beginning of it.

        Where gradients or a compiler watch, everything is copied, as torch.cat does.
        """
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (held.requires_grad or new.requires_grad)):
            return torch.cat((held, new), dim=2)
        old, total = held.shape[2], held.shape[2] + new.shape[2]
        if not self._has_room(held, new, total):
            spare = total // 4 if new.shape[2] <= ONE_BY_ONE else 0
            self.room = held.new_empty(*held.shape[:2], total + spare, held.shape[3])
            self.room[:, :, :old] = held
        assert self.room is not None
        self.room[:, :, old:total] = new
        return self.room[:, :, :total]

    def _has_room(self, held: Tensor, new: Tensor, total: int) -> bool:
        room = self.room
        if room is None or held.data_ptr() != room.data_ptr() or total > room.shape[2]:
            return False
        if room.is_inference() and not torch.is_inference_mode_enabled():  # may be read now, but not written
            return False
        return (held.shape[0], held.stride()) == (room.shape[0], room.stride()) and held.dtype == new.dtype


class LayerCache:
    """Keys and values of one layer; with a window, only those a later query can still see.

    >>> cache = LayerCache(window=3)
    >>> for n in range(5):
    ...     k, v = cache.update(torch.full((1, 1, 1, 2), float(n)), torch.zeros(1, 1, 1, 4))
    >>> k[0, 0, :, 0].tolist(), cache.get_seq_length()
    ([2.0, 3.0, 4.0], 5)
    """

    def __init__(self, window: int | None = None) -> None:
        require(window is None or window >= 1, f"window must be at least 1 or None, got {window}")
        self.window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._seen = 0
        self._grown = Growing(), Growing()

    def get_seq_length(self) -> int:
        """Tokens seen so far, dropped ones included."""
        return self._seen

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (b, g, n, ·); return all that the n new queries can see."""
        self._seen += keys.shape[2]
        if self.keys is not None and self.values is not None:
            keys, values = self._grown[0].append(self.keys, keys), self._grown[1].append(self.values, values)
        self.keys, self.values = keys, values
        if self.window is not None:
            first = max(0, keys.shape[2] - self.window + 1)
            self.keys, self.values = keys[:, :, first:].clone(), values[:, :, first:].clone()  # a view would keep all
        return keys, values

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        drop = self._seen - length
        require(length >= 0, f"length must be at least 0, got {length}")
        if drop <= 0 or self.keys is None or self.values is None:
            return
        require(
            self.window is None or self._seen < self.window,
            f"length {length} cannot be restored: this layer keeps only its window of {self.window}; start again",
        )
        self.keys, self.values, self._seen = self.keys[:, :, :-drop], self.values[:, :, :-drop], length

    def reorder(self, rows: Tensor) -> None:
        """Replace the batch by the chosen rows (beam search)."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values) if x is not None)


class StateCache:
    """The memory of a linear layer: running sums of one size, however many tokens were seen.

    >>> cache = StateCache()
    >>> cache.get_seq_length(), cache.nbytes
    (0, 0)
    """

    def __init__(self) -> None:
        self.state: LinearState | None = None
        self._seen = 0

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self._seen

    def advance(self, state: LinearState, tokens: int) -> None:
        """Replace the sums by those after `tokens` more."""
        self.state, self._seen = state, self._seen + tokens

    def reorder(self, rows: Tensor) -> None:
        """Replace the batch by the chosen rows (beam search)."""
        if self.state is not None:
            self.state = self.state.select(rows)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.state is None else self.state.nbytes
