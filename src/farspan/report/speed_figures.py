"""Time against length: each contestant's in multiples of cosFormer's."""

from collections.abc import Sequence
from itertools import cycle

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from farspan.report.canvas import INK, Figure, blank, finish, length_axis, log_ticks
from farspan.report.speeds import SpeedTable
from farspan.report.timings import Timing, groups

COLOURS = ("#D55E00", "#0081c9", "#009E73", "#CC79A7", "#8a8a8a")
MARKERS = "osD^v"


def speed_figures(timings: Sequence[Timing], table: SpeedTable) -> list[Figure]:
    """One figure for each width and passes with two lengths or more."""
    made = []
    for passes, width, found in groups(timings):
        if len(found) < 2:
            continue
        canvas, axes = blank(f"{passes}, width {width}", "tokens a text", "time / cosFormer's")
        lines = [
            (row, [(x.length, x.times[row.contestant]) for x in found if row.contestant in x.times])
            for row in table.rows
        ]
        for (row, points), colour, marker in zip(lines, cycle(COLOURS), cycle(MARKERS), strict=False):
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=row.label, linewidth=1.6)
        axes.axhline(1.0, color=INK, linewidth=1.2, linestyle=":")
        length_axis(axes, [x.length for x in found])
        values = [1.0, *(value for _, points in lines for _, value in points)]
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.3, max(values) * 1.3)
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_ylim())))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        name = f"speed-{width}-{passes.replace(' ', '-')}"
        made.append(finish(canvas, name, "speed", "Above the dotted line cosFormer is faster.", columns=1))
    return made
