"""Corpora → token shards: parallel, in bounded memory, and resumable from any interruption."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from farspan.data.encoding import SPLITS, Encoder, Place, chunks, encoded, split_of
from farspan.data.readers import located
from farspan.data.shards import MANIFEST, SCHEMA, read_manifest
from farspan.data.sources import Source, describe, resolve
from farspan.data.tokenizer import BYTES_VOCABULARY, TextTokenizer, load_tokenizer, train_bpe
from farspan.data.writer import SplitWriter, token_dtype
from farspan.errors import require
from farspan.files import check_folder, room_for, write_whole

WORK = ".unfinished"
"""Folder below `out` for everything until the manifest is written."""
SAVE_SECONDS = 1.0
"""A killed run repeats at most about this much work."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of how many are done."""


def prepare(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: TextTokenizer | str | int = "bytes",
    field: str = "text",
    valid_share: float = 0.01,
    shard_tokens: int = 2**26,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Tokenize sources into memory-mapped shards; returns the manifest.

    sources: as :func:`farspan.data.documents` takes them.
    tokenizer: one, its name or path, or a vocabulary size: train a BPE of that size on the training documents.
    valid_share: share of the documents held out, by a hash of their text: equal texts are never in both splits.
    shard_tokens: a shard ends with the document that reaches this many tokens.
    workers: processes; None = one per core. The result is the same for any number.

    `out` gets manifest.json (last), tokenizer.json and, for each split, train-00000.bin (token ids, little-endian
    uint16 or uint32, every document followed by the end token) and train-00000.idx (uint64 start of each document).
    Interrupted at any moment, the same call continues; called again after the end, it returns at once.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("the quick brown fox")
    ...     prepare([f"{folder}/a.txt"], f"{folder}/tokens", valid_share=0, workers=1)["splits"]["train"]["tokens"]
    20
    """
    workers = workers if workers is not None else os.cpu_count() or 1
    _check(sources, valid_share, shard_tokens, workers)
    report = progress or (lambda what, done, total: None)
    out = Path(out)
    _check_folder(out)
    resolved = [resolve(source) for source in sources]
    if not isinstance(tokenizer, int):
        tokenizer = tokenizer if isinstance(tokenizer, TextTokenizer) else load_tokenizer(tokenizer)
    plan = {
        "sources": _describe(resolved, report),
        "tokenizer": f"bpe-{tokenizer}" if isinstance(tokenizer, int) else tokenizer.fingerprint,
        "field": field,
        "valid_share": valid_share,
        "shard_tokens": shard_tokens,
    }
    if (out / MANIFEST).exists():
        manifest = read_manifest(out)
        _same(manifest["plan"], plan, f"out must be a new folder, got {str(out)!r} with finished shards", "another out")
        shutil.rmtree(out / WORK, ignore_errors=True)
        return manifest
    with _working_in(out / WORK):
        state = _continue(out / WORK, plan)
        trained = _tokenizer(out / WORK, tokenizer, resolved, plan, report)
        if not state.get("complete"):
            state = _encode(out / WORK, state, resolved, trained, plan, workers, report)
        manifest = _publish(out, state, trained, plan)
    shutil.rmtree(out / WORK, ignore_errors=True)
    return manifest


def _check(sources: Sequence[str], valid_share: float, shard_tokens: int, workers: int) -> None:
    require(not isinstance(sources, str), f"sources must be a list, got {sources!r}; write [{sources!r}]")
    require(len(sources) > 0, "sources must name at least one text, got none; try 'stdlib'")
    require(0 <= valid_share <= 1, f"valid_share must be between 0 and 1, got {valid_share}; try 0.01")
    require(shard_tokens >= 1, f"shard_tokens must be ≥ 1, got {shard_tokens}; try {2**26}")
    require(workers >= 1, f"workers must be ≥ 1, got {workers}; leave it out for one per core")


def _describe(sources: list[Source], report: Progress) -> list[dict[str, Any]]:
    described, done, total = [], 0, sum(source.bytes for source in sources)
    for source in sources:
        report("hashing sources", done, total)
        described.append(describe(source))
        done += source.bytes
    report("hashing sources", done, total)
    return described


def _same(old: dict[str, Any], new: dict[str, Any], what: str, remedy: str) -> None:
    for key in new:
        require(old.get(key) == new[key], f"{what} of another {key} ({_short(old.get(key))}); choose {remedy}")


def _short(value: object) -> str:
    text = ", ".join(str(part["source"]) for part in value) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_folder(out: Path) -> None:
    """Refuse a folder that holds anything but tokens, done or not: a model's tokenizer would be replaced by theirs."""
    check_folder(out)
    if out.is_dir() and not any((out / name).exists() for name in (MANIFEST, WORK)):
        held = sorted(path.name for path in out.iterdir())
        require(
            not held,
            f"out must be a new or empty folder, or one of tokens, got {str(out)!r} with {', '.join(held[:3])}; "
            "choose another",
        )


@contextmanager
def _working_in(work: Path) -> Iterator[None]:
    """Hold the work folder for this process alone; a killed process lets go of it."""
    with room_for(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            import fcntl

            # Not flock: that would stay with the pool's processes for a moment after their parent was killed.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not a Unix system: nobody to ask
            pass
        except OSError as error:
            raise ValueError(
                f"out must not be in use, got {str(work.parent)!r}, which another process is filling; wait for it"
            ) from error
        yield
    finally:
        os.close(lock)


def _continue(work: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """The state an earlier call with the same plan left behind; a fresh one otherwise."""
    try:
        saved = json.loads((work / "state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        saved = None
    if saved is not None:
        remedy = f"another out, or delete {work} to start over"
        _same(saved["plan"], plan, f"out must be continued with what it was begun, got {str(work.parent)!r}", remedy)
        return dict(saved)
    for left in work.iterdir():  # nothing was tokenized under whatever plan this was
        if left.name != "lock":
            left.unlink()
    return {"plan": plan}


def _tokenizer(
    work: Path, tokenizer: TextTokenizer | int, sources: list[Source], plan: dict[str, Any], report: Progress
) -> TextTokenizer:
    """The tokenizer to use, trained on the training documents if it is given as a size; saved in the work folder."""
    if not isinstance(tokenizer, int):
        tokenizer.save(work)
        return tokenizer
    if (work / "tokenizer.json").exists():
        return load_tokenizer(work)
    texts = _training_texts(sources, plan, report) if tokenizer != BYTES_VOCABULARY else iter(())
    trained = train_bpe(texts, tokenizer, work)
    # From here on the plan must not change: the tokenizer belongs to these sources.
    _save(work, {"plan": plan})
    return trained


def _training_texts(sources: list[Source], plan: dict[str, Any], report: Progress) -> Iterator[str]:
    before, total = 0, sum(source.bytes for source in sources)
    for source in sources:
        for document, position in located(source, plan["field"]):
            report("training the tokenizer", before + position, total)
            if split_of(document.text, plan["valid_share"]) == "train":
                yield document.text
        before += source.bytes


def _encode(
    work: Path,
    state: dict[str, Any],
    sources: list[Source],
    tokenizer: TextTokenizer,
    plan: dict[str, Any],
    workers: int,
    report: Progress,
) -> dict[str, Any]:
    """Tokenize what is left and return the complete state."""
    dtype, kept = token_dtype(tokenizer.vocab_size), state.get("splits", {})
    writers = {name: SplitWriter(work, name, dtype, plan["shard_tokens"], kept.get(name)) for name in SPLITS}
    place, total = Place(**state.get("place", {})), sum(source.bytes for source in sources)
    report("tokenizing", place.bytes, total)

    def now(complete: bool) -> dict[str, Any]:
        splits = {name: writer.state() for name, writer in writers.items()}
        return {"plan": plan, "place": asdict(place), "splits": splits, "complete": complete}

    stream = encoded(chunks(sources, plan["field"], place), Encoder(tokenizer, plan["valid_share"]), workers)
    saved = time.monotonic()
    try:
        for place, tokens in stream:
            for name, (ids, lengths) in tokens.items():
                writers[name].append(ids, lengths)
            report("tokenizing", place.bytes, total)
            if time.monotonic() - saved >= SAVE_SECONDS:
                _save(work, now(False))
                saved = time.monotonic()
        for writer in writers.values():
            writer.finish_shard()
        state = now(True)
        _save(work, state)
        return state
    finally:
        for writer in writers.values():
            writer.close()


def _save(work: Path, state: dict[str, Any]) -> None:
    write_whole(work / "state.json", json.dumps(state))


def _publish(out: Path, state: dict[str, Any], tokenizer: TextTokenizer, plan: dict[str, Any]) -> dict[str, Any]:
    """Move the finished shards into place, then write the manifest: with it the data exist, without it they do not."""
    splits = {name: state["splits"][name]["finished"] for name in SPLITS}
    for shards in splits.values():
        for name in [name for shard in shards for name in (shard["file"], shard["index"])]:
            if (out / WORK / name).exists():  # else moved before an interruption
                os.replace(out / WORK / name, out / name)
    tokenizer.save(out)
    manifest = {
        "schema": SCHEMA,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end": tokenizer.end,
        },
        "plan": plan,
        "splits": {name: _totals(shards) for name, shards in splits.items()},
    }
    write_whole(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _totals(shards: list[dict[str, Any]]) -> dict[str, Any]:
    tokens, documents = (sum(shard[key] for shard in shards) for key in ("tokens", "documents"))
    return {"tokens": tokens, "documents": documents, "shards": shards}
