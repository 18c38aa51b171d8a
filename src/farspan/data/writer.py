"""Token shards on their way to disk: appended in order, cut at whole documents, resumable after any interruption."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farspan.data.sources import sha256
from farspan.errors import require
from farspan.files import room_for, write_all

START = np.dtype("<u8")
"""How a document's start is kept in an .idx file."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32, little-endian, that holds every id.

    >>> token_dtype(65536).name, token_dtype(65537).name
    ('uint16', 'uint32')
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class SplitWriter:
    """The shards of one split.

    What :meth:`state` returned is all that a later process needs: it cuts the open files back to that point and goes
    on. Bytes written after it are worth nothing, so it does not matter where a process was killed.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, state: dict[str, Any] | None = None
    ) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        state = state or {"finished": [], "tokens": 0, "documents": 0}
        self._finished: list[dict[str, Any]] = list(state["finished"])
        self._tokens, self._documents = int(state["tokens"]), int(state["documents"])
        self._files: tuple[int, int] | None = None

    def append(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Add documents: their tokens one after the other (sum of lengths,), and the length of each (documents,)."""
        ends = np.cumsum(lengths)
        starts = ends - lengths
        first = 0
        while first < len(lengths):
            base = int(starts[first])
            # A shard is full with the first document that reaches shard_tokens; no document is split.
            last = int(np.searchsorted(ends, base + self._shard_tokens - self._tokens)) + 1
            last = min(last, len(lengths))
            stop = int(ends[last - 1])
            self._write(tokens[base:stop], starts[first:last] - base + self._tokens)
            first = last
            if self._tokens >= self._shard_tokens:
                self.finish_shard()

    def _write(self, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> None:
        with room_for(self._folder):
            self._files = self._files or self._open()
            write_all(self._files[0], tokens.astype(self._dtype, copy=False).data.cast("B"))
            write_all(self._files[1], starts.astype(START).data.cast("B"))
        self._tokens += len(tokens)
        self._documents += len(starts)

    def _paths(self) -> tuple[Path, Path]:
        name = f"{self._split}-{len(self._finished):05d}"
        return self._folder / f"{name}.bin", self._folder / f"{name}.idx"

    def _open(self) -> tuple[int, int]:
        """The open shard's two files, cut back to what is known to be good."""
        sizes = (self._tokens * self._dtype.itemsize, self._documents * START.itemsize)
        files = []
        for path, size in zip(self._paths(), sizes, strict=True):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            found = os.fstat(file).st_size
            require(
                found >= size,
                f"{path} must have at least {size} bytes to continue, got {found}; delete {self._folder} to start over",
            )
            os.ftruncate(file, size)
            os.lseek(file, 0, os.SEEK_END)
            files.append(file)
        return files[0], files[1]

    def finish_shard(self) -> None:
        """Close the open shard, if it holds anything, and note its hashes."""
        if not self._tokens:
            return
        self._files = self._files or self._open()
        self._sync()
        self.close()
        tokens, index = self._paths()
        self._finished.append(
            {
                "file": tokens.name,
                "tokens": self._tokens,
                "documents": self._documents,
                "sha256": sha256(tokens),
                "index": index.name,
                "index_sha256": sha256(index),
            }
        )
        self._tokens = self._documents = 0

    def _sync(self) -> None:
        with room_for(self._folder):
            for file in self._files or ():
                os.fsync(file)

    def state(self) -> dict[str, Any]:
        """What has been written, once it is safe on the disk."""
        self._sync()
        return {"finished": list(self._finished), "tokens": self._tokens, "documents": self._documents}

    def close(self) -> None:
        """Let go of the open files; what they hold stays."""
        for file in self._files or ():
            os.close(file)
        self._files = None
