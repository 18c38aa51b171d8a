"""Token shards: the file format, its writer, and one split of it as one long memory-mapped sequence.

A folder holds manifest.json (written last), tokenizer.json and, per split, train-00000.bin (token ids, little-endian
uint16 or uint32, every document followed by the end token) and train-00000.idx (uint64 start of each document).
"""

import os
from array import array
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farspan.data.tokenizer import load_tokenizer
from farspan.errors import require, require_choice
from farspan.utils import atomic_path, read_settings, sha256

MANIFEST = "manifest.json"
SCHEMA = 1
START = np.dtype("<u8")
REMEDY = "delete the folder and run farspan data again"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest of uint16 and uint32, little-endian, that holds every id.

    >>> token_dtype(65536).name, token_dtype(65537).name
    ('uint16', 'uint32')
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the manifest of a folder of shards."""
    file = Path(path) / MANIFEST
    require(
        file.is_file(),
        f"data must be a folder with {MANIFEST}, got {os.fspath(path)!r}; make it with farspan data TEXT --out FOLDER",
    )
    manifest = read_settings(file, "data")
    schema = manifest.get("schema")
    require(schema == SCHEMA, f"{file} must have schema {SCHEMA}, got {schema!r}; {REMEDY}")
    return manifest


class Shards:
    """One split of prepared data: the concatenated tokens of its documents, each followed by the end token.

    Opening checks sizes, and with ``verify=True``, as training does, checksums: about a second per GB, once per
    process as long as a file does not change. Tokens are read when they are asked for.

    >>> from tempfile import TemporaryDirectory
    >>> from farspan.data import prepare
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("fox")
    ...     _ = prepare([f"{folder}/a.txt"], f"{folder}/tokens", valid_share=0)
    ...     Shards(f"{folder}/tokens").document(0).tolist()  # three bytes, each one up, and the end token
    [103, 112, 121, 0]
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train", verify: bool = False) -> None:
        self.path = Path(path)
        manifest = read_manifest(path)
        try:
            require_choice("split", split, manifest["splits"])
            self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
            self.end: int = manifest["tokenizer"]["end"]
            self.tokenizer_fingerprint: str = manifest["tokenizer"]["fingerprint"]
            self._dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
            if verify:
                self._verify_tokenizer()
            shards = manifest["splits"][split]["shards"]
            require(
                bool(shards),
                f"split {split!r} must hold documents, got none in {os.fspath(path)!r}; prepare more documents"
                + (" or a larger valid_share" if split == "valid" else " or a smaller valid_share"),
            )
            self._tokens = [self._open(x["file"], self._dtype, x["tokens"], x["sha256"], verify) for x in shards]
            self._index = [self._open(x["index"], START, x["documents"], x["index_sha256"], verify) for x in shards]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path / MANIFEST} is damaged ({error!r}); {REMEDY}") from error
        self._token_ends = np.cumsum([len(tokens) for tokens in self._tokens])

    def _verify_tokenizer(self) -> None:
        file = self.path / "tokenizer.json"
        intact = file.is_file() and sha256(file) == self.tokenizer_fingerprint
        require(intact, f"{file} must be the tokenizer that {MANIFEST} names, got another or none; {REMEDY}")
        tokenizer = load_tokenizer(self.path)
        found, wanted = (tokenizer.vocab_size, tokenizer.end), (self.vocab_size, self.end)
        require(found == wanted, f"{self.path} must have vocab_size, end = {wanted}, got {found}; {REMEDY}")

    def _open(self, name: str, dtype: np.dtype[Any], count: int, digest: str, verify: bool) -> npt.NDArray[Any]:
        file, size = self.path / Path(name).name, count * dtype.itemsize
        require(file.is_file(), f"shard {file} must exist, got no such file; {REMEDY}")
        found = file.stat()
        require(found.st_size == size, f"shard {file} must have {size} bytes, got {found.st_size}; {REMEDY}")
        if verify:
            actual = _checksum(file.resolve(), found.st_size, found.st_mtime_ns)
            require(actual == digest, f"shard {file} must have sha256 {digest}, got {actual}; {REMEDY}")
        return np.memmap(file, dtype, "r")

    @property
    def tokens_total(self) -> int:
        """Number of tokens, end tokens included."""
        return int(self._token_ends[-1])

    @cached_property
    def _bounds(self) -> npt.NDArray[np.int64]:
        """The first token of each document, and the number of all tokens (documents + 1,)."""
        starts = zip([*self._index, np.zeros(1, START)], [0, *self._token_ends], strict=True)
        return np.concatenate([start.astype(np.int64) + first for start, first in starts])

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document (documents,), its end token included."""
        return np.diff(self._bounds)

    def document(self, i: int) -> npt.NDArray[Any]:
        """Copy document i (document_lengths[i],), its end token included."""
        last = len(self._bounds) - 2
        require(0 <= i <= last, f"document must be between 0 and {last}, got {i}; see document_lengths")
        start = int(self._bounds[i])
        return self.window(start, int(self._bounds[i + 1]) - start)

    def window(self, start: int, length: int) -> npt.NDArray[Any]:
        """Copy tokens start … start + length − 1 of the concatenated documents (length,)."""
        require(
            length >= 0 and 0 <= start <= self.tokens_total - length,
            f"window must lie within the {self.tokens_total} tokens of {self.path}, got start {start} and length "
            f"{length}; choose a shorter one or prepare more text",
        )
        shard = int(np.searchsorted(self._token_ends, start, side="right"))
        pieces, left = [np.empty(0, self._dtype)], length
        while left:
            offset = start + length - left - (int(self._token_ends[shard]) - len(self._tokens[shard]))
            pieces.append(self._tokens[shard][offset : offset + left])
            left -= len(pieces[-1])
            shard += 1
        return np.concatenate(pieces)


@cache
def _checksum(file: Path, size: int, mtime_ns: int) -> str:
    """Hash a file once per process: a study opens the same data for every run."""
    return sha256(file)


class ShardWriter:
    """Collect the documents of one split in memory, and write each shard whole.

    :meth:`state` is all that a later process needs: its writer goes on after the last shard.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, state: dict[str, Any]
    ) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = state.get("shards", [])
        self.position = self._last = tuple(state.get("position", (0, 0)))
        """The last document in a shard."""
        self._tokens, self._starts = bytearray(), array("Q")

    def append(self, tokens: npt.NDArray[Any], position: tuple[int, ...]) -> bool:
        """Add a document; return whether a shard was written, which ends with the first to reach shard_tokens."""
        self._starts.append(len(self._tokens) // self._dtype.itemsize)
        self._tokens += tokens.astype(self._dtype).tobytes()
        self._last = position
        full = len(self._tokens) >= self._shard_tokens * self._dtype.itemsize
        if full:
            self.finish()
        return full

    def finish(self) -> None:
        """Write what has been added since the last shard, if anything."""
        if not self._starts:
            return
        name = f"{self._split}-{len(self.shards):05d}"
        tokens, index = self._folder / f"{name}.bin", self._folder / f"{name}.idx"
        for file, content in ((tokens, self._tokens), (index, np.array(self._starts, START).tobytes())):
            with atomic_path(file) as part:
                part.write_bytes(content)
        counts = {"tokens": len(self._tokens) // self._dtype.itemsize, "documents": len(self._starts)}
        entry = {"file": tokens.name, **counts, "sha256": sha256(tokens)}
        self.shards.append(entry | {"index": index.name, "index_sha256": sha256(index)})
        self.position = self._last
        self._tokens, self._starts = bytearray(), array("Q")

    def state(self) -> dict[str, Any]:
        """Return what has been written."""
        return {"shards": self.shards, "position": self.position}
