"""Benchmarks: speed and memory against peers in one run. What a candidate computes is checked before it is reported.

Each module makes a list of steps, :data:`Steps`; :func:`run` takes them one by one and keeps their rows on disk.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from farspan.bench.checks import ResultsDifferError
from farspan.results import check_out, write_result
from farspan.utils import Progress, silent

SEED = 0
"""Of all random numbers."""
Row = dict[str, Any]
Steps = list[tuple[str, Callable[[], list[Row]]]]
"""What is measured, in words, and the function that measures it."""


def run(
    steps: Steps,
    *,
    kind: str,
    device: str,
    out: Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> list[Row]:
    """Measure all steps and return their rows. They are written to `out` at the end, and until then beside it.

    Raise OSError before the first step if `out` cannot be written, or exists without `force`. After a
    :class:`ResultsDifferError` no rows are kept.
    """
    rows: list[Row] = []
    options: dict[str, Any] = {"kind": kind, "device": device, "seed": SEED}
    if out is not None:
        check_out(out, force)
        unfinished(out).unlink(missing_ok=True)  # of an earlier run
    for number, (label, measure) in enumerate(steps):
        progress(number, len(steps), label)
        try:
            rows += measure()
        except ResultsDifferError:
            if out is not None:
                unfinished(out).unlink(missing_ok=True)
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
