"""Helpers that every part around the core shares: progress, files, folders, locks, settings, intervals."""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_type_hints

from farspan.errors import require, unknown

Settings = TypeVar("Settings")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# Progress


class Progress(Protocol):
    """Receive how far long work is. Each phase has a bar, and an estimate of the time left, of its own."""

    def __call__(self, done: float, total: float | None, text: str = "", *, phase: str = "") -> None: ...


def silent(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
    """Report no progress."""


def in_phase(progress: Progress, phase: str) -> Progress:
    """Return `progress` under the name of a phase, for a function that knows nothing of phases."""
    return lambda done, total, text="", **_: progress(done, total, text or phase, phase=phase)


# Files and folders that are complete or absent


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise a failed write again as one line with the remedy."""
    try:
        yield
    except OSError as error:
        remedy = "add a file name" if error.errno == errno.EISDIR else "choose a folder that can be written to"
        if error.errno in DISK_FULL:
            remedy = "free some space and run the same command again"
        failure = OSError(f"cannot write {path}: {error.strerror or error}; {remedy}")
        failure.errno = error.errno
        raise failure from error


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write a file or a folder at; rename it to `path` once the block ends without an error.

    Sync all files to disk before the rename, and the folder that holds them after it. A folder replaces only an empty
    folder. The next writer of the same path removes what a killed process left: one writer at a time (:func:`lock`).

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp(), "a.txt")
    >>> with atomic_path(out) as temporary:
    ...     _ = temporary.write_text("done")
    >>> out.read_text()
    'done'
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    with explain_write_errors(path), _made_parents(path):
        remove(temporary)
        try:
            yield temporary
            for file in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
                sync(file)
            if temporary.is_dir() and path.is_dir():
                path.rmdir()  # only if it is empty
            os.replace(temporary, path)
            sync(path.parent)
        except BaseException:
            remove(temporary)
            raise


@contextmanager
def _made_parents(path: Path) -> Iterator[None]:
    """Make the folders above a path; afterwards remove those that were new and are empty."""
    missing = [x for x in path.parents if not x.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in missing:  # the innermost first
            with suppress(OSError):
                folder.rmdir()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file with :func:`atomic_path`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON with :func:`atomic_path`."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Compute the checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(path: Path) -> None:
    """Raise OSError, with the remedy, if :func:`atomic_path` could not write a file there. Leave nothing behind."""
    probe = path.with_name(path.name + ".part")
    with explain_write_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        with _made_parents(path):
            probe.touch()
            probe.unlink()


def check_folder(out: Path, marker: str | None = None, *, what: str = "of this command") -> None:
    """Raise unless `out` can be the folder of a command: new, empty, or begun by the same command before.

    Args:
        marker: a file that tells such an earlier run. None accepts only a new or an empty folder.
        what: names what the folder must hold, for the error.
    """
    require(not out.exists() or out.is_dir(), f"out must be a folder, got the file {str(out)!r}; choose another name")
    if not out.is_dir() or (marker is not None and (out / marker).is_file()):
        return
    found = next((x.name for x in sorted(out.iterdir()) if x.name != LOCK and not x.name.endswith(".part")), None)
    require(
        found is None, f"out must be a new folder or one {what}, got {str(out)!r} with {found!r}; choose another name"
    )


# One process per folder

LOCK = ".lock"


@contextmanager
def lock(folder: Path, *, wait: bool = False, name: str = LOCK) -> Iterator[None]:
    """Hold the lock of a folder, so that no other process works there. The lock ends with its process.

    Raise ValueError if another process holds it, unless `wait`. The lock of a whole folder (no `wait`, no name) leaves
    nothing behind where nothing else was written.
    """
    from filelock import FileLock, Timeout

    file = folder / name
    fresh = name == LOCK and not wait and not file.exists()
    with ExitStack() as held:
        with explain_write_errors(folder):
            held.enter_context(_made_parents(file))
            try:
                held.enter_context(FileLock(file).acquire(timeout=-1 if wait else 0))
            except Timeout:
                raise ValueError(f"another process works in {str(folder)!r}; wait for it or choose another") from None
        try:
            yield
        finally:
            with suppress(OSError):
                if fresh and [path.name for path in folder.iterdir()] == [name]:
                    file.unlink()


# Settings


def read_settings(path: str | os.PathLike[str], argument: str = "config") -> dict[str, Any]:
    """Read a TOML or JSON file that a user named. Raise one clear line for anything but a table."""
    import tomllib

    path = Path(path)
    require(path.is_file(), f"{argument} must be a file, got {str(path)!r}, which does not exist; check the path")
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, parse_constant=_not_finite) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise ValueError(f"{argument} {str(path)!r} is not valid {kind}: {error}; correct or replace it") from error
    what = "an object" if kind == "JSON" else "a table"
    require(isinstance(values, dict), f"{argument} {str(path)!r} must hold {what}, got {type(values).__name__}")
    return values


def _not_finite(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def parse(cls: type[Settings], values: Mapping[str, Any], prefix: str = "") -> Settings:
    """Make a dataclass from nested mappings with pydantic. Raise one line for the first wrong or unknown key.

    Only whole numbers become decimals, and lists tuples; nan and inf are wrong. Limits of a field are annotations:
    ``steps: Annotated[int, Field(ge=1)] = 1000``.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Run:
    ...     steps: int = 1000
    >>> parse(Run, {"steps": 5})
    Run(steps=5)
    >>> parse(Run, {"step": 5}, "run.")
    Traceback (most recent call last):
    ValueError: configuration key run.step must be one of 'steps', got 'step'; did you mean 'steps'?
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    _forbid_unknown(cls, ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))
    try:
        return TypeAdapter(cls).validate_json(json.dumps(_finite(values, prefix)))
    except RecursionError:
        raise ValueError(f"{prefix or 'configuration '}nests too deep to be read; correct it") from None
    except ValidationError as error:
        # A misspelt key is missing too, and a list too short without its wrong items: name what was written.
        errors = sorted(error.errors(include_url=False), key=lambda one: one["type"] in ("missing", "too_short"))
        raise ValueError(_first_line(cls, errors[0], prefix)) from None


def _forbid_unknown(cls: Any, config: Any) -> None:
    """Give a dataclass, and those in its fields, pydantic's configuration."""
    if "__pydantic_config__" in vars(cls):
        return
    cls.__pydantic_config__ = config
    hints = get_type_hints(cls)
    for known in fields(cls):
        for kind in [hints[known.name], *get_args(hints[known.name])]:
            if isinstance(kind, type) and is_dataclass(kind):
                _forbid_unknown(kind, config)


def _finite(value: Any, name: str) -> Any:
    """Return plain JSON values. Raise for nan, inf, dates and whatever else no setting can be."""
    if isinstance(value, Mapping):
        dot = "" if not name or name.endswith(".") else "."
        return {str(key): _finite(one, f"{name}{dot}{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one, f"{name}[{i}]") for i, one in enumerate(value)]
    plain = value is None or isinstance(value, bool | str) or (isinstance(value, float) and math.isfinite(value))
    require(
        plain or (type(value) is int and abs(value) < 2**63),
        f"{name} must be a finite number, below 2^63 if whole, or text, got {value!r}",
    )
    return value


def _first_line(cls: Any, error: Mapping[str, Any], prefix: str) -> str:
    *above, last = error["loc"] or ("",)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    name, message = prefix + path, str(error["msg"])
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        for part in above:
            hint = get_type_hints(cls).get(part) if is_dataclass(cls) else None
            cls = next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), cls)
        return str(unknown(f"configuration key {name}", last, [f.name for f in fields(cls)]))
    if error["type"] == "value_error":  # our own, of a __post_init__
        return message.removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"configuration key {name} must be given; add it"
    _, should, rest = message.partition(" should ")  # "Input should be …", "String should match …"
    return f"{name} must {rest}, got {error['input']!r}" if should else f"{name}: {message}, got {error['input']!r}"


def check_same(path: Path, settings: Mapping[str, Any], what: str) -> None:
    """Store settings as JSON beside their work, or raise if other settings are stored there.

    >>> import tempfile
    >>> stored = Path(tempfile.mkdtemp(), "settings.json")
    >>> check_same(stored, {"seed": 0}, "run")
    >>> check_same(stored, {"seed": 1}, "run")
    Traceback (most recent call last):
    ValueError: this run began with seed = 0, got 1; keep it or use another folder
    """
    now = json.loads(json.dumps(settings))
    if not path.is_file():
        write_json(path, now)
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{str(path)!r} is damaged; remove it or choose another folder") from None
    check_unchanged(before, now, what)


def check_unchanged(before: Any, now: Any, what: str) -> None:
    """Raise for the settings that differ from what they were when `what` began."""
    found = [f"{key} = {old!r}, got {new!r}" for key, old, new in differences(before, now)]
    require(not found, f"this {what} began with {'; '.join(found)}; keep it or use another folder")


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{name}[{i}]")
    elif before != now:
        yield name, before, now


# Intervals


def wilson(correct: int, cases: int, z: float = 1.959964) -> tuple[float, float]:
    """Compute the 95% Wilson interval of correct/cases, which is sensible at 0 and at 1.

    >>> [round(x, 3) for x in wilson(10, 10)]
    [0.722, 1.0]
    """
    require(cases >= 1 and 0 <= correct <= cases, f"correct must lie in 0 … cases ≥ 1, got {correct} of {cases}")
    rate, spread = correct / cases, z * z / cases
    centre = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def share(correct: int, cases: int) -> dict[str, Any]:
    """Return the fields of a counted share: cases, correct, accuracy, ci95; the last two are None for no cases.

    >>> share(3, 4)["accuracy"], share(0, 0)["accuracy"]
    (0.75, None)
    """
    accuracy, ci95 = (correct / cases, list(wilson(correct, cases))) if cases else (None, None)
    return {"cases": cases, "correct": correct, "accuracy": accuracy, "ci95": ci95}
