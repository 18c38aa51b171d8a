"""Short rows at far positions: what long texts ask of the angles, at the price of short ones.

The halves of a row are moved apart (positional skip-wise training, Zhu et al. 2023), so that a model meets distances up
to many times the row. Nothing else about the row changes, its number of keys neither.
"""

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.masking import LIMIT


def check_reach(reach: int, length: int, where: str) -> None:
    """Refuse a reach that :func:`skipped_positions` cannot draw."""
    require(
        reach >= 1 and reach.bit_count() == 1,
        f"reach of {where} must be a power of two, times the length of a row, got {reach}; try 16",
    )
    require(
        length * reach <= LIMIT,
        f"reach of {where} must keep positions within {LIMIT}, got {reach} times {length}; lower it",
    )
    require(
        reach == 1 or length % 2 == 0,
        f"length of {where} must be even where reach > 1, to be halved, got {length}; try {length + 1}",
    )


def skipped_positions(ids: Tensor, reach: int) -> Tensor | None:
    """Positions (b, n) for rows ids (b, n); None where reach is 1 and they simply count on.

    For a batch a length L is drawn from n, 2n, 4n … reach·n. With n itself positions count on. Else the second half of
    each row stands somewhere in L/2 … L-1, the first before it: in one batch of two there as well, in the others at
    0 … n/2-1, so that all distances below L are met. Positions L/2 … L-1 are those that `per_query` dynamic NTK gives
    frequencies of their own if the row is a power of two times the training length: then the runs of queries that share
    some are one of two sets, and blocks are compiled twice, not for each batch. The draws are a function of the tokens:
    there is no state to save, and no random number to share.

    >>> near, far = skipped_positions(torch.tensor([[5, 6, 7, 8]]), 4)[0].view(2, 2)
    >>> near.diff().item(), far.diff().item(), (far[0] - near[0]).item() >= 2, far[1].item() < 16
    (1, 1, True, True)
    """
    if reach == 1:
        return None
    n = ids.shape[1]
    half = n // 2
    rows = _scattered((ids * torch.arange(1, n + 1, device=ids.device)).sum(-1))
    batch = _scattered(rows.sum())
    length = n << (batch // 2 % reach.bit_length())
    free = (length // 2 - n).clamp(min=0)
    one, other = rows % (free + 1), _scattered(rows + 1) % (free + 1)
    beside = length // 2 + torch.minimum(one, other), length // 2 + half + torch.maximum(one, other)
    apart = torch.zeros_like(rows), length // 2 + rows % (free + half + 1)
    first, second = (torch.where(batch % 2 == 0, a, b)[:, None] for a, b in zip(beside, apart, strict=True))
    count = torch.arange(n, device=ids.device)
    moved = torch.cat((first + count[:half], second + count[:half]), dim=1)
    return torch.where(length == n, count, moved)


def _scattered(numbers: Tensor) -> Tensor:
    """Whole numbers → others in 0 … 2³¹-1 that look drawn at random: a multiplication that wraps, and its high bits."""
    mixed = numbers * 6364136223846793005 + 1442695040888963407
    return (mixed ^ (mixed >> 29)) * 3202034522624059733 >> 33 & 0x7FFFFFFF
