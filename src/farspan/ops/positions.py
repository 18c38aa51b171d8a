"""Where queries and keys stand in the text.

An op takes ``positions`` in one of four forms; each says where the m keys are and, with them, the n queries:

==========================  ==================================================================================
``None``                    keys at 0 … m-1, the queries are the last n of them
an int ``s``                keys at s … s+m-1, the queries are the last n of them (a cache that dropped its past)
a tensor (m) or (b, m)      a position for each key, the queries are the last n of them (padding, packed documents)
a pair (b, n), (b, m)       queries and keys placed freely (a static cache, whose tail is still empty)
==========================  ==================================================================================

In the first three the order of keys is the order of their index, so causality needs no look at the numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.errors import require

LIMIT = 2**31 - 1
"""Largest position: beyond it float64 angles would lose the digits that separate neighbours at high frequency."""

PositionsArgument = int | Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Positions:
    """Resolved positions of n queries and m keys; the rows are (b, ·), or (1, ·) when all rows agree."""

    n: int
    m: int
    device: torch.device
    first: int | None
    """Position of key 0, when keys run on without a gap; None when only the tensors know."""
    tensors: tuple[Tensor, Tensor] | None
    aligned: bool
    """Query i *is* key m-n+i, so index order is text order."""

    @property
    def key(self) -> Tensor:
        if self.first is not None:
            return torch.arange(self.first, self.first + self.m, device=self.device)[None]
        assert self.tensors is not None
        return self.tensors[1]

    @property
    def query(self) -> Tensor:
        return self.key[:, self.m - self.n :] if self.tensors is None else self.tensors[0]

    def seen(self, stop: int, *, causal: bool) -> int:
        """How many keys queries 0 … stop-1 can see at all."""
        return self.m - self.n + stop if causal and self.aligned else self.m


def resolve(
    positions: PositionsArgument, n: int, m: int, device: torch.device, documents: Tensor | None = None
) -> Positions:
    """Turn an op's ``positions`` argument into :class:`Positions`, refusing what cannot be meant.

    Values are read only on the CPU and outside torch.compile: on a GPU the check would stall the stream.

    >>> resolve(5, 1, 3, torch.device("cpu")).query
    tensor([[7]])
    """
    if positions is None or isinstance(positions, int):
        first = positions or 0
        require(
            first >= -LIMIT and first + m <= LIMIT,
            lambda: (
                f"positions must stay within ±{LIMIT}, got {first} … {first + m - 1}; split the text into documents"
            ),
        )
        return Positions(n, m, device, first, None, True)
    if isinstance(positions, tuple):
        query, key = (_rows(p, name) for p, name in zip(positions, ("positions[0]", "positions[1]"), strict=True))
        _check_length(query, n, "positions[0]", "queries")
        _check_length(key, m, "positions[1]", "keys")
        _check_values(query, None)
        _check_values(key, None)
        return Positions(n, m, device, None, (query, key), False)
    key = _rows(positions, "positions")
    _check_length(key, m, "positions", "keys")
    _check_values(key, documents)
    return Positions(n, m, device, None, (key[:, m - n :], key), True)


def _rows(positions: Tensor, name: str) -> Tensor:
    require(
        not positions.is_floating_point() and positions.dtype != torch.bool,
        f"{name} must hold integers, got {positions.dtype}; use positions.long()",
    )
    require(positions.ndim in (1, 2), f"{name} must have shape (length,) or (batch, length), got {positions.ndim}-D")
    return positions[None] if positions.ndim == 1 else positions


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
