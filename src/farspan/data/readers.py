"""Documents out of files, one at a time: memory holds the largest document, never the corpus."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.data.sources import Source, kind, resolve
from farspan.data.streams import needs, opened
from farspan.errors import require, unknown

Located = Iterator[tuple["Document", int]]
"""Documents, each with the bytes of its source read so far."""


@dataclass(frozen=True)
class Document:
    """One text, and where it came from: a file, `file:line` or `file:row`."""

    text: str
    name: str


def documents(source: str, field: str = "text") -> Iterator[Document]:
    """Every document of a source, in an order that does not depend on the machine.

    source: a file .txt .md .rst .py (one document), .jsonl (one a line) – each plain or .gz .xz .zst – or .parquet;
        a directory (all such files, sorted); 'stdlib' (the Python standard library's own sources); or a dataset
        'hf:NAME[:CONFIG][:SPLIT]' (split "train" unless named; 'hf:NAME::test' leaves the configuration out).
    field: the key or column that holds the text.

    Empty files in a directory and empty rows of a hub dataset are passed over; any other empty text is refused.

    >>> library = documents("stdlib")
    >>> next(library).name
    'stdlib:__future__.py'
    """
    for document, _ in located(resolve(source), field):
        yield document


def located(source: Source, field: str) -> Located:
    """The documents of a resolved source with the bytes read so far, for a progress bar."""
    if not source.files:
        yield from _hub(source.name, field)
        return
    before, count = 0, 0
    read: dict[str | None, Callable[[Path, str, str], Located]]
    read = {"text": _text, "lines": _lines, "parquet": _parquet}
    for path in source.files:
        size = path.stat().st_size
        # An empty __init__.py is ordinary in a directory; an empty file named by the user is a mistake.
        if size or source.root is None:
            for document, position in read[kind(path)](path, source.label(path), field):
                count += 1
                yield document, before + position
        before += size
    require(count > 0, f"source must hold at least one document, got {source.name!r} with none; name another")


def _text(path: Path, name: str, field: str) -> Located:
    with opened(path) as (stream, raw):
        data = stream.read()
        position = raw.tell()
    zero = data.find(b"\0")
    require(zero < 0, f"{name} must be text, got binary data (a zero byte at offset {zero}); name UTF-8 text files")
    yield Document(_checked(_decode(data, name, 0), name), name), position


def _lines(path: Path, name: str, field: str) -> Located:
    with opened(path) as (stream, raw):
        offset = 0
        for number, line in enumerate(stream, 1):
            where = f"{name}:{number}"
            if line.strip():
                yield Document(_from_json(_decode(line, where, offset), where, field), where), raw.tell()
            offset += len(line)


def _from_json(line: str, where: str, field: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} must be one JSON object a line, got {line[:40]!r} ({error}); repair it") from error
    require(isinstance(record, dict), f"{where} must be one JSON object a line, got {line[:40]!r}; repair it")
    return _checked(_pick(record, where, field), where)


def _parquet(path: Path, name: str, field: str) -> Located:
    parquet = needs("pyarrow.parquet", "pyarrow", f"reading {name}")
    arrow = needs("pyarrow", "pyarrow", f"reading {name}")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors derive from these
        raise ValueError(f"{name} must be a complete .parquet file, got {error}; download it again") from error
    with file:
        columns = file.schema_arrow.names
        if field not in columns:
            raise ValueError(f"{name}: {unknown('field', field, columns)}")
        row, size = 0, path.stat().st_size
        try:
            for batch in file.iter_batches(batch_size=64, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    where = f"{name}:{row}"
                    yield Document(_checked(_string(value, where, field), where), where), _share(row, file, size)
        except (OSError, arrow.ArrowInvalid) as error:
            raise ValueError(f"{name} must be readable after row {row}, got {error}; download it again") from error


def _share(row: int, file: Any, size: int) -> int:
    return size * row // file.metadata.num_rows


def _hub(name: str, field: str) -> Located:
    identity, config, split, *more = [*name[3:].split(":"), "", ""]
    require(not any(more), f"source must be hf:NAME[:CONFIG][:SPLIT], got {name!r}; leave out what follows the split")
    datasets = needs("datasets", "datasets", f"reading {name}")
    rows = datasets.load_dataset(identity, config or None, split=split or "train", streaming=True)
    for number, row in enumerate(rows, 1):
        where = f"{name}:{number}"
        text = _pick(row, where, field)
        if text.strip():  # nobody can repair a row on the hub: many sets keep empty ones
            yield Document(_checked(text, where), where), 0


def _pick(record: dict[str, Any], where: str, field: str) -> str:
    if field not in record:
        raise ValueError(f"{where}: {unknown('field', field, record)}")
    return _string(record[field], where, field)


def _string(value: object, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} must hold text, got {value!r:.40}; choose another field")
    return value


def _decode(data: bytes, where: str, offset: int) -> str:
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} must be UTF-8 text, got the byte {data[error.start]:#04x} at offset {offset + error.start}; "
            "convert it to UTF-8 or leave it out"
        ) from error


def _checked(text: str, where: str) -> str:
    require(bool(text.strip()), f"{where} must hold text, got nothing but white space; remove it or fill it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} must be valid Unicode, got half a surrogate pair at character {error.start}; repair it"
        ) from error
    return text
