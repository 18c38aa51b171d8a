"""Time against length: each contestant's in multiples of one of them."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from farspan.report.canvas import FAINT, INK, Figure, blank, finish, length_axis, log_ticks
from farspan.report.names import variant_style
from farspan.report.speeds import SpeedRow, SpeedTable, file_name, group_title
from farspan.report.timings import Spread, Timing, groups

COLOURS = ("#D55E00", "#0081c9", "#009E73", "#CC79A7", "#8a8a8a")
MARKERS = "osD^v"
ROOM = 0.07
"""Above and below the curves."""
SIDESTEP = 0.014
"""Between the curves of a length, of the width of the axis, so that their bars can be told apart."""


def speed_figures(timings: Sequence[Timing], table: SpeedTable) -> list[Figure]:
    """One figure for each group of two lengths or more."""
    made = []
    for group, found in groups(timings, table.name):
        if len(found) < 2:
            continue
        canvas, axes = blank(group_title(table, group), "tokens a text", f"time / {table.owner}", (5.0, 4.1))
        curves = [(row, [(x.length, time) for x in found if (time := row.time(x))]) for row in table.rows]
        length_axis(axes, [x.length for x in found])
        width = found[-1].length / found[0].length
        _time_axis(axes, table, [time for _, points in curves for _, time in points])
        _draw_reference(axes, table)
        for i, ((row, points), colour, marker) in enumerate(zip(curves, cycle(COLOURS), cycle(MARKERS), strict=False)):
            style = variant_style(row.variant) if row.variant else {"color": colour, "marker": marker}
            if points:
                _draw(axes, row, points, style, width ** (SIDESTEP * (i - len(curves) // 2)))
        made.append(finish(canvas, file_name(table, group), table.name, table.drawn, columns=2 if table.variant else 1))
    return made


def _time_axis(axes: Axes, table: SpeedTable, times: Sequence[Spread]) -> None:
    values = [1.0, *table.paper, *(time.low for time in times), *(time.high for time in times)]
    low, high = min(values), max(values)
    if table.ceiling:
        axes.set_ylim(low - ROOM, min(high + ROOM, table.ceiling))
        axes.yaxis.set_major_locator(MultipleLocator(0.1))
    else:
        room = (high / low) ** ROOM
        axes.set_yscale("log")
        axes.set_ylim(low / room, high * room)
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_ylim())))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _draw(axes: Axes, row: SpeedRow, points: Sequence[tuple[int, Spread]], style: dict[str, Any], step: float) -> None:
    """A curve; with bars, a step aside from the others', where ranges are known."""
    ranges = any(time.low < time.high for _, time in points)
    at = [length * step if ranges else length for length, _ in points]
    medians = [time.median for _, time in points]
    axes.plot(at, medians, label=row.label, linewidth=1.6, markersize=4.5 if ranges else None, **style)
    if ranges:
        bars = [[time.median - time.low for _, time in points], [time.high - time.median for _, time in points]]
        axes.errorbar(at, medians, bars, color=style["color"], fmt="none", capsize=3, elinewidth=1.2)
    top = axes.get_ylim()[1]
    for x, median in zip(at, medians, strict=True):
        if median > top:
            text = f"↑ {median:.1f}"
            axes.annotate(
                text, (x, top), (0, -2), textcoords="offset points", ha="center", va="top", color=style["color"]
            )


def _draw_reference(axes: Axes, table: SpeedTable) -> None:
    """What all times are multiples of, and the paper's range."""
    if not table.variant:
        axes.axhline(1.0, color=INK, linewidth=1.2, linestyle=":")
        return
    axes.axhline(1.0, color=variant_style(table.variant)["color"], linewidth=1.6, label=table.reference, zorder=1)
    if table.paper:
        axes.axhspan(*table.paper, color=FAINT, alpha=0.35, lw=0, label=table.paper_label, zorder=0)
