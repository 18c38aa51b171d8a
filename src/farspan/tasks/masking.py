"""Masked language modelling (BERT): 15% of a text's tokens are asked, and mostly hidden."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farspan.data import Batches, Shards
from farspan.errors import require

ASKED = 0.15
MASKED, RANDOM = 0.8, 0.1
"""Of the tokens asked, 80% are replaced by the mask, 10% by any token, and 10% stay."""


class MaskedRows:
    """Random windows of token shards with 15% of their tokens asked.

    A row is n tokens as the model sees them, then n answers, 0 where nothing is asked. The end token, which must have
    id 0, is never asked and never put in. Which tokens are asked is a function of (seed, step, row), like the window.
    """

    def __init__(self, sources: list[tuple[Shards, float]], length: int, batch_size: int, seed: int, mask: int) -> None:
        require(length >= 2, f"length must be at least 2, got {length}; try 128")
        require(
            all(shards.end == 0 for shards, _ in sources),
            "the end token must have id 0 for masked rows, got another; train a tokenizer with farspan data",
        )
        self.text, self.mask, self.seed = Batches(sources, length - 1, batch_size, seed), mask, seed

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """Rows of one process at one step (batch_size / world, 2n), int64."""
        tokens = self.text.batch(step, rank, world).numpy()
        first = rank * len(tokens)
        rows = [self.hide(row, step, first + i) for i, row in enumerate(tokens)]
        return torch.from_numpy(np.stack(rows))

    def hide(self, tokens: NDArray[np.int64], step: int, row: int) -> NDArray[np.int64]:
        """tokens (n,) → tokens with some hidden, and answers (2n,)."""
        # Key [seed, 1]: the windows are drawn from [seed, 0].
        numbers = np.random.Philox(key=np.array([self.seed, 1], np.uint64), counter=[0, 0, row, step])
        which, how, other = (numbers.random_raw(3 * len(tokens)) / 2.0**64).reshape(3, -1)
        asked = (which < ASKED) & (tokens != 0)
        seen = np.where(asked & (how < MASKED), self.mask, tokens)
        any_token = 1 + (other * (self.mask - 1)).astype(np.int64)
        seen = np.where(asked & (how >= MASKED) & (how < MASKED + RANDOM), any_token, seen)
        return np.concatenate([seen, np.where(asked, tokens, 0)])
