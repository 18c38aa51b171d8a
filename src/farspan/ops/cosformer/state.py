"""What linear attention remembers of all keys so far: a few numbers a head, however long the text."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class LinearState(NamedTuple):
    """Running sums of a text, and where it stands. Its size depends on the layer alone, not on the text.

    The sums are kept in the frame of the `anchor`: a query is turned by its distance from there, instead of the sums
    being turned at each token. A rotation in float32 has not quite length 1: at M = 1000 a million of them scale the
    oldest keys by 0.98. Only `decay` moves the sums, to the `position` of the newest key.
    """

    numerator: Tensor
    """Σ φ(k)⊗v, (b, g, F, dv), float32 or wider."""
    denominator: Tensor
    """Σ ψ(k), (b, g, F')."""
    anchor: Tensor
    """The position angles are measured from, (b|1, 1), float64."""
    position: Tensor
    """The position of the newest slot, (b|1, 1): the next call goes on at position + 1."""
    first: Tensor
    """The position of the first key that was not padding, (b|1, 1); infinite when there was none."""
    kernel: str
    """What made the sums, in words; another attention cannot continue them."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(x.numel() * x.element_size() for x in self[:5])

    def select(self, rows: Tensor) -> "LinearState":
        """The chosen rows of the batch (beam search)."""
        shared = self.numerator.shape[0] != 1  # one row of places may stand for the whole batch
        return self._map(lambda x: x if shared and x.shape[0] == 1 else x.index_select(0, rows))

    def detach(self) -> "LinearState":
        """The same numbers without history, for training on one piece of a long text after the other."""
        return self._map(Tensor.detach)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "LinearState":
        numerator, denominator, anchor, position, first = (change(x) for x in self[:5])
        return LinearState(numerator, denominator, anchor, position, first, self.kernel)


def empty_state(
    k: Tensor, v: Tensor, width: tuple[int, int], anchor: Tensor, kernel: str, dtype: torch.dtype
) -> LinearState:
    """The memory of nothing, anchored at (b|1, 1); `width` are the features of numerator and denominator."""
    b, g = k.shape[:2]
    sums = torch.zeros(b, g, width[0], v.shape[-1], dtype=dtype, device=k.device)
    return LinearState(
        sums, sums.new_zeros(b, g, width[1]), anchor, anchor - 1, torch.full_like(anchor, torch.inf), kernel
    )
