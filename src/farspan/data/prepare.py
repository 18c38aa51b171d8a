"""Tokenize documents into shards: in parallel, in bounded memory, and resumable at any moment."""

import hashlib
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
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
    cannot be read leaves nothing behind, unless tokens before it were saved: correct it, and the same call continues.

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
    check_folder(out, MANIFEST if (out / MANIFEST).is_file() else STATE, what="of the same tokens")
    resolved = [resolve(source) for source in sources]
    if isinstance(tokenizer, int):
        check_vocabulary(tokenizer)
    elif isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    described, done, total = list[dict[str, Any]](), 0, sum(source.bytes for source in resolved) or None
    for source in resolved:
        progress(done, total, "hashing sources", phase="hashing sources")
        described.append(source.describe())
        done += source.bytes
    plan = {
        "sources": described,
        "tokenizer": f"bpe-{tokenizer}" if isinstance(tokenizer, int) else tokenizer.fingerprint,
        "field": field,
        "valid_share": valid_share,
        "shard_tokens": shard_tokens,
    }
    job = _Job(out, resolved, plan, lambda done, phase: progress(done, total, phase, phase=phase))
    return job.finished() or job.run(tokenizer, min(workers or cores, cores))


def split_of(text: str, valid_share: float) -> str:
    """Return "valid" for the given share of all texts, by a hash: equal texts always fall on the same side.

    >>> [split_of(text, 0.5) for text in ("a", "b", "a")]
    ['train', 'valid', 'train']
    """
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "valid" if number < valid_share * 2**64 else "train"


@dataclass(frozen=True)
class Position:
    """How far the sources have been read."""

    source: int = 0
    documents: int = 0
    """Of this source."""
    bytes: int = field(default=0, compare=False)
    """Of all sources."""
    checksum: int = 0
    """CRC-32 of all texts."""


def _position(state: dict[str, Any]) -> Position:
    return Position(**state.get("position", state.get("place", {})))  # "place": version 0.1


@dataclass(frozen=True)
class _Job:
    """Fill one folder of shards."""

    out: Path
    sources: list[Source]
    plan: dict[str, Any]
    show: Callable[[int, str], None]
    """Report the bytes read in a phase."""

    def finished(self) -> dict[str, Any] | None:
        """Return the manifest if the folder is complete; raise if it was made from something else."""
        if not (self.out / MANIFEST).is_file():
            return None
        manifest = read_manifest(self.out)
        check_unchanged(manifest.get("plan"), self.plan, "folder")
        remove(self.out / STATE)
        return manifest

    def run(self, tokenizer: TextTokenizer | int, workers: int) -> dict[str, Any]:
        missing = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        with lock(self.out):
            if manifest := self.finished():  # by another process, while this one hashed its sources
                return manifest
            state, begun = self._continued(), (self.out / STATE).is_file()
            try:
                if not begun:
                    write_json(self.out / STATE, state)
                trained = self._tokenizer(tokenizer)
                return self._finish(trained, self._tokenize(trained, state, workers))
            except (ValueError, OSError) as error:
                saved = (self.out / STATE).is_file() and "splits" in read_settings(self.out / STATE)
                if not saved and (isinstance(error, ValueError) or not begun):
                    for path in [*self.out.iterdir()]:
                        remove(path)
                    for folder in missing:
                        folder.rmdir()
                elif isinstance(error, ValueError):  # so tokens were saved
                    raise ValueError(f"{error}. The same command then continues; tokens so far are kept") from error
                raise

    def _continued(self) -> dict[str, Any]:
        """Return how far an earlier run came; raise if it had another plan."""
        if not (self.out / STATE).is_file():
            return {"plan": self.plan}
        state = read_settings(self.out / STATE, "out")
        before = state.get("plan") or {}
        if "splits" in state and before != self.plan and before | {"sources": self.plan["sources"]} == self.plan:
            # A source may be corrected or extended, if it still begins with the documents that were read. If the
            # tokenizer was trained on the sources, it would be another one now.
            # A vocabulary of 257 holds the bytes alone, and none is trained.
            trained = self.plan["tokenizer"].startswith("bpe-") and self.plan["tokenizer"] != "bpe-257"
            read = _position(state)
            if not trained and any(position == read for position, _ in self._documents(Position())):
                return state
        check_unchanged(before, self.plan, "folder")
        return state

    def _tokenizer(self, tokenizer: TextTokenizer | int) -> TextTokenizer:
        """Return the tokenizer to use, saved in the folder; train it if it is given as a size."""
        if isinstance(tokenizer, int):
            if (self.out / "tokenizer.json").exists():
                return load_tokenizer(self.out)
            return train_bpe(self._training_texts(), tokenizer, self.out)
        tokenizer.save(self.out)
        return tokenizer

    def _training_texts(self) -> Iterator[str]:
        for position, text in self._documents(Position()):
            self.show(position.bytes, "training the tokenizer")
            if split_of(text, self.plan["valid_share"]) == "train":
                yield text

    def _documents(self, after: Position) -> Iterator[tuple[Position, str]]:
        """Yield the text of each document after a position, and the position after it."""
        before, checksum = 0, after.checksum
        for number, source in enumerate(self.sources):
            if number >= after.source:
                skip = after.documents if number == after.source else 0
                for count, (document, position) in enumerate(located(source, self.plan["field"]), 1):
                    if count > skip:
                        checksum = zlib.crc32(document.text.encode() + b"\0", checksum)
                        yield Position(number, count, before + position, checksum), document.text
            before += source.bytes

    def _tokenize(self, tokenizer: TextTokenizer, state: dict[str, Any], workers: int) -> dict[str, Any]:
        """Tokenize what is left and return the finished shards of each split."""
        dtype, kept = token_dtype(tokenizer.vocab_size), state.get("splits", {})
        size: int = self.plan["shard_tokens"]
        writers = {name: ShardWriter(self.out, name, dtype, size, kept.get(name, {})) for name in SPLITS}
        saved = time.monotonic()
        try:
            for position, tokens in self._encoded(_position(state), tokenizer, workers):
                for name, writer in writers.items():
                    writer.append(*tokens[name])
                self.show(position.bytes, "tokenizing")
                if time.monotonic() - saved >= SAVE_SECONDS:
                    splits = {name: writer.state() for name, writer in writers.items()}
                    state = {"plan": self.plan, "position": asdict(position), "splits": splits}
                    write_json(self.out / STATE, state)
                    saved = time.monotonic()
            for writer in writers.values():
                writer.finish()
        finally:
            for writer in writers.values():
                writer.close()
        return {name: writer.finished for name, writer in writers.items()}

    def _encoded(
        self, after: Position, tokenizer: TextTokenizer, workers: int
    ) -> Iterator[tuple[Position, dict[str, Tokens]]]:
        """Tokenize chunks in threads and yield them in order; at most 2 × workers chunks are in memory."""
        waiting = deque[tuple[Position, Future[dict[str, Tokens]]]]()
        pool = ThreadPoolExecutor(workers)
        try:
            for position, texts in self._chunks(after):
                waiting.append((position, pool.submit(encode, texts, tokenizer, self.plan["valid_share"])))
                if len(waiting) == 2 * workers:
                    position, tokens = waiting.popleft()
                    yield position, tokens.result()
            for position, tokens in waiting:
                yield position, tokens.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _chunks(self, after: Position) -> Iterator[tuple[Position, list[str]]]:
        """Yield the documents after a position, about CHUNK characters at a time, and the position after them."""
        texts, size, position = list[str](), 0, after
        for position, text in self._documents(after):
            texts.append(text)
            size += len(text)
            if size >= CHUNK:
                yield position, texts
                texts, size = [], 0
        if texts:
            yield position, texts

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
