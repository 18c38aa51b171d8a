"""Multi-query associative recall (Arora et al. 2023): the honest hard case for a memory of constant size.

A sequence begins with key-value pairs. Later each key is asked once, at a place drawn from a power law, and there the
model must say its value. What stands elsewhere is filler, which may happen to be a key too: labels tell them apart.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.errors import require

IGNORED = -100
"""The label where nothing is asked, as in torch's cross entropy."""


class Recall(NamedTuple):
    """Token ids and labels, both (examples, length): where a key is asked, the label at its own place is its value.

    The value does not follow in the text. A loss that shifts labels itself, as causal models of transformers do, must
    be given them one place later.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class MQAR:
    """The task; defaults are the published setting at length 64 with 4 pairs.

    >>> task = MQAR(length=16, pairs=2, vocabulary=20)
    >>> tokens, labels = task.draw(1, seed=0)
    >>> int((labels != IGNORED).sum())
    2
    """

    length: int = 64
    pairs: int = 4
    vocabulary: int = 8192
    """Keys are 1 … half-1, values half … end."""
    power: float = 0.01
    """Gaps g = 1, 2, … have weight g^(power-1): the smaller, the sooner most keys come back."""
    random_filler: bool = True
    """Fill the other places with random tokens, keys and values among them, instead of zeros."""

    def __post_init__(self) -> None:
        half = self.vocabulary // 2
        require(
            1 <= self.pairs < half,
            f"pairs must be between 1 and the {half - 1} keys of a vocabulary of {self.vocabulary}, got {self.pairs}",
        )
        require(
            self.length % 2 == 0 and 4 * self.pairs <= self.length,
            f"length must be even and at least 4 × pairs = {4 * self.pairs}, got {self.length}; "
            "each pair is shown and asked",
        )

    def draw(self, examples: int, seed: int) -> Recall:
        """`examples` sequences, the same for the same seed."""
        random, half = np.random.default_rng(seed), self.vocabulary // 2
        shown, space = 2 * self.pairs, (self.length - 2 * self.pairs) // 2
        weights = np.arange(1, space + 1, dtype=np.float64) ** (self.power - 1)
        weights /= weights.sum()
        tokens = np.zeros((examples, self.length), dtype=np.int64)
        labels = np.full_like(tokens, IGNORED)
        for row in range(examples):
            keys = random.choice(np.arange(1, half), self.pairs, replace=False)
            values = random.choice(np.arange(half, self.vocabulary), self.pairs, replace=False)
            asked = shown + 2 * random.choice(space, self.pairs, replace=False, p=weights)
            tokens[row, 0:shown:2], tokens[row, 1:shown:2] = keys, values
            tokens[row, asked], labels[row, asked] = keys, values
        if self.random_filler:
            empty = tokens == 0
            tokens[empty] = random.integers(self.vocabulary, size=int(empty.sum()))
        return Recall(tokens, labels)
