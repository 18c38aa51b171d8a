"""Files written whole or not at all, and folders that several processes share."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farspan.errors import require

try:
    import fcntl
except ModuleNotFoundError:  # Windows: one process a folder
    fcntl = None  # type: ignore[assignment]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn a failed write into one sentence with the remedy."""
    try:
        yield
    except OSError as error:
        full = "free some space and run the same command again: it continues where it stopped"
        remedies = {errno.EISDIR: "add a file's name"} | dict.fromkeys(NO_ROOM, full)
        remedy = remedies.get(error.errno or 0, "choose a folder that can be written to")
        failure = OSError(f"out must take the result, could not write {path} ({error.strerror or error}); {remedy}")
        failure.errno = error.errno
        raise failure from error


def check_folder(path: Path) -> None:
    """Refuse a file where a folder is to be."""
    require(not path.exists() or path.is_dir(), f"out must be a folder, got the file {str(path)!r}; choose another")


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all, and durable before this returns. One writer at a time (:func:`claim`)."""
    temporary = _temporary(path)
    with room_for(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_writable(path: Path) -> None:
    """Raise OSError, with the remedy, if :func:`write_whole` could not write there; what is there stays as it is."""
    probe, missing = _temporary(path), [folder for folder in path.parents if not folder.exists()]
    with room_for(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        finally:
            for folder in missing:  # the innermost first: a folder for nothing would be left if the work is refused
                with suppress(OSError):
                    folder.rmdir()


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".part")  # always this name, so that a killed process leaves no litter


def write_all(file: int, data: memoryview) -> None:
    """Write every byte: the system may take only some of them when the disk is nearly full."""
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def claim(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process alone holds the lock file inside the block; with `wait`, it will.

    The lock ends with its process, however that ends.
    """
    if fcntl is None:
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
