"""A benchmark's rows on disk while it runs, so that one cut short keeps what it has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farspan.benchmark.agree import ResultsDifferError
from farspan.files import room_for
from farspan.results import check_replaceable, write_result

Row = dict[str, Any]


def recorded(
    steps: Iterator[tuple[str, list[Row]]], out: Path | None, *, device: str, seed: int
) -> Iterator[tuple[str, list[Row]]]:
    """The steps as they come; the rows so far lie in :func:`unfinished`, and in `out` when all are done.

    So a result from before stays until there is another in its place.

    Raises:
        OSError: before the first step, if `out` cannot be written, or holds (or :func:`unfinished` does) what another
            command made.
        ResultsDifferError: as a step raised it; the unfinished file then says why, and holds no figures.
    """
    if out is None:
        yield from steps
        return
    for path in (out, unfinished(out)):
        check_replaceable(path)
    check_writable(out)
    rows: list[Row] = []
    try:
        for done, new in steps:
            rows += new
            write_result(unfinished(out), rows, device=device, seed=seed)
            yield done, new
    except ResultsDifferError as error:
        write_result(unfinished(out), [{"kind": "no figures", "why": str(error)}], device=device, seed=seed)
        raise
    write_result(out, rows, device=device, seed=seed)
    unfinished(out).unlink(missing_ok=True)


def unfinished(out: Path) -> Path:
    """Where the rows of a run that is not done lie; no name that `farspan report` would read."""
    return out.with_name(out.name + ".unfinished")


def check_writable(path: Path) -> None:
    """Raise OSError, with the remedy, if a file cannot be written there; what is there stays as it is."""
    probe = path.with_name(path.name + ".part")  # the name that write_whole takes
    with room_for(path):
        if path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
