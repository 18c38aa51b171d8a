"""Read documents from files, directories, the standard library or the Hugging Face hub, one at a time.

`datasets` reads the hub alone: of a truncated .zst, and of one with several frames, it silently drops the rest. So does
the package zstandard; pyarrow raises for the first and reads the second.
"""

import gzip
import hashlib
import importlib
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from farspan.errors import require, unknown
from farspan.utils import sha256

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
FORMATS = "a file .txt .md .rst .py .jsonl (or these .gz .xz .zst) .parquet, a directory, 'stdlib' or 'hf:NAME'"
FIELD = "name the one that holds the text with --field"


class Document(NamedTuple):
    """A text and its origin: a file, `file:line` or `file:row`."""

    text: str
    name: str
    read: int = 0
    """Bytes of the source read so far, as they lie on disk."""


@dataclass(frozen=True)
class Source:
    """A source as the user wrote it, and its files."""

    name: str
    files: tuple[Path, ...]
    root: Path | None = None
    """The directory that holds the files; None for a single file and for the hub."""

    @property
    def bytes(self) -> int:
        """Size on disk of all files; 0 for the hub."""
        return sum(path.stat().st_size for path in self.files)

    def describe(self) -> dict[str, Any]:
        """Return name, number of files, bytes and sha256, as the manifest keeps them.

        The hash of a directory is that of the lines ``<sha256>  <path below it>``, as sha256sum prints them.
        """
        if not self.files:
            return {"source": self.name, "files": 0, "bytes": None, "sha256": None}
        total = sha256(self.files[0])
        if self.root is not None:
            lines = (f"{sha256(path)}  {path.relative_to(self.root).as_posix()}\n" for path in self.files)
            total = hashlib.sha256("".join(lines).encode()).hexdigest()
        return {"source": self.name, "files": len(self.files), "bytes": self.bytes, "sha256": total}

    def documents(self, field: str) -> Iterator[Document]:
        """Yield every document; see :func:`documents`."""
        if not self.files:
            yield from (Document(_checked(row, where, field), where) for row, where, _ in _hub(self.name, field))
            return
        before, empty = 0, True
        for path in self.files:
            name = str(path)
            if self.root is not None:  # the same name on every machine for 'stdlib'
                name = f"{self.name}:{path.relative_to(self.root).as_posix()}"
            size = path.stat().st_size
            # An empty __init__.py is ordinary in a directory; an empty file that the user named is a mistake.
            if size or self.root is None:
                for record, where, read in READERS[_ending(path)](path, name, field):
                    empty = False
                    yield Document(_checked(record, where, field), where, before + read)
            before += size
        require(not empty, f"source must hold at least one document, got {self.name!r} with none; name another")


def documents(source: str | Sequence[str], field: str = "text") -> Iterator[Document]:
    """Yield every document of a source, or of several, in an order that does not depend on the machine.

    Args:
        source: a file .txt .md .rst .py (one document) or .jsonl (one per line), each plain or .gz .xz .zst; .parquet;
            a directory (all such files, sorted); 'stdlib' (the sources of Python's standard library); or a dataset
            'hf:NAME[:CONFIG][:SPLIT]' (split "train" by default; 'hf:NAME::test' leaves the configuration out).
        field: the key or column that holds the text.

    A missing source raises before the first is read. Empty files in a directory and empty rows of a hub dataset are
    skipped; any other empty text is an error.

    >>> next(documents("stdlib")).name
    'stdlib:__future__.py'
    """
    found = [resolve(name) for name in ([source] if isinstance(source, str) else source)]
    return (document for one in found for document in one.documents(field))


def resolve(name: str) -> Source:
    """Find the files of a source, in an order that does not depend on the machine.

    >>> resolve("stdlib").name
    'stdlib'
    """
    if name.startswith("hf:"):
        dataset, *rest = name[3:].split(":")
        require(bool(dataset) and len(rest) <= 2, f"source must be hf:NAME[:CONFIG][:SPLIT], got {name!r}; write it so")
        return Source(name, ())
    if name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return Source(name, _walk(root, [".py"], skip=NOT_LIBRARY), root)
    path = Path(name)
    require(path.exists(), f"source must exist, got {name!r}; give {FORMATS}")
    if path.is_dir():
        files = _walk(path, READERS)
        require(bool(files), f"source must hold text files, got the directory {name!r} without any; give {FORMATS}")
        return Source(name, files, path)
    require(_ending(path) in READERS, f"source must have a known ending, got {name!r}; give {FORMATS}")
    return Source(name, (path,))


def _walk(root: Path, endings: Iterable[str], skip: Iterable[str] = ()) -> tuple[Path, ...]:
    """List the files below `root` with these endings, sorted by their path there, without hidden ones."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in names if not name.startswith(".") and _ending(Path(name)) in endings]
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


# Readers

Records = Iterator[tuple[dict[str, Any], str, int]]
"""Records of a file, the origin of each, and the bytes of the file read so far."""


def _text(path: Path, name: str, field: str) -> Records:
    with opened(path) as (stream, raw):
        data = stream.read()
        zero = data.find(b"\0")
        require(zero < 0, f"{name} must be text, got binary data (a zero byte at offset {zero}); name UTF-8 text files")
        yield {field: _decode(data, name)}, name, raw.tell()


def _lines(path: Path, name: str, field: str) -> Records:
    with opened(path) as (stream, raw):
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _object(line, f"{name}:{number}"), f"{name}:{number}", raw.tell()


def _object(line: bytes, where: str) -> dict[str, Any]:
    text = _decode(line, where)
    need = f"{where} must be one JSON object per line, got {text[:40]!r}"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{need} ({error}); repair it") from error
    if not isinstance(record, dict):
        raise ValueError(f"{need}; repair it")
    return record


def json_lines(path: str | Path, argument: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON-lines file that a user named, plain, .gz, .xz or .zst, each with its line."""
    file, where = Path(path), ""
    require(file.is_file(), f"{argument} must be a JSONL file, got {str(path)!r}, which does not exist; check the path")
    for record, where, _ in _lines(file, file.name, ""):
        yield where, record
    require(bool(where), f"{argument} must hold at least one line, got none in {str(path)!r}; name another file")


def _parquet(path: Path, name: str, field: str) -> Records:
    parquet, arrow = (needs(module, "pyarrow", f"reading {name}") for module in ("pyarrow.parquet", "pyarrow"))
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns, total, size = file.schema_arrow.names, file.metadata.num_rows, path.stat().st_size
            if field not in columns:
                raise ValueError(f"{name}: {unknown('field', field, columns, FIELD)}")
            for batch in file.iter_batches(batch_size=64, columns=[field]):
                for record in batch.to_pylist():
                    row += 1
                    yield record, f"{name}:{row}", size * row // total
    except (OSError, arrow.ArrowException) as error:
        raise ValueError(
            f"{name} must be a complete .parquet file, got {error} after row {row}; download it again"
        ) from error


def _hub(name: str, field: str) -> Records:
    datasets = needs("datasets", "datasets", f"reading {name}")
    dataset, config, split = [*name[3:].split(":"), "", ""][:3]
    rows = datasets.load_dataset(dataset, config or None, split=split or "train", streaming=True)
    for number, row in enumerate(rows, 1):
        if str(row.get(field, "?")).strip():  # nobody can repair a row on the hub, and many datasets keep empty ones
            yield row, f"{name}:{number}", 0


READERS: dict[str, Callable[[Path, str, str], Records]] = {
    **dict.fromkeys((".txt", ".md", ".rst", ".py"), _text),
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), _lines),
    ".parquet": _parquet,
}


def _ending(path: Path) -> str:
    """Return the ending that tells the format, without that of a compression."""
    name = Path(path.name.lower())
    inner = Path(name.stem).suffix
    return inner if name.suffix in COMPRESSED and inner != ".parquet" else name.suffix


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"the byte {data[error.start]:#04x} at offset {error.start}"
        raise ValueError(f"{where} must be UTF-8 text, got {got}; convert it to UTF-8 or leave it out") from error


def _checked(record: dict[str, Any], where: str, field: str) -> str:
    if field not in record:
        raise ValueError(f"{where}: {unknown('field', field, record, FIELD)}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} must hold text, got {text!r:.40}; choose another field")
    require(bool(text.strip()), f"{where} must hold text, got nothing but white space; remove it or fill it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} must be valid Unicode, got half a surrogate pair at character {error.start}; repair it"
        ) from error
    return text


def needs(module: str, package: str, what: str) -> Any:
    """Import a module that only some inputs need, or say which package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{what} needs the package {package!r}, which is missing; pip install {package}") from error


# Compressed files


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield (decompressed stream, file); the position of the file shows how much of it has been read."""
    suffix = path.suffix.lower()
    with open(path, "rb") as raw:
        try:
            yield COMPRESSED[suffix](raw) if suffix in COMPRESSED else raw, raw
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise ValueError(
                f"{path} must be a complete {suffix} file, got one truncated or damaged before byte {raw.tell()} "
                f"of {path.stat().st_size} ({error}); download or compress it again"
            ) from error


def _zstandard(raw: BinaryIO) -> BufferedReader:
    stream = needs("pyarrow", "pyarrow", f"reading {raw.name}").CompressedInputStream(raw, "zstd")
    return BufferedReader(stream, 2**16)


COMPRESSED: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _zstandard}
