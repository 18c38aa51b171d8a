"""The geometry of the paper's Fig. 3 and Fig. 7 with this model's shares, and its borders by frequency."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Arc
from matplotlib.ticker import PercentFormatter

from farspan.report.canvas import FAINT, INK, Figure, blank, file_of, finish
from farspan.report.looks import Look
from farspan.report.names import variant_name

BORDER_STYLES = {
    "k": ("k: irregular", "#D55E00", "o"),
    "-q": ("−q: every turn", "#0081c9", "s"),
    "q": ("q: every turn", "#009E73", "^"),
}
CASES = (
    ("a", -1, 60, "key after query, Θ ≤ π:\nrises first"),
    ("b", 1, 60, "key before query, Θ ≤ π:\nfalls first"),
    ("c", -1, 300, "key after query, Θ > π:\nfalls first"),
    ("d", 1, 300, "key before query, Θ > π:\nrises first"),
)


def cases_figure(look: Look) -> Figure:
    """The four cases of Fig. 3: which way the query turns as the distance grows, and how often each occurs here."""
    title = f"The four cases, {variant_name(look.label)}"
    canvas, axes = blank(title, "", "", (5.0, 4.6))
    rows = look.of("census", region="inside")
    past = sum(row["past_pi"]["plain"] for row in rows) / len(rows)
    shares = {"a": None, "b": 1 - past, "c": None, "d": past}
    axes.set(xlim=(-0.1, 4.1), ylim=(-0.55, 4.1), aspect="equal")
    axes.axis("off")
    for i, (case, direction, angle, words) in enumerate(CASES):
        centre = 1.0 + 2.0 * (i % 2), 3.0 - 2.1 * (i // 2)
        _case(axes, centre, direction, angle)
        share = shares[case]
        measured = "not if causal" if share is None else f"{share:.1%} of pairs"
        x, y = centre[0], centre[1] - 0.98
        axes.text(x, y, f"({case}) {words}, {measured}", ha="center", va="top", fontsize=8, color=INK)
    caption = (
        "k stays, q turns along the arrow as the two move apart (Fig. 3 of the paper). In (a) and (d) the nearest "
    )
    caption += "tokens are damped until q has come round to k."
    return finish(canvas, file_of("cases", look.label), "borders", caption)


def _case(axes: Axes, centre: tuple[float, float], direction: int, angle: float) -> None:
    """k along the x axis, q at an angle from it, and the way q turns."""
    x, y = centre
    anomalous = (direction > 0) == (angle > 180)
    colour = "#D55E00" if anomalous else "#0081c9"
    axes.add_patch(Arc(centre, 1.5, 1.5, color=FAINT, linewidth=1))
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x + 0.75, y), centre, arrowprops={**arrow, "color": INK})
    axes.text(x + 0.8, y, "k", va="center", fontsize=9, color=INK)
    tip = _place(centre, 0.75, angle)
    axes.annotate("", tip, centre, arrowprops={**arrow, "color": colour})
    axes.text(*_place(centre, 0.88, angle), "q", ha="center", va="center", fontsize=9, color=colour)
    bend = f"arc3,rad={0.22 * direction}"
    turned = {**arrow, "color": colour, "connectionstyle": bend, "linewidth": 1.3}
    axes.annotate("", _place(centre, 0.5, angle + 48 * direction), _place(centre, 0.5, angle), arrowprops=turned)


def _place(centre: tuple[float, float], radius: float, degrees: float) -> tuple[float, float]:
    angle = math.radians(degrees)
    return centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)


def border_figure(look: Look) -> Figure:
    """By frequency: borders that no distance in training reached, but a longer text does."""
    title = f"{variant_name(look.label)}: borders first past the window"
    canvas, axes = blank(title, "wavelength of the pair (tokens)", "share of pairs")
    x = look.wavelengths
    for border, (label, colour, marker) in BORDER_STYLES.items():
        for row in look.of("borders", law="none", border=border):
            axes.plot(x, row["first_past"], label=label, color=colour, marker=marker, linewidth=1.6, markersize=4.5)
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.axvline(look.model["train_length"], color=FAINT, linewidth=1.2, linestyle=":")
    longest = look.model["longest"]
    caption = (
        f"Key moved from 0 to {longest:,} tokens away; dotted: the training length. Borders as in the paper's Fig. 7."
    )
    return finish(canvas, file_of("borders", look.label), "borders", caption)
