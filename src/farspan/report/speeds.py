"""Time against length → tables in multiples of one contestant's, and what they say."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.report.experiment import build_value, shipped
from farspan.report.names import listed, variant_name
from farspan.report.tables import Cell, Line, Table
from farspan.report.timings import COCA, COSFORMER, Spread, Timing, groups

FORMS = ("coca-exact", "coca-slack", "coca-strict")


@dataclass(frozen=True)
class SpeedRow:
    """One line: contestants by the names they have in result files; of several, the fastest at each length."""

    label: str
    contestants: tuple[str, ...]
    variant: str = ""
    """Whose colour and marker it is drawn with; empty = the next."""

    def time(self, timing: Timing) -> Spread | None:
        found = [timing.times[name] for name in self.contestants if name in timing.times]
        return min(found, key=lambda spread: spread.median, default=None)


@dataclass(frozen=True)
class SpeedTable:
    """What is compared against length."""

    name: str
    title: str
    kind: str
    caption: str
    heading: str
    """Of the columns."""
    reference: str
    """What the times are multiples of."""
    owner: str
    """The same, as whose time."""
    memory: str
    """What the line about memory shows."""
    drawn: str
    """How to read the figure."""
    digits: int
    rows: tuple[SpeedRow, ...]
    of: str = ""
    """What is timed, in words before its passes."""
    ceiling: float = 0.0
    """Where a figure ends, with an even scale; 0 = it is logarithmic and shows everything."""
    variant: str = ""
    """The variant that `reference` is, where figures have a colour for it."""
    paper: tuple[float, ...] = ()
    """The least and the most that the paper states."""
    paper_label: str = ""


def load_speed_tables() -> list[SpeedTable]:
    """The shipped experiments.

    >>> [table.name for table in load_speed_tables()]
    ['coca-speed', 'cosformer-length']
    """
    made = []
    for name, text in shipped(("speed",)):
        data = tomllib.loads(text)
        rows = tuple(build_value(SpeedRow, row) for row in data.pop("rows"))
        caption = " ".join(data.pop("caption").split())
        made.append(build_value(SpeedTable, {"name": name, **data, "caption": caption, "rows": rows}))
    return made


def group_title(table: SpeedTable, group: str) -> str:
    return ", ".join(filter(None, (table.of, group)))


def file_name(table: SpeedTable, group: str) -> str:
    """Of a table or figure about a group of timings."""
    return "-".join([table.name, *group.replace(",", "").split()])


def speed_tables(timings: Sequence[Timing], table: SpeedTable) -> list[Table]:
    """One table a group: contestants down, lengths across."""
    made = []
    for group, found in groups(timings, table.name):
        lines = [Line(table.reference, "", tuple(Cell("1", x.unit) for x in found))]
        for row in table.rows:
            times = [row.time(x) for x in found]
            if any(times):
                lines.append(Line(row.label, "", tuple(_cell(time, table.digits) for time in times)))
        if table.paper:
            low, high = table.paper
            lines.append(Line(table.paper_label, "", (Cell(f"{low:.2f}–{high:.2f}"),) * len(found)))
        if any(x.memory is not None for x in found):
            cells = tuple(Cell() if x.memory is None else Cell(f"{x.memory:.2f}") for x in found)
            lines.append(Line(table.memory, "", cells))
        made.append(
            Table(
                name=file_name(table, group),
                title=f"{group_title(table, group)}: time over {table.owner}, and memory",
                caption=table.caption,
                columns=tuple(x.heading for x in found),
                lines=tuple(lines),
                heading=table.heading,
            )
        )
    return made


def _cell(time: Spread | None, digits: int) -> Cell:
    return Cell() if time is None else Cell(f"{time.median:.{digits}f}", time.text(digits))


def speed_verdicts(timings: Sequence[Timing]) -> list[str]:
    """From which length on cosFormer is faster than softmax attention, and what CoCA costs beside RoPE."""
    return _cosformer_verdicts(timings) + _coca_verdicts(timings)


def _cosformer_verdicts(timings: Sequence[Timing]) -> list[str]:
    said = []
    for group, found in groups(timings, COSFORMER):
        parts = []
        if ratios := _ratios(found, "flash softmax"):
            slower = [length for length, ratio in ratios if ratio.median <= 1]
            ahead = [length for length, _ in ratios if not slower or length > max(slower)]
            parts.append(
                f"faster than softmax attention from {ahead[0]:,} tokens on"
                if ahead
                else "never faster than softmax attention"
            )
        if ratios := _ratios(found, "fla"):
            low, high = min(r.median for _, r in ratios), max(r.median for _, r in ratios)
            parts.append(f"{low:.2g} to {high:.2g} times as fast as flash-linear-attention")
        if parts:
            said.append(f"cosFormer, {group}: {', '.join(parts)}.")
    return said


def _coca_verdicts(timings: Sequence[Timing]) -> list[str]:
    """Faster or slower only where the range of three fifths is on one side of RoPE."""
    said = []
    for group, found in groups(timings, COCA):
        layer = "One layer" if all(x.unit for x in found) else "One layer, a toy on a CPU"
        for form in FORMS:
            ratios = _ratios(found, form)
            if not ratios:
                continue
            low, high = min(r.median for _, r in ratios), max(r.median for _, r in ratios)
            sides = {
                "faster": [f"{length:,}" for length, r in ratios if r.high < 1],
                "slower": [f"{length:,}" for length, r in ratios if r.low > 1],
                "not told apart": [f"{length:,}" for length, r in ratios if r.low <= 1 <= r.high],
            }
            words = "; ".join(f"{side} at {listed(lengths)}" for side, lengths in sides.items() if lengths)
            said.append(
                f"{layer}, {group}: {variant_name(form)} takes {low:.2f} to {high:.2f} of the best RoPE layer's "
                f"time ({words} tokens)."
            )
    return said


def _ratios(found: Sequence[Timing], contestant: str) -> list[tuple[int, Spread]]:
    return [(x.length, x.times[contestant]) for x in found if contestant in x.times]
