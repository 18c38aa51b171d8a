"""What was measured of a model as the card's tables."""

from collections.abc import Iterable
from functools import partial

from farspan.evaluation.answers import field_name
from farspan.report.results import Estimate, Record, Run, mean_of, perplexity_of, scaling_order, share_of
from farspan.report.tables import Table, counts_text, grid, scaling_name, share_text

ALL = "minimal pairs"
"""The column of all fields together."""
THREE = partial(share_text, digits=3)


def tables(run: Run) -> list[Table]:
    """Make a table per kind of measurement, with a line for each scaling."""
    made = []
    for mode in dict.fromkeys(row.mode for row in run.of("perplexity") if row.mode != "truncated"):
        rows = run.of("perplexity", mode=mode)
        strides = ", ".join(f"{stride:,}" for stride in sorted({row.stride for row in rows}))
        made.append(_by_length(f"Perplexity by window length ({mode}, stride {strides})", rows, _control(run)))
    made.append(_by_length("Passkey accuracy by prompt length", run.of("passkey")))
    retrieval = [row for row in run.of("retrieval") if row.depth is None]
    for task in dict.fromkeys(row.task for row in retrieval):
        made.append(
            _by_length(f"Retrieval accuracy by prompt length: {task}", [x for x in retrieval if x.task == task])
        )
    bins = sorted({(row.start, row.stop) for row in run.of("positions")})
    entries = [
        (scaling_name(s), source, [mean_of([x[name] / x.tokens for x in _at(run, s, *b) if x[name]]) for b in bins])
        for s in _scalings(run.of("positions"))
        for source, name in (("loss", "nll"), ("context cut", "control_nll"))
    ]
    title = "Loss by position (nats per token)"
    made.append(grid("positions", title, (f"{a:,}–{b - 1:,}" for a, b in bins), entries, heading="Scaling", show=THREE))
    return [table for table in [*made, _short_context(run)] if table]


def _at(run: Run, scaling: str, start: int, stop: int) -> list[Record]:
    return run.of("positions", scaling=scaling, start=start, stop=stop)


def _scalings(rows: Iterable[Record]) -> list[str]:
    return sorted({row.scaling for row in rows}, key=scaling_order)


def _by_length(title: str, rows: list[Record], note: str = "") -> Table | None:
    lengths = sorted({row.length for row in rows})
    estimate = share_of if rows and "correct" in rows[0] else perplexity_of
    entries = [
        (scaling_name(s), "", [estimate([x for x in rows if (x.scaling, x.length) == (s, n)]) for n in lengths])
        for s in _scalings(rows)
    ]
    caption = f"Each number: {counts_text(cell for *_, cells in entries for cell in cells)}.{note}"
    return grid("", title, (f"{n:,}" for n in lengths), entries, caption=caption, heading="Scaling")


def _control(run: Run) -> str:
    """Give the perplexity of the truncation control."""
    found = run.of("perplexity", mode="truncated")
    return f" The same tokens with the context cut to the training length: {found[0].ppl:.2f}." if found else ""


def _short_context(run: Run) -> Table | None:
    """Show bits per byte for each window, then minimal pairs, all of them and by field."""
    windows = sorted({row.length for row in run.of("bits")})
    pairs = [row for row in run.of("pairs") if row.kind in ("all", "field")]
    fields = sorted({_field(row) for row in pairs}, key=lambda name: (name != ALL, name))
    entries = []
    for scaling in _scalings([*run.of("bits"), *pairs]):
        bits = [mean_of([x.bits_per_byte for x in run.of("bits", scaling=scaling, length=n)]) for n in windows]
        # Results from before fields had one spelling may have two rows for one: they are counted together.
        right = [[row for row in pairs if (row.scaling, _field(row)) == (scaling, name)] for name in fields]
        entries.append((scaling_name(scaling), "", [*bits, *map(_counted, right)]))
    heads = (*(f"bits per byte, windows of {n:,}" for n in windows), *fields)
    sizes = sorted({(row.bytes, row.texts) for row in run.of("bits")})
    counts = [f"{size:,} bytes of {n:,} text{'s' if n > 1 else ''}" for size, n in sizes]
    counts += [
        f"{name}: {sum(x.cases for x in pairs if (x.scaling, _field(x)) == (s, name)):,}"
        for s in _scalings(pairs)[:1]
        for name in fields
    ]
    caption = f"Counted over {'; '.join(counts)}."
    return grid("short", "Short context", heads, entries, caption=caption, heading="Scaling", show=THREE)


def _field(row: Record) -> str:
    return ALL if row.kind == "all" else field_name(row.field)


def _counted(rows: list[Record]) -> Estimate | None:
    return share_of([{name: sum(row[name] for row in rows) for name in ("cases", "correct")}])
