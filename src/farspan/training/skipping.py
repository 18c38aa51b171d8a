"""Short rows at far positions: what long texts ask of the angles, at the price of short ones.

The second half of a row is moved away from the first (positional skip-wise training, Zhu et al. 2023), so that a model
meets distances up to many times the row. Nothing else about the row changes, its number of keys neither.
"""

import torch
from torch import Tensor

from farspan.errors import require


def check_reach(reach: int, length: int, where: str) -> None:
    """Refuse a reach that :func:`skipped_positions` cannot draw."""
    require(
        reach >= 1 and reach.bit_count() == 1,
        f"reach of {where} must be a power of two, times the length of a row, got {reach}; try 16",
    )
    require(
        reach == 1 or length % 2 == 0,
        f"length of {where} must be even where reach > 1, to be halved, got {length}; try {length + 1}",
    )


def skipped_positions(ids: Tensor, reach: int) -> Tensor | None:
    """Positions (b, n) for rows ids (b, n); None where reach is 1 and they simply count on.

    The first half stands at 0 … n/2-1. For the second a length L is drawn from 2n, 4n … reach·n, one for the whole
    batch, and each row's half begins somewhere in L/2 … L-n/2: in the part of a text that `per_query` dynamic NTK gives
    frequencies of their own, so that they are the same runs of queries in every batch, and compiled blocks stay as
    they are. The draws are a function of the tokens: there is no state to save, and no random number to share.

    >>> skipped_positions(torch.tensor([[5, 6, 7, 8]]), 4)[0, :2].tolist()
    [0, 1]
    """
    if reach == 1:
        return None
    n = ids.shape[1]
    half = n // 2
    places = torch.arange(1, n + 1, device=ids.device)
    rows = _scattered((ids * places).sum(-1))
    length = n << (1 + _scattered(rows.sum()) % (reach.bit_length() - 1))
    begin = length // 2 + rows % (length // 2 - half + 1)
    count = torch.arange(half, device=ids.device)
    return torch.cat((count.expand(len(ids), -1), begin[:, None] + count), dim=1)


def _scattered(numbers: Tensor) -> Tensor:
    """Whole numbers → others in 0 … 2³¹-1 that look drawn at random: a multiplication that wraps, and its high bits."""
    mixed = numbers * 6364136223846793005 + 1442695040888963407
    return (mixed ^ (mixed >> 29)) * 3202034522624059733 >> 33 & 0x7FFFFFFF
