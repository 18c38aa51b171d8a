"""Examples as tables, one row each: tokens, padded, and then what is asked.

A classification row ends with its label. A recall row has, after its tokens, as many answers: 0 where nothing is
asked. The same settings always give the same tables; no example is in two splits. Tables are mapped into memory and
shuffled without a state.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farspan.data import Batches, Shards
from farspan.data.sources import json_lines
from farspan.errors import require
from farspan.utils import Progress, atomic_path, in_phase, lock

SPLITS = ("train", "valid", "test")
PIECE = 64
"""Examples that a generator makes at once."""
TRIES = 10
"""Times as many examples as wanted are made before a generator is said to have too few."""
ASKED = 0.15
MASKED, RANDOM = 0.8, 0.1
"""Of the tokens that masked language modelling asks for, 80% are replaced by the mask, 10% by any token, 10% stay."""
Tables = Iterator[tuple[str, NDArray[Any]]]
"""Splits and their rows."""


def make_tables(folder: Path, tables: Callable[[], Tables]) -> None:
    """Write the tables of all splits, rows (examples, width) of numbers below 65,536, unless they are there."""
    with lock(folder, wait=True):
        if not all((folder / f"{split}.npy").is_file() for split in SPLITS):
            for split, rows in tables():
                require(rows.max() < 2**16, f"{folder.name} must have tokens below 65536, got {rows.max()}")
                with atomic_path(folder / f"{split}.npy") as part, part.open("wb") as file:
                    np.save(file, rows.astype(np.uint16))


class TableRows:
    """Draw batches for the training loop from a table, in another order in each epoch.

    Row r of step s is number s · batch_size + r of an endless sequence of epochs; the order of epoch e is a function of
    (seed, e). So a resumed run and any number of processes see the same rows.
    """

    def __init__(self, path: Path, batch_size: int, seed: int) -> None:
        self.table = np.load(path, mmap_mode="r")
        self.batch_size, self.seed = batch_size, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """Return the rows of one process at one step (batch_size / world, width), int64."""
        share = self.batch_size // world
        first = step * self.batch_size + rank * share
        picked = [self._index(number) for number in range(first, first + share)]
        return torch.from_numpy(self.table[picked].astype(np.int64))

    def _index(self, number: int) -> int:
        epoch, within = divmod(number, len(self.table))
        if epoch != self._epoch:
            # Raw numbers: what numpy's own shuffle makes of them may change from one release to the next.
            raw = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(len(self.table))
            self._epoch, self._order = epoch, np.argsort(raw, kind="stable")
        return int(self._order[within])


class MaskedRows:
    """Draw random windows of token shards with 15% of their tokens asked, as BERT does.

    A row is n tokens as the model sees them, then n answers, 0 where nothing is asked. The end token, which must have
    id 0, is never asked and never put in. Which tokens are asked is a function of (seed, step, row), like the window.
    """

    def __init__(self, sources: list[tuple[Shards, float]], length: int, batch_size: int, seed: int, mask: int) -> None:
        require(
            all(shards.end == 0 for shards, _ in sources),
            "the end token must have id 0 for masked rows, got another; train a tokenizer with farspan data",
        )
        self.text, self.mask, self.seed = Batches(sources, length - 1, batch_size, seed), mask, seed

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """Return the rows of one process at one step (batch_size / world, 2n), int64."""
        tokens = self.text.batch(step, rank, world).numpy()
        first = rank * len(tokens)
        rows = [self.hide(row, step, first + i) for i, row in enumerate(tokens)]
        return torch.from_numpy(np.stack(rows))

    def hide(self, tokens: NDArray[np.int64], step: int, row: int) -> NDArray[np.int64]:
        """Hide some of the tokens (n,); return them with the answers (2n,)."""
        # Key [seed, 1]: the windows are drawn from [seed, 0].
        numbers = np.random.Philox(key=np.array([self.seed, 1], np.uint64), counter=[0, 0, row, step])
        which, how, other = (numbers.random_raw(3 * len(tokens)) / 2.0**64).reshape(3, -1)
        asked = (which < ASKED) & (tokens != 0)
        seen = np.where(asked & (how < MASKED), self.mask, tokens)
        any_token = 1 + (other * (self.mask - 1)).astype(np.int64)
        seen = np.where(asked & (how >= MASKED) & (how < MASKED + RANDOM), any_token, seen)
        return np.concatenate([seen, np.where(asked, tokens, 0)])


# Generated examples


def generate(piece: Callable[[int, int], NDArray[np.int64]], examples: dict[str, int], progress: Progress) -> Tables:
    """Make tables of distinct examples; the test set first, so that it does not depend on how much is trained on.

    Args:
        piece: (split, number) → PIECE rows.
        examples: rows wanted, by split.
    """
    seen: set[bytes] = set()
    for split in reversed(SPLITS):
        kept, wanted = list[NDArray[Any]](), examples[split]
        told = in_phase(progress, f"making {split} examples")
        for number in range(TRIES * (1 + wanted // PIECE)):
            for row in piece(SPLITS.index(split), number).astype(np.uint16):
                if (key := row.tobytes()) not in seen and len(kept) < wanted:
                    seen.add(key)
                    kept.append(row)
            told(len(kept), wanted)
            if len(kept) == wanted:
                break
        require(
            len(kept) == wanted,
            f"the generator must have {sum(examples.values())} different examples, got {len(seen)}; ask for fewer",
        )
        yield split, np.stack(kept)


# Labelled texts


def labelled_texts(path: str) -> Iterator[tuple[str, int]]:
    """Read lines ``{"text": …, "label": 0, 1, …}`` of a JSON-lines file, plain or compressed."""
    for where, record in json_lines(path, "--labelled"):
        text, label = record.get("text"), record.get("label")
        require(
            isinstance(text, str) and text != "" and type(label) is int and label >= 0,
            f"{where} must have a text and a label 0, 1, …, got {str(text)[:9]!r} and {label!r}; repair it",
        )
        yield text, label  # type: ignore[misc]


def chosen_texts(labelled: tuple[str, ...], examples: dict[str, int]) -> dict[str, list[tuple[str, int]]]:
    """Choose so many (text, label) of each split's file, no text in two splits.

    Files are often sorted by label, so texts are ordered by their hash before they are cut: the choice depends on the
    texts alone, and has the labels in about the file's shares.
    """
    chosen, seen = dict[str, list[tuple[str, int]]](), set[str]()
    for split, path in reversed(list(zip(SPLITS, labelled, strict=True))):
        fresh = [(text, label) for text, label in dict(labelled_texts(path)).items() if text not in seen]
        seen |= {text for text, _ in fresh}
        fresh.sort(key=lambda pair: hashlib.sha256(pair[0].encode("utf-8", "surrogatepass")).digest())
        chosen[split] = fresh[: examples[split]]
        require(bool(fresh), f"{path} must hold texts that no other split has, got none; name another file")
    labels = {split: sorted({label for _, label in rows}) for split, rows in chosen.items()}
    require(
        len(labels["train"]) >= 2 and all(found == labels["train"] for found in labels.values()),
        "--labelled must have the same two labels or more in training, choices and test, got "
        f"{labels['train']}, {labels['valid']} and {labels['test']}; take more examples or name other files",
    )
    return chosen
