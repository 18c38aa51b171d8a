"""Documents → tokens on every core, in order: the result does not depend on the number of processes."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import numpy as np
import numpy.typing as npt

from farspan.data.readers import located
from farspan.data.sources import Source
from farspan.data.tokenizer import TextTokenizer
from farspan.data.writer import token_dtype
from farspan.pool import in_order

SPLITS = ("train", "valid")
CHUNK = 2**20
"""Characters handed to a process at once."""


@dataclass(frozen=True)
class Place:
    """How far the sources have been read: documents of the current source, and bytes of all of them."""

    source: int = 0
    documents: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Chunk:
    """Some documents in a row, and the place after them."""

    texts: list[str]
    place: Place


Tokens = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Documents' tokens one after the other (sum of lengths,), and the length of each (documents,)."""


def split_of(text: str, valid_share: float) -> str:
    """ "valid" for the given share of all texts, by a hash: equal texts always fall on the same side.

    >>> [split_of(text, 0.5) for text in ("a", "b", "a")]
    ['train', 'valid', 'train']
    """
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "valid" if number < valid_share * 2**64 else "train"


def chunks(sources: list[Source], field: str, after: Place) -> Iterator[Chunk]:
    """The documents after a place, about :data:`CHUNK` characters at a time; a chunk never spans two sources."""
    before = sum(source.bytes for source in sources[: after.source])
    for number, source in enumerate(sources):
        if number < after.source:
            continue
        skip = after.documents if number == after.source else 0
        texts: list[str] = []
        size, count, position = 0, 0, 0
        for count, (document, position) in enumerate(located(source, field), 1):
            if count <= skip:
                continue
            texts.append(document.text)
            size += len(document.text)
            if size >= CHUNK:
                yield Chunk(texts, Place(number, count, before + position))
                texts, size = [], 0
        if texts:
            yield Chunk(texts, Place(number, count, before + position))
        before += source.bytes


class Encoder:
    """Tokenizes chunks; travels to other processes."""

    def __init__(self, tokenizer: TextTokenizer, valid_share: float) -> None:
        self._tokenizer, self._valid_share = tokenizer, valid_share

    def __call__(self, texts: list[str]) -> dict[str, Tokens]:
        """Tokens by split, each document followed by the end token."""
        dtype = token_dtype(self._tokenizer.vocab_size)
        found: dict[str, list[npt.NDArray[Any]]] = {split: [] for split in SPLITS}
        for text in texts:
            ids = [*self._tokenizer.encode(text), self._tokenizer.end]
            found[split_of(text, self._valid_share)].append(np.array(ids, dtype))
        return {
            split: (np.concatenate([np.empty(0, dtype), *rows]), np.array([len(row) for row in rows], np.int64))
            for split, rows in found.items()
        }


def encoded(chunks: Iterable[Chunk], encoder: Encoder, workers: int) -> Iterator[tuple[Place, dict[str, Tokens]]]:
    """Encode chunks in `workers` processes and yield them in order; at most 2 × workers chunks are in memory."""
    given, again = tee(chunks)
    remedy = "run the same command again with fewer: it continues where it stopped"
    tokens = in_order(encoder, (chunk.texts for chunk in given), workers, remedy=remedy)
    for found, chunk in zip(tokens, again, strict=True):
        yield chunk.place, found
