"""Tokenize documents into shards: in parallel, in bounded memory, and resumable at any moment."""

import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farspan.data.shards import MANIFEST, SCHEMA, ShardWriter, read_manifest, token_dtype
from farspan.data.sources import Source, located, resolve
from farspan.data.tokenizer import TextTokenizer, check_vocabulary, load_tokenizer, train_bpe
from farspan.errors import require
from farspan.utils import Progress, check_folder, check_unchanged, lock, read_settings, remove, silent, write_json

SPLITS = ("train", "valid")
STATE = ".unfinished.json"
"""What a killed run has done so far; the last file to go."""
SAVE_SECONDS = 1.0
"""A killed run repeats at most about this much work."""
CHUNK = 2**20
"""Characters that a thread tokenizes at once."""
Tokens = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Concatenated tokens of documents (sum of lengths,), and the length of each (documents,)."""


def prepare(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: TextTokenizer | str | int = "bytes",
    field: str = "text",
    valid_share: float = 0.01,
    shard_tokens: int = 2**26,
    workers: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Tokenize sources into memory-mapped shards (:mod:`farspan.data.shards`) and return the manifest.

    Args:
        sources: as :func:`farspan.data.documents` takes them.
        tokenizer: one, its name or path, or a vocabulary size: train a BPE of that size on the training documents.
        valid_share: share of the documents held out, by a hash of their text: equal texts are never in both splits.
        shard_tokens: a shard ends with the document that reaches this many tokens.
        workers: threads that tokenize; None = one per core. The result is the same for any number.

    Interrupted at any moment, the same call continues; called again after the end, it returns at once. Input that
    cannot be read leaves nothing behind.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("the quick brown fox")
    ...     prepare([f"{folder}/a.txt"], f"{folder}/tokens", valid_share=0, workers=1)["splits"]["train"]["tokens"]
    20
    """
    require(not isinstance(sources, str), f"sources must be a list, got {sources!r}; write [{sources!r}]")
    require(len(sources) > 0, "sources must name at least one text, got none; try 'stdlib'")
    require(0 <= valid_share <= 1, f"valid_share must be between 0 and 1, got {valid_share}; try 0.01")
    require(shard_tokens >= 1, f"shard_tokens must be ≥ 1, got {shard_tokens}; try {2**26}")
    require(workers is None or workers >= 1, f"workers must be ≥ 1, got {workers}; leave it out for one per core")
    out, cores = Path(out), os.cpu_count() or 1
    finished = (out / MANIFEST).is_file()
    check_folder(out, MANIFEST if finished else STATE, what="of the same tokens")
    resolved = [resolve(source) for source in sources]
    if isinstance(tokenizer, int):
        check_vocabulary(tokenizer)
    else:
        tokenizer = tokenizer if isinstance(tokenizer, TextTokenizer) else load_tokenizer(tokenizer)
    plan = {
        "sources": _describe(resolved, progress),
        "tokenizer": f"bpe-{tokenizer}" if isinstance(tokenizer, int) else tokenizer.fingerprint,
        "field": field,
        "valid_share": valid_share,
        "shard_tokens": shard_tokens,
    }
    if finished:
        manifest = read_manifest(out)
        check_unchanged(manifest.get("plan"), plan, "folder")
        remove(out / STATE)
        return manifest
    job = _Job(out, resolved, plan, progress)
    return job.run(tokenizer, min(workers or cores, cores))


def _describe(sources: list[Source], progress: Progress) -> list[dict[str, Any]]:
    described, done, total = list[dict[str, Any]](), 0, sum(source.bytes for source in sources)
    for source in sources:
        progress(done, total or None, "hashing sources", phase="hashing sources")
        described.append(source.describe())
        done += source.bytes
    return described


def split_of(text: str, valid_share: float) -> str:
    """Return "valid" for the given share of all texts, by a hash: equal texts always fall on the same side.

    >>> [split_of(text, 0.5) for text in ("a", "b", "a")]
    ['train', 'valid', 'train']
    """
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "valid" if number < valid_share * 2**64 else "train"


@dataclass(frozen=True)
class Place:
    """How far the sources have been read: documents of the current source, and bytes of all of them."""

    source: int = 0
    documents: int = 0
    bytes: int = 0


class _Job:
    """Fill one folder of shards."""

    def __init__(self, out: Path, sources: list[Source], plan: dict[str, Any], progress: Progress) -> None:
        self.out, self.sources, self.plan, self.progress = out, sources, plan, progress
        self.total = sum(source.bytes for source in sources) or None

    def run(self, tokenizer: TextTokenizer | int, workers: int) -> dict[str, Any]:
        missing = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        with lock(self.out):
            if (self.out / MANIFEST).is_file():  # by another process, while this one hashed its sources
                manifest = read_manifest(self.out)
                check_unchanged(manifest.get("plan"), self.plan, "folder")
                return manifest
            begun = (self.out / STATE).is_file()
            state = read_settings(self.out / STATE, "out") if begun else {"plan": self.plan}
            check_unchanged(state.get("plan"), self.plan, "folder")
            try:
                if not begun:
                    write_json(self.out / STATE, state)
                trained = self._tokenizer(tokenizer)
                splits = self._tokenize(trained, state, workers)
                return self._finish(trained, splits)
            except (ValueError, OSError) as error:
                # A mended input has another plan, so nothing of this folder could be continued.
                fresh = not begun and "splits" not in read_settings(self.out / STATE)
                if fresh or isinstance(error, ValueError):
                    for path in [*self.out.iterdir()]:
                        remove(path)
                    for folder in missing:
                        folder.rmdir()
                raise

    def _tokenizer(self, tokenizer: TextTokenizer | int) -> TextTokenizer:
        """Return the tokenizer to use, saved in the folder; train it if it is given as a size."""
        if isinstance(tokenizer, int):
            if (self.out / "tokenizer.json").exists():
                return load_tokenizer(self.out)
            return train_bpe(self._training_texts(), tokenizer, self.out)
        tokenizer.save(self.out)
        return tokenizer

    def _training_texts(self) -> Iterator[str]:
        for place, text in self._documents(Place()):
            self.progress(place.bytes, self.total, "training the tokenizer", phase="training the tokenizer")
            if split_of(text, self.plan["valid_share"]) == "train":
                yield text

    def _documents(self, after: Place) -> Iterator[tuple[Place, str]]:
        """Yield the text of each document after a place, and the place after it."""
        before = 0
        for number, source in enumerate(self.sources):
            if number >= after.source:
                skip = after.documents if number == after.source else 0
                for count, (document, position) in enumerate(located(source, self.plan["field"]), 1):
                    if count > skip:
                        yield Place(number, count, before + position), document.text
            before += source.bytes

    def _tokenize(self, tokenizer: TextTokenizer, state: dict[str, Any], workers: int) -> dict[str, Any]:
        """Tokenize what is left and return the finished shards of each split."""
        dtype, kept = token_dtype(tokenizer.vocab_size), state.get("splits", {})
        size: int = self.plan["shard_tokens"]
        writers = {name: ShardWriter(self.out, name, dtype, size, kept.get(name, {})) for name in SPLITS}
        begin, saved = Place(**state.get("place", {})), time.monotonic()
        try:
            for place, tokens in self._encoded(begin, tokenizer, workers):
                for name, writer in writers.items():
                    writer.append(*tokens[name])
                self.progress(place.bytes, self.total, "tokenizing", phase="tokenizing")
                if time.monotonic() - saved >= SAVE_SECONDS:
                    splits = {name: writer.state() for name, writer in writers.items()}
                    write_json(self.out / STATE, {"plan": self.plan, "place": asdict(place), "splits": splits})
                    saved = time.monotonic()
            for writer in writers.values():
                writer.finish()
        finally:
            for writer in writers.values():
                writer.close()
        return {name: writer.finished for name, writer in writers.items()}

    def _encoded(
        self, after: Place, tokenizer: TextTokenizer, workers: int
    ) -> Iterator[tuple[Place, dict[str, Tokens]]]:
        """Tokenize chunks in threads and yield them in order; at most 2 × workers chunks are in memory."""
        waiting = deque[tuple[Place, Future[dict[str, Tokens]]]]()
        pool = ThreadPoolExecutor(workers)
        try:
            for place, texts in self._chunks(after):
                waiting.append((place, pool.submit(encode, texts, tokenizer, self.plan["valid_share"])))
                if len(waiting) == 2 * workers:
                    place, tokens = waiting.popleft()
                    yield place, tokens.result()
            for place, tokens in waiting:
                yield place, tokens.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _chunks(self, after: Place) -> Iterator[tuple[Place, list[str]]]:
        """Yield the documents after a place, about CHUNK characters at a time, and the place after them."""
        texts, size, place = list[str](), 0, after
        for place, text in self._documents(after):
            texts.append(text)
            size += len(text)
            if size >= CHUNK:
                yield place, texts
                texts, size = [], 0
        if texts:
            yield place, texts

    def _finish(self, tokenizer: TextTokenizer, splits: dict[str, Any]) -> dict[str, Any]:
        """Write the manifest: with it the data exist, without it they do not."""
        identity = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end}
        manifest = {
            "schema": SCHEMA,
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "tokenizer": identity,
            "plan": self.plan,
            "splits": {
                name: {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents")} | {"shards": shards}
                for name, shards in splits.items()
            },
        }
        write_json(self.out / MANIFEST, manifest)
        remove(self.out / STATE)
        return manifest


def encode(texts: list[str], tokenizer: TextTokenizer, valid_share: float) -> dict[str, Tokens]:
    """Tokenize documents by split, each followed by the end token."""
    dtype = token_dtype(tokenizer.vocab_size)
    found: dict[str, list[npt.NDArray[Any]]] = {split: [] for split in SPLITS}
    for text in texts:
        ids = np.append(tokenizer.ids(text), tokenizer.end)
        found[split_of(text, valid_share)].append(ids.astype(dtype))
    return {
        split: (np.concatenate([np.empty(0, dtype), *rows]), np.array([len(row) for row in rows], np.int64))
        for split, rows in found.items()
    }
