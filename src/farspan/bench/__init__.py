"""Benchmarks: speed and memory against peers in one run. What a candidate computes is checked before it is reported.

Each module makes a list of steps, :data:`Steps`; :func:`run` takes them one by one and keeps their rows on disk.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from farspan.bench.checks import ResultsDifferError
from farspan.results import check_out, write_result
from farspan.utils import Progress, silent

Row = dict[str, Any]
Steps = list[tuple[str, Callable[[], list[Row]]]]
"""What is measured, in words, and the function that measures it."""
Table = tuple[str, list[str], list[list[str]]]
"""Title, headings and lines to print."""


def table(title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> list[Table | str]:
    """Make a table from rows and a function per column; return an empty list if there are no rows.

    >>> table("squares", [{"n": 2}], {"n": lambda row: str(row["n"]), "n²": lambda row: str(row["n"] ** 2)})
    [('squares', ['n', 'n²'], [['2', '4']])]
    """
    lines = [[column(row) for column in columns.values()] for row in rows]
    return [(title, list(columns), lines)] if lines else []


def show(found: dict[str, float] | None, digits: int = 3) -> str:
    """Format a ratio with the quantiles around it.

    >>> show({"median": 1.0, "low": 0.9, "high": 1.25}, 2), show(None)
    ('1.00 (0.90–1.25)', '–')
    """
    if found is None:
        return "–"
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f}–{found['high']:.{digits}f})"


def notes(rows: list[Row]) -> list[Table | str]:
    """Return a line per candidate without figures, with the reason, and one for the check nearest to its limit."""
    missing = (x for row in rows if isinstance(row.get("missing"), dict) for x in row["missing"].items())
    found: list[Table | str] = [f"missing: {name}: {why}" for name, why in sorted(set(missing))]
    checks = [row for row in rows if "error" in row]
    if checks:
        row = max(checks, key=lambda row: row["error"] / row["allowed"])
        what = row.get("attention", row["kind"])
        errors = f"relative error {row['error']:.1e} (allowed: {row['allowed']:.1e})"
        found.append(f"{len(checks)} checks passed; nearest to its limit: {what}, {errors}")
    return found


def run(
    steps: Steps,
    *,
    kind: str,
    device: str,
    seed: int,
    out: Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> list[Row]:
    """Measure all steps and return their rows. They are written to `out` at the end, and until then beside it.

    Raise OSError before the first step if `out` cannot be written, or exists without `force`. After a
    :class:`ResultsDifferError` the file beside it holds the reason and no figures.
    """
    rows: list[Row] = []
    options: dict[str, Any] = {"kind": kind, "device": device, "seed": seed}
    if out is not None:
        check_out(out, force)
        unfinished(out).unlink(missing_ok=True)  # of an earlier run
    for number, (label, measure) in enumerate(steps):
        progress(number, len(steps), label)
        try:
            rows += measure()
        except ResultsDifferError as error:
            if out is not None:
                write_result(unfinished(out), [{"kind": "no figures", "why": str(error)}], **options)
            raise
        if out is not None:
            write_result(unfinished(out), rows, **options)
    progress(len(steps), len(steps), "done")
    if out is not None:
        write_result(out, rows, **options)
        unfinished(out).unlink(missing_ok=True)
    return rows


def unfinished(out: Path) -> Path:
    """Return where the rows of a run lie that did not end; `farspan report` reads no such name."""
    return out.with_name(out.name + ".unfinished")
