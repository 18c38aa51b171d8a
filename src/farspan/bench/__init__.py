"""Benchmarks: speed and memory against peers in one run. What a candidate computes is checked before it is reported.

Each module makes a list of steps, :data:`Steps`; :func:`run` takes them one by one and keeps their rows on disk.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from farspan.bench.checks import ResultsDifferError
from farspan.results import check_out, write_result
from farspan.utils import Progress, silent

Row = dict[str, Any]
Steps = list[tuple[str, Callable[[], list[Row]]]]
"""What is measured, in words, and the function that measures it."""
HIDDEN = (
    *("kind", "error", "allowed", "gradient_error", "gradient_allowed", "weight_bytes", "flops_a_token", "matmul_peak"),
    *("sdpa_first", "copy_terabytes_a_second", "ptxas", "chunk", "missing"),
)
"""What is in the file alone."""
NOTHING = "–"
Table = tuple[str, list[str], list[list[str]]]
"""Title, headings and lines to print."""


def tables(rows: list[Row]) -> list[Table | str]:
    """Tabulate rows under the names that the file has; what is the same in all lines of a kind stands in the title.

    A quantity with a number for each candidate makes a line for each. Checks are summarized below.

    >>> tables([{"kind": "op", "n": 2, "ms": {"ours": 0.5, "theirs": n}} for n in (3, 4)])
    [('op, n 2', ['candidate', 'ms'], [['ours', '0.500'], ['theirs', '3'], ['ours', '0.500'], ['theirs', '4']])]
    """
    kinds: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["kind"] != "check":
            kinds.setdefault(row["kind"], []).extend(_lines(row))
    found: list[Table | str] = []
    for kind, lines in kinds.items():
        values = {name: [line.get(name, NOTHING) for line in lines] for line in lines for name in line}
        same = {name: texts[0] for name, texts in values.items() if len(set(texts)) == 1 and len(texts) > 1}
        title = ", ".join([kind, *(f"{name} {text}" for name, text in same.items() if text != NOTHING)])
        columns = {name.replace("_", " "): texts for name, texts in values.items() if name not in same}
        if columns:
            found.append((title, list(columns), [list(line) for line in zip(*columns.values(), strict=True)]))
    return [*found, *notes(rows)]


def _lines(row: Row) -> list[dict[str, str]]:
    """Return the texts of a row, or of each of its candidates."""
    plain, each = dict[str, str](), dict[str, dict[str, str]]()
    for name, value in row.items():
        if name in HIDDEN or isinstance(value, list):
            continue
        if not isinstance(value, dict) or "low" in value:
            plain[name] = _text(name, value)
            continue
        for candidate, found in value.items():
            parts = found if isinstance(found, dict) and "low" not in found else {name: found}
            each.setdefault(candidate, {}).update((part, _text(part, x)) for part, x in parts.items())
    return [{**plain, "candidate": name, **texts} for name, texts in each.items()] or [plain]


def _text(name: str, value: Any) -> str:
    """Format a value.

    >>> _text("peak_bytes", 1_500_000), _text("", 1.5), _text("", {"low": 0.9, "high": 1.25}), _text("", None)
    ('1.5 MB', '1.500', '0.900–1.250', '–')
    """
    if isinstance(value, dict):
        ends = f"{value['low']:,.3f}–{value['high']:,.3f}"
        return f"{value['median']:,.3f} ({ends})" if "median" in value else ends
    if name.endswith("bytes"):
        return f"{value / 1e9:,.2f} GB" if value >= 1e9 else f"{value / 1e6:,.1f} MB"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10_000 else f"{value:,.0f}"
    return NOTHING if value is None else f"{value:,}" if isinstance(value, int) else str(value)


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
