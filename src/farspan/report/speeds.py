"""Attention alone against length → tables in multiples of ours, and what they say."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from farspan.report.experiment import build_value, shipped
from farspan.report.tables import Cell, Line, Table
from farspan.report.timings import Timing, groups


@dataclass(frozen=True)
class SpeedRow:
    """One line: a contestant by the name it has in result files."""

    label: str
    contestant: str


@dataclass(frozen=True)
class SpeedTable:
    """What is compared against length."""

    name: str
    title: str
    kind: str
    caption: str
    rows: tuple[SpeedRow, ...]


def load_speed_table() -> SpeedTable:
    """The shipped experiment.

    >>> load_speed_table().name
    'cosformer-length'
    """
    ((name, text),) = shipped(("speed",))
    data = tomllib.loads(text)
    rows = tuple(build_value(SpeedRow, row) for row in data.pop("rows"))
    return build_value(SpeedTable, {"name": name, **data, "caption": " ".join(data["caption"].split()), "rows": rows})


def speed_tables(timings: Sequence[Timing], table: SpeedTable) -> list[Table]:
    """One table a width and passes: contestants down, lengths across."""
    made = []
    for passes, width, found in groups(timings):
        ours = tuple(Cell("1", "" if x.milliseconds is None else f"{x.milliseconds:.2f} ms") for x in found)
        lines = [Line("cosFormer, farspan", "", ours)]
        for row in table.rows:
            values = [x.times.get(row.contestant) for x in found]
            if any(value is not None for value in values):
                cells = tuple(Cell() if value is None else Cell(f"{value:.2f}") for value in values)
                lines.append(Line(row.label, "", cells))
        if any(x.memory is not None for x in found):
            cells = tuple(Cell() if x.memory is None else Cell(f"{x.memory:.2f}") for x in found)
            lines.append(Line("memory, cosFormer's over the least", "", cells))
        made.append(
            Table(
                name=f"{table.name}-{width}-{passes.replace(' ', '-')}",
                title=f"{passes}, heads of width {width}: time in multiples of ours, and memory",
                caption=table.caption,
                columns=tuple(f"{x.length:,}" for x in found),
                lines=tuple(lines),
                heading="Tokens a text",
            )
        )
    return made


def speed_verdicts(timings: Sequence[Timing], table: SpeedTable) -> list[str]:
    """From which length on cosFormer is faster than softmax attention, and how it stands to the other peers."""
    said = []
    for passes, width, found in groups(timings):
        parts = []
        for row in table.rows:
            ratios = [(x.length, x.times[row.contestant]) for x in found if row.contestant in x.times]
            if row.contestant == "flash softmax" and ratios:
                slower = [length for length, ratio in ratios if ratio <= 1]
                ahead = [length for length, _ in ratios if not slower or length > max(slower)]
                parts.append(
                    f"faster than softmax attention from {ahead[0]:,} tokens on"
                    if ahead
                    else "never faster than softmax attention"
                )
            elif row.contestant == "fla" and ratios:
                low, high = min(r for _, r in ratios), max(r for _, r in ratios)
                parts.append(f"{low:.2g} to {high:.2g} times as fast as flash-linear-attention")
        if parts:
            said.append(f"cosFormer, {passes}, width {width}: {', '.join(parts)}.")
    return said
