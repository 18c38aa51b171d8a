"""A benchmark's rows on disk while it runs, so that one cut short keeps what it has."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farspan.benchmark.agree import ResultsDifferError
from farspan.results import check_out, check_replaceable, write_result

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
    check_replaceable(unfinished(out))
    check_out(out)
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


def parse_script(parser: ArgumentParser) -> Namespace:
    """The arguments of a script that writes its result, in the end, to `--out`; one line and exit 2 if it must not."""
    arguments = parser.parse_args()
    try:
        if arguments.out is not None:
            check_out(arguments.out)
    except OSError as error:
        parser.exit(2, f"{error}\n")
    return arguments
