"""Bytes of a file, decompressed on the fly; a damaged file is refused with its name and offset."""

import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

COMPRESSED = (".gz", ".xz", ".zst")
"""Endings that are undone while reading."""

BLOCK = 2**16


def needs(module: str, package: str, what: str) -> Any:
    """Import a module that only some inputs need, or say which package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{what} needs the package {package!r}, which is missing; pip install {package}") from error


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield (decompressed stream, raw file); the raw file's position shows how much of it has been read."""
    suffix = path.suffix.lower()
    damaged: list[type[Exception]] = [EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error]
    with open(path, "rb") as raw:
        stream: BinaryIO = raw
        if suffix == ".gz":
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif suffix == ".xz":
            stream = cast(BinaryIO, lzma.LZMAFile(raw))  # noqa: SIM115 - `with` closes raw
        elif suffix == ".zst":
            zstandard = needs("zstandard", "zstandard", f"reading {path}")
            damaged.append(zstandard.ZstdError)
            stream = cast(BinaryIO, io.BufferedReader(_Zstandard(raw, zstandard), BLOCK))
        try:
            yield stream, raw
        except tuple(damaged) as error:
            raise ValueError(
                f"{path} must be a complete {suffix} file, got one truncated or damaged before byte {raw.tell()} "
                f"of {path.stat().st_size} ({error}); download or compress it again"
            ) from error


class _Zstandard(io.RawIOBase):
    """Frames one after the other. The library's own reader ends silently inside a truncated frame; this one raises."""

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw = raw
        # 2 GiB: files compressed with `zstd --long=31`, as large public corpora are.
        self._new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._raw.read(BLOCK)
            if not block:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            self._frame = self._frame or self._new()
            self._ready = self._frame.decompress(block)
            if self._frame.eof:
                self._raw.seek(-len(self._frame.unused_data), io.SEEK_CUR)  # the next frame begins there
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
