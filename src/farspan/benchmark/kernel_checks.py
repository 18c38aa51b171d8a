"""Alias until merged: a helper of tests/ops, which belongs into tests/ops/kernels.py."""

from typing import Any

import torch
from torch import Tensor

from farspan.ops.masking import AttentionMask


def static_mask(n: int, m: int, lengths: Tensor, starts: Tensor) -> AttentionMask:
    """Make the mask of n queries at the end of each row's keys, of which there are `lengths` (b) in m slots."""
    key = starts[:, None] + torch.arange(m, device=lengths.device)
    query = (starts + lengths)[:, None] + torch.arange(-n, 0, device=lengths.device)
    shared: dict[str, Any] = {"positions": (query, key), "lengths": lengths, "firsts": lambda: starts}
    return AttentionMask(n, m, lengths.device, first=None, aligned=False, **shared)
