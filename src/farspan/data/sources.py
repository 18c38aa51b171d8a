"""What the user names as text: a file, a directory, the standard library, or a dataset on the Hugging Face hub."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.data.streams import COMPRESSED
from farspan.errors import require

TEXT = (".txt", ".md", ".rst", ".py")
LINES = (".jsonl", ".json", ".ndjson")
PARQUET = (".parquet",)
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
FORMATS = "a file .txt .md .rst .py .jsonl (or these .gz .xz .zst) .parquet, a directory, 'stdlib' or 'hf:NAME'"


@dataclass(frozen=True)
class Source:
    """One source as the user wrote it, and the files it stands for."""

    name: str
    files: tuple[Path, ...]
    root: Path | None = None
    """Where a directory of files begins; None for a single file and for the hub."""

    def label(self, path: Path) -> str:
        """What to call a file of this source: the same on every machine for 'stdlib'."""
        return str(path) if self.root is None else f"{self.name}:{path.relative_to(self.root).as_posix()}"

    @property
    def bytes(self) -> int:
        """Size on disk of all files; 0 for the hub."""
        return sum(path.stat().st_size for path in self.files)


def kind(path: Path) -> str | None:
    """'text', 'lines' or 'parquet' by the file's ending; None if it is none of these.

    >>> kind(Path("a.jsonl.xz")), kind(Path("b.py")), kind(Path("c.png"))
    ('lines', 'text', None)
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PARQUET:
        return "parquet"
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return "text" if last in TEXT else "lines" if last in LINES else None


def resolve(name: str) -> Source:
    """The files behind a source, in an order that does not depend on the machine.

    >>> resolve("stdlib").name
    'stdlib'
    """
    if name.startswith("hf:"):
        require(bool(name[3:].split(":")[0]), f"source must be hf:NAME[:CONFIG][:SPLIT], got {name!r}; add the name")
        return Source(name, ())
    if name == "stdlib":
        return _library()
    path = Path(name)
    require(path.exists(), f"source must exist, got {name!r}; give {FORMATS}")
    if path.is_dir():
        files = _walk(path, lambda file: kind(file) is not None)
        require(bool(files), f"source must hold text files, got the directory {name!r} without any; give {FORMATS}")
        return Source(name, files, path)
    require(kind(path) is not None, f"source must have a known ending, got {name!r}; give {FORMATS}")
    return Source(name, (path,))


def _library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, lambda file: file.suffix == ".py", skip=NOT_LIBRARY)
    require(bool(files), "source 'stdlib' found no Python sources on this machine; name a text file instead")
    return Source("stdlib", files, root)


def _walk(root: Path, keep: Any, skip: set[str] | frozenset[str] = frozenset()) -> tuple[Path, ...]:
    """Files under root that are kept, sorted by their path below it; hidden ones are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in names if not name.startswith(".") and keep(Path(name))]
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def describe(source: Source) -> dict[str, Any]:
    """Name, number of files, bytes and sha256, as the manifest keeps them.

    The hash of several files is that of the lines ``<sha256>  <path below the directory>``, as sha256sum prints them.
    """
    if not source.files:
        return {"source": source.name, "files": 0, "bytes": None, "sha256": None}
    hashes = [sha256(path) for path in source.files]
    if source.root is None:
        total = hashes[0]
    else:
        names = [path.relative_to(source.root).as_posix() for path in source.files]
        lines = "".join(f"{digest}  {name}\n" for digest, name in zip(hashes, names, strict=True))
        total = hashlib.sha256(lines.encode()).hexdigest()
    return {"source": source.name, "files": len(hashes), "bytes": source.bytes, "sha256": total}


def sha256(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
