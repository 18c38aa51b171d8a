"""Token shards as one long memory-mapped text."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farspan.data.sources import sha256
from farspan.data.writer import START
from farspan.errors import require, require_choice

MANIFEST = "manifest.json"
SCHEMA = 1
REMEDY = "delete the folder and run farspan data again"


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a folder of shards."""
    file = Path(path) / MANIFEST
    require(
        file.is_file(),
        f"data must be a folder with {MANIFEST}, got {os.fspath(path)!r}; make it with farspan data TEXT --out FOLDER",
    )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got {error}; {REMEDY}") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    require(schema == SCHEMA, f"{file} must have schema {SCHEMA}, got {schema!r}; {REMEDY}")
    return dict(manifest)


def verify(path: str | os.PathLike[str]) -> None:
    """Check size and sha256 of every shard; raises ValueError for the first that differs."""
    manifest = read_manifest(path)
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            _check_shard(Path(path), shard, np.dtype(manifest["dtype"]), hashes=True)


def _check_shard(folder: Path, shard: dict[str, Any], dtype: np.dtype[Any], hashes: bool) -> None:
    wanted = (
        (shard["file"], shard["tokens"] * dtype.itemsize, shard["sha256"]),
        (shard["index"], shard["documents"] * START.itemsize, shard["index_sha256"]),
    )
    for name, size, digest in wanted:
        file = folder / name
        require(file.is_file(), f"shard {file} must exist, got no such file; {REMEDY}")
        found = file.stat().st_size
        require(found == size, f"shard {file} must have {size} bytes, got {found}; {REMEDY}")
        if hashes:
            actual = sha256(file)
            require(actual == digest, f"shard {file} must have sha256 {digest}, got {actual}; {REMEDY}")


class Shards:
    """One split of prepared data: the concatenated tokens of its documents, each followed by the end token.

    Nothing is read before it is asked for; sizes are checked on opening, hashes with ``verify=True``.

    >>> from tempfile import TemporaryDirectory
    >>> from farspan.data import prepare
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("fox")
    ...     _ = prepare([f"{folder}/a.txt"], f"{folder}/tokens", valid_share=0, workers=1)
    ...     Shards(f"{folder}/tokens").document(0).tolist()  # three bytes, each one up, and the end token
    [103, 112, 121, 0]
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train", verify: bool = False) -> None:
        manifest = read_manifest(path)
        require_choice("split", split, manifest["splits"])
        self.path, self.split = Path(path), split
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.end: int = manifest["tokenizer"]["end"]
        self.tokenizer_fingerprint: str = manifest["tokenizer"]["fingerprint"]
        self._dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        shards = manifest["splits"][split]["shards"]
        require(
            bool(shards),
            f"split {split!r} must hold documents, got none in {os.fspath(path)!r}; prepare more documents"
            + (" or a larger valid_share" if split == "valid" else " or a smaller valid_share"),
        )
        for shard in shards:
            _check_shard(self.path, shard, self._dtype, hashes=verify)
        self._tokens = [np.memmap(self.path / shard["file"], self._dtype, "r") for shard in shards]
        self._starts = [np.memmap(self.path / shard["index"], START, "r") for shard in shards]
        self._token_ends = np.cumsum([shard["tokens"] for shard in shards])
        self._document_ends = np.cumsum([shard["documents"] for shard in shards])

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.path, self.split)  # another process maps the files again, instead of receiving a copy

    @property
    def tokens_total(self) -> int:
        """All tokens, end tokens included."""
        return int(self._token_ends[-1])

    @property
    def documents_total(self) -> int:
        """All documents."""
        return int(self._document_ends[-1])

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document (documents_total,), its end token included."""
        lengths = [
            np.diff(np.asarray(starts, np.int64), append=len(tokens))
            for starts, tokens in zip(self._starts, self._tokens, strict=True)
        ]
        return np.concatenate(lengths)

    def window(self, start: int, length: int) -> npt.NDArray[Any]:
        """Tokens start … start + length − 1 of the concatenated text (length,), a copy."""
        require(
            length >= 0 and 0 <= start <= self.tokens_total - length,
            f"window must lie within the {self.tokens_total} tokens of {self.path}, got start {start} and length "
            f"{length}; choose a shorter one or prepare more text",
        )
        result = np.empty(length, self._dtype)
        filled = 0
        shard = int(np.searchsorted(self._token_ends, start, side="right"))
        while filled < length:
            offset = start + filled - (int(self._token_ends[shard]) - len(self._tokens[shard]))
            piece = self._tokens[shard][offset : offset + length - filled]
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return result

    def document(self, i: int) -> npt.NDArray[Any]:
        """Tokens of document i (document_lengths[i],), its end token included; a view of the file."""
        require(
            0 <= i < self.documents_total,
            f"document must be between 0 and {self.documents_total - 1}, got {i}; see documents_total",
        )
        shard = int(np.searchsorted(self._document_ends, i, side="right"))
        starts, tokens = self._starts[shard], self._tokens[shard]
        row = i - (int(self._document_ends[shard]) - len(starts))
        stop = int(starts[row + 1]) if row + 1 < len(starts) else len(tokens)
        return tokens[int(starts[row]) : stop]
