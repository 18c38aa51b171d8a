"""Token shards: the file format, its writer, and one split of it as one long memory-mapped sequence.

A folder holds manifest.json (written last), tokenizer.json and, per split, train-00000.bin (token ids, little-endian
uint16 or uint32, every document followed by the end token) and train-00000.idx (uint64 start of each document).
"""

import os
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from farspan.data.tokenizer import load_tokenizer
from farspan.errors import require, require_choice
from farspan.utils import explain_write_errors, read_settings, sha256

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

    @property
    def documents_total(self) -> int:
        """Number of documents."""
        return sum(map(len, self._index))

    @cached_property
    def _bounds(self) -> npt.NDArray[np.int64]:
        """The first token of each document, and the number of all tokens (documents_total + 1,)."""
        starts = zip([*self._index, np.zeros(1, START)], [0, *self._token_ends], strict=True)
        return np.concatenate([start.astype(np.int64) + first for start, first in starts])

    @property
    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document (documents_total,), its end token included."""
        return np.diff(self._bounds)

    def document(self, i: int) -> npt.NDArray[Any]:
        """Copy document i (document_lengths[i],), its end token included."""
        require(
            0 <= i < self.documents_total,
            f"document must be between 0 and {self.documents_total - 1}, got {i}; see documents_total",
        )
        start, stop = (int(bound) for bound in self._bounds[i : i + 2])
        return self.window(start, stop - start)

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
    """Append documents to the shards of one split.

    :meth:`state` is all that a later process needs: its writer cuts the open files back to that point and goes on.
    What was written after it does not count, so a process may be killed at any moment.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, state: dict[str, Any]
    ) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self.finished: list[dict[str, Any]] = list(state.get("finished", []))
        self._tokens, self._documents = int(state.get("tokens", 0)), int(state.get("documents", 0))
        self._files: list[BinaryIO] = []

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Add the tokens of a document. A shard ends with the first one that reaches shard_tokens."""
        with explain_write_errors(self._folder):
            if not self._files:
                self._open()
            self._files[0].write(tokens.tobytes())
            self._files[1].write(np.array(self._tokens, START).tobytes())
        self._tokens += len(tokens)
        self._documents += 1
        if self._tokens >= self._shard_tokens:
            self.finish()

    def _paths(self) -> tuple[Path, Path]:
        name = f"{self._split}-{len(self.finished):05d}"
        return self._folder / f"{name}.bin", self._folder / f"{name}.idx"

    def _open(self) -> None:
        """Open the two files of the current shard, cut back to what is known to be good."""
        sizes = self._tokens * self._dtype.itemsize, self._documents * START.itemsize
        for path, size in zip(self._paths(), sizes, strict=True):
            path.touch()
            if path.stat().st_size < size:
                raise OSError(f"{path} lost data, so it cannot be continued; {REMEDY}")
            os.truncate(path, size)
            self._files.append(open(path, "ab"))  # noqa: SIM115 - closed by close()

    def finish(self) -> None:
        """Close the current shard, if it holds anything, and note its hashes."""
        if not self._tokens:
            return
        self.state()
        self.close()
        tokens, index = self._paths()
        entry = {"file": tokens.name, "tokens": self._tokens, "documents": self._documents, "sha256": sha256(tokens)}
        self.finished.append(entry | {"index": index.name, "index_sha256": sha256(index)})
        self._tokens = self._documents = 0

    def state(self) -> dict[str, Any]:
        """Sync the files to disk and return what has been written."""
        with explain_write_errors(self._folder):
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
        return {"finished": list(self.finished), "tokens": self._tokens, "documents": self._documents}

    def close(self) -> None:
        """Close the open files; what was not synced does not count."""
        for file in self._files:
            with suppress(OSError):  # it writes what is left, which a full disk may not take
                file.close()
        self._files = []
