"""What was measured of a model as the card's tables."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from farspan.evaluation.pairs import field_name
from farspan.report.collect import Run
from farspan.report.estimates import Estimate, perplexity_of, scaling_order, share_of
from farspan.report.names import scaling_name
from farspan.report.records import Bits, Pairs, Passkey, Perplexity, Share
from farspan.report.tables import Cell, Line, Table, counts_text, estimate_cell

ALL = "minimal pairs"
"""The column of all fields together."""


def tables(run: Run) -> list[Table]:
    """Perplexity, a table for each way of counting, passkey retrieval, short context; a line for each scaling law."""
    made = []
    for mode in dict.fromkeys(row.mode for row in run.perplexity):
        if mode != "truncated":
            rows = tuple(row for row in run.perplexity if row.mode == mode)
            strides = sorted({row.stride for row in rows})
            title = f"Perplexity by window length ({mode}, stride {', '.join(f'{s:,}' for s in strides)})"
            made.append(_table(mode, title, rows, perplexity_of, _control(run)))
    if run.passkey:
        made.append(_table("passkey", "Passkey accuracy by prompt length", run.passkey, share_of))
    if run.bits or run.pairs:
        made.append(_short_context(run))
    return made


Row = TypeVar("Row", Perplexity, Passkey)


def _table(
    name: str, title: str, rows: tuple[Row, ...], estimate: Callable[[list[Row]], Estimate | None], note: str = ""
) -> Table:
    lengths = sorted({row.length for row in rows})
    found = {
        law: [estimate([row for row in rows if (row.scaling, row.length) == (law, length)]) for length in lengths]
        for law in sorted({row.scaling for row in rows}, key=scaling_order)
    }
    lines = tuple(Line(scaling_name(law), "", tuple(map(estimate_cell, cells))) for law, cells in found.items())
    counted = counts_text([cell for cells in found.values() for cell in cells])
    caption = f"Each number: {counted}.{note}"
    return Table(name, title, caption, tuple(f"{n:,}" for n in lengths), lines, "Scaling")


def _control(run: Run) -> str:
    """The truncation control in two sentences, if it was measured."""
    found = perplexity_of([row for row in run.perplexity if row.mode == "truncated"][:1])
    if found is None:
        return ""
    return (
        f" The same tokens with their context cut to the training length have perplexity {estimate_cell(found).text}: "
        "a longer window helps where it is below that."
    )


def _short_context(run: Run) -> Table:
    """Bits a byte for each window, then minimal pairs, all of them and by field."""
    windows = sorted({row.length for row in run.bits})
    counted = {law: _fields([row for row in run.pairs if row.scaling == law]) for law in _laws(run.pairs)}
    fields = sorted({name for shares in counted.values() for name in shares}, key=lambda name: (name != ALL, name))
    lines = []
    for law in _laws((*run.bits, *run.pairs)):
        bits = {row.length: Cell(f"{row.bits_per_byte:.3f}") for row in run.bits if row.scaling == law}
        shares = [counted.get(law, {}).get(name) for name in fields]
        cells = [bits.get(length, Cell()) for length in windows]
        cells += [estimate_cell(share_of([share] if share else []), digits=3) for share in shares]
        lines.append(Line(scaling_name(law), "", tuple(cells)))
    columns = (*(f"bits a byte, windows of {length:,}" for length in windows), *fields)
    caption = " ".join([*_bits_caption(run.bits), *_pairs_caption(counted)])
    return Table("short", "Short context", caption, columns, tuple(lines), "Scaling")


def _laws(rows: Sequence[Bits | Pairs]) -> list[str]:
    return sorted({row.scaling for row in rows}, key=scaling_order)


def _fields(rows: Sequence[Pairs]) -> dict[str, Share]:
    """Field → its pairs, and those of all. Results of before fields had one spelling may have two rows for one."""
    shares: dict[str, Share] = {}
    for row in rows:
        if row.kind in ("all", "field"):
            name = ALL if row.kind == "all" else field_name(row.field)
            before = shares.get(name, Share(0, 0))
            shares[name] = Share(before.cases + row.cases, before.correct + row.correct)
    return shares


def _bits_caption(rows: Sequence[Bits]) -> list[str]:
    if not rows:
        return []
    amounts = sorted({(row.bytes, row.texts) for row in rows})
    counts = " or ".join(f"{size:,} bytes of {texts:,} text{'s' if texts > 1 else ''}" for size, texts in amounts)
    return [f"Bits a byte of raw text ({counts}): less is better."]


def _pairs_caption(counted: dict[str, dict[str, Share]]) -> list[str]:
    if not counted:
        return []
    cases = {name: share.cases for shares in counted.values() for name, share in shares.items()}
    whole, parts = cases.pop(ALL, 0), [f"{name} {count:,}" for name, count in sorted(cases.items())]
    among = f" ({', '.join(parts)})" if parts else ""
    return [f"Minimal pairs: the share of {whole:,}{among} whose right sentence is the likelier of the two."]
