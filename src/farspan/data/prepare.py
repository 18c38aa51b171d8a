"""Tokenize documents into shards: in bounded memory, and resumable at any moment."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farspan.data.shards import MANIFEST, SCHEMA, ShardWriter, read_manifest, token_dtype
from farspan.data.sources import Source, resolve
from farspan.data.tokenizer import TextTokenizer, grouped, load_tokenizer, train_bpe
from farspan.errors import require
from farspan.utils import LOCK, Progress, check_folder, check_unchanged, lock, read_settings, remove, silent, write_json

SPLITS = ("train", "valid")
STATE = ".unfinished.json"
"""What a killed run has done so far; the last file to go."""
CHUNK = 2**20
"""Characters tokenized at once: the threads of the tokenizer share them."""
Position = tuple[int, int]
"""A document: the source, and its number there."""
Show = Callable[[int, str], None]
"""Receive the bytes that have been read, and of what phase."""


def prepare(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: TextTokenizer | str | int = "bytes",
    field: str = "text",
    valid_share: float = 0.01,
    shard_tokens: int = 2**26,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Tokenize sources into memory-mapped shards (:mod:`farspan.data.shards`) and return the manifest.

    Args:
        sources: as :func:`farspan.data.documents` takes them.
        tokenizer: one, its name or path, or a vocabulary size: train a BPE of that size on the training documents.
        valid_share: share of the documents held out, by a hash of their text: equal texts are never in both splits.
        shard_tokens: a shard ends with the document that reaches this many tokens. Until then memory holds it.

    Interrupted at any moment, the same call continues after the last shard; called again after the end, it returns at
    once. Input that cannot be read leaves nothing behind, unless shards before it were written; a corrected source then
    needs a new `out`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("the quick brown fox")
    ...     prepare([f"{folder}/a.txt"], f"{folder}/tokens", valid_share=0)["splits"]["train"]["tokens"]
    20
    """
    require(not isinstance(sources, str), f"sources must be a list, got {sources!r}; write [{sources!r}]")
    require(len(sources) > 0, "sources must name at least one text, got none; try 'stdlib'")
    require(0 <= valid_share <= 1, f"valid_share must be between 0 and 1, got {valid_share}; try 0.01")
    require(shard_tokens >= 1, f"shard_tokens must be ≥ 1, got {shard_tokens}; try {2**26}")
    out = Path(out)
    check_folder(out, MANIFEST if (out / MANIFEST).is_file() else STATE, what="of the same tokens")
    resolved = [resolve(source) for source in sources]
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    described, total = list[dict[str, Any]](), sum(source.bytes for source in resolved) or None

    def show(done: int, phase: str) -> None:
        progress(done, total, phase, phase=phase)

    for source in resolved:
        show(sum(entry["bytes"] or 0 for entry in described), "hashing sources")
        described.append(source.describe())
    plan = {
        "sources": described,
        "tokenizer": f"bpe-{tokenizer}" if isinstance(tokenizer, int) else tokenizer.fingerprint,
        "field": field,
        "valid_share": valid_share,
        "shard_tokens": shard_tokens,
    }
    if manifest := _finished(out, plan):
        return manifest
    with lock(out):
        if manifest := _finished(out, plan):  # by another process, while this one hashed its sources
            return manifest
        state = read_settings(out / STATE, "out") if (out / STATE).is_file() else {"plan": plan}
        check_unchanged(state.get("plan"), plan, "folder")
        state.setdefault("written", {})
        try:
            write_json(out / STATE, state)
            if isinstance(tokenizer, TextTokenizer):
                tokenizer.save(out)
            elif (out / "tokenizer.json").exists():
                tokenizer = load_tokenizer(out)
            else:
                tokenizer = train_bpe(_training_texts(resolved, plan, show), tokenizer, out)
            return _tokenize(out, state, tokenizer, resolved, show)
        except ValueError:
            if not read_settings(out / STATE)["written"]:
                for path in {*out.iterdir()} - {out / LOCK}:
                    remove(path)
            raise


def split_of(text: str, valid_share: float) -> str:
    """Return "valid" for the given share of all texts, by a hash: equal texts always fall on the same side.

    >>> [split_of(text, 0.5) for text in ("a", "b", "a")]
    ['train', 'valid', 'train']
    """
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "valid" if number < valid_share * 2**64 else "train"


def _finished(out: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest if the folder is complete; raise if it was made from something else."""
    if not (out / MANIFEST).is_file():
        return None
    manifest = read_manifest(out)
    check_unchanged(manifest.get("plan"), plan, "folder")
    remove(out / STATE)
    return manifest


def _documents(sources: list[Source], field: str) -> Iterator[tuple[Position, int, str]]:
    """Yield the position of each document, the bytes of all sources read up to its end, and its text."""
    before = 0
    for number, source in enumerate(sources):
        for count, document in enumerate(source.documents(field), 1):
            yield (number, count), before + document.read, document.text
        before += source.bytes


def _training_texts(sources: list[Source], plan: dict[str, Any], show: Show) -> Iterator[str]:
    for _, done, text in _documents(sources, plan["field"]):
        show(done, "training the tokenizer")
        if split_of(text, plan["valid_share"]) == "train":
            yield text


def _tokenize(
    out: Path, state: dict[str, Any], tokenizer: TextTokenizer, sources: list[Source], show: Show
) -> dict[str, Any]:
    """Write shards and, after each, how far they go; at the end the manifest, with which the data exist."""
    plan, dtype = state["plan"], token_dtype(tokenizer.vocab_size)
    writers = {
        name: ShardWriter(out, name, dtype, plan["shard_tokens"], state["written"].get(name, {})) for name in SPLITS
    }

    def missing() -> Iterator[tuple[tuple[ShardWriter, Position, int], str]]:
        for position, done, text in _documents(sources, plan["field"]):
            writer = writers[split_of(text, plan["valid_share"])]
            if position > writer.position:
                yield (writer, position, done), text

    for chunk in grouped(missing(), CHUNK):
        for ((writer, position, _), _), ids in zip(chunk, tokenizer.ids([text for _, text in chunk]), strict=True):
            if writer.append(np.append(ids, tokenizer.end), position):
                state["written"] = {name: writer.state() for name, writer in writers.items()}
                write_json(out / STATE, state)
        show(chunk[-1][0][2], "tokenizing")
    for writer in writers.values():
        writer.finish()
    manifest = {
        "schema": SCHEMA,
        "dtype": dtype.name,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end},
        "plan": plan,
        "splits": {
            name: {key: sum(shard[key] for shard in writer.shards) for key in ("tokens", "documents")}
            | {"shards": writer.shards}
            for name, writer in writers.items()
        },
    }
    write_json(out / MANIFEST, manifest)
    remove(out / STATE)
    return manifest
