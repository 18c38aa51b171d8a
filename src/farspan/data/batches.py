"""Training batches as a pure function of (seed, step, row): nothing to save, nothing that can drift."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farspan.data.shards import Shards
from farspan.errors import require

MakeRow = Callable[[np.random.Generator, int], npt.NDArray[Any]]
"""(random numbers, tokens wanted) → that many token ids."""


class Batches:
    """Random windows of token shards, mixed by weight.

    Args:
        sources: (shards, weight) pairs; weights need not sum to 1, e.g. ``[(books, 0.75), (code, 0.25)]``.
        length: tokens that a model reads; a row has one more, as inputs are ``row[:-1]`` and targets ``row[1:]``.
        batch_size: rows of one step, over all processes.
        passkey_share: probability that a row is ``passkey_document(random, length + 1)`` instead of text. All other
            rows stay what they are without it.

    Row r of step s is drawn from a Philox counter generator keyed by (seed, s, r), hence the same in a resumed run
    and for any number of processes.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from farspan.data import prepare
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("the quick brown fox")
    ...     _ = prepare([f"{folder}/a.txt"], f"{folder}/tokens", valid_share=0)
    ...     Batches([(Shards(f"{folder}/tokens"), 1.0)], length=8, batch_size=4, seed=0).batch(step=0).shape
    torch.Size([4, 9])
    """

    def __init__(
        self,
        sources: Sequence[tuple[Shards, float]],
        length: int,
        batch_size: int,
        seed: int,
        *,
        passkey_share: float = 0.0,
        passkey_document: MakeRow | None = None,
    ) -> None:
        require(
            len(sources) > 0 and all(0 < weight < math.inf for _, weight in sources),
            f"sources must be pairs of shards and a weight > 0, got weights {[weight for _, weight in sources]}",
        )
        first = sources[0][0]
        for shards, _ in sources:
            require(
                shards.tokenizer_fingerprint == first.tokenizer_fingerprint,
                f"tokenizer must be the same for all sources, got {first.tokenizer_fingerprint[:12]} in {first.path} "
                f"and {shards.tokenizer_fingerprint[:12]} in {shards.path}; prepare both with --tokenizer {first.path}",
            )
            require(
                length < shards.tokens_total,
                f"length must be below the tokens available, got {length} for {shards.tokens_total} in {shards.path}; "
                "choose a shorter length or prepare more text",
            )
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self._shards = [shards for shards, _ in sources]
        weights = np.array([weight for _, weight in sources], np.float64)
        self._bounds = np.cumsum(weights) / weights.sum()
        self._passkey_share, self._passkey_document = passkey_share, passkey_document

    def batch(self, step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
        """Return the rows of one process at one step (batch_size / world, length + 1), int64.

        Process `rank` of `world` gets rows rank · batch_size / world and the following.
        """
        valid = 0 <= rank < world and self.batch_size % world == 0
        require(valid, f"rank and world must fit batch_size {self.batch_size}, got {rank} of {world}")
        share = self.batch_size // world
        rows = [self.row(step, row) for row in range(rank * share, (rank + 1) * share)]
        return torch.from_numpy(np.stack(rows))

    def row(self, step: int, row: int) -> npt.NDArray[np.int64]:
        """Return row `row` of step `step` (length + 1,)."""
        # Step and row are the high words of the counter: no draw of one row can reach the numbers of another.
        # Raw numbers, since numpy may change how `Generator.integers` uses them from one release to the next.
        numbers = np.random.Philox(key=np.array([self.seed, 0], np.uint64), counter=[0, 0, row, step])
        special, which, where = (int(raw) for raw in numbers.random_raw(3))
        if special < self._passkey_share * 2**64:
            assert self._passkey_document is not None
            return self._passkey_document(np.random.Generator(numbers), self.length + 1).astype(np.int64)
        source = int(np.searchsorted(self._bounds, which / 2**64, side="right"))
        shards = self._shards[min(source, len(self._shards) - 1)]
        starts = shards.tokens_total - self.length
        return shards.window((where * starts) >> 64, self.length + 1).astype(np.int64)
