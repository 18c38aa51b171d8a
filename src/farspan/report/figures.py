"""Figures: one function draws curves on axes, and each figure is its data. Importing this loads matplotlib."""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from farspan.report.measured import condition, loss_of, variants_in
from farspan.report.results import Estimate, Record, Run, find, share_of
from farspan.report.tables import file_of, scaling_name, variant_name, variant_style

INK, FAINT = "#1f2328", "#9aa0a6"
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text: small files, searchable, read aloud
    "svg.hashsalt": "farspan",  # the same numbers give the same file
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
DISTANCES = (1, 4, 16)
"""Ends of the ranges of distance in training lengths; the last range is open."""
ACCURACY: Any = {"caption": "Bands: 95% Wilson interval.", "ylim": (-0.04, 1.04)}
LENGTH, SHARE = "prompt length (tokens)", "accuracy (share of cases)"


@dataclass(frozen=True)
class Figure:
    """A finished figure."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


Figures = Iterable[Figure | None]


@dataclass(frozen=True)
class Curve:
    """A line of a figure; `spread` holds the lower and upper end around each value."""

    label: str | None
    x: Sequence[float]
    y: Sequence[float]
    style: Mapping[str, Any] = field(default_factory=dict)
    spread: Sequence[tuple[float, float]] = ()


def blank(title: str, x: str, y: str) -> tuple[Canvas, Axes]:
    """Return a canvas with titled, labelled axes; without pyplot nothing global is left behind."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(5.0, 3.9), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
    axes.set(title=textwrap.fill(title, 44), xlabel=x, ylabel=y)
    return canvas, axes


def chart(
    name: str,
    labels: tuple[str, str, str],
    curves: Iterable[Curve],
    caption: str = "",
    *,
    lengths: Sequence[float] = (),
    ranges: Sequence[str] = (),
    percent: bool = False,
    mark: float | None = None,
    then: Callable[[Axes], object] = lambda axes: None,
    **limits: Any,
) -> Figure | None:
    """Draw curves; return None if none has a point.

    Args:
        labels: the title, and the names of x and y.
        lengths: a logarithmic x with one tick for each.
        ranges: names of the values 0, 1, … of x.
        percent: y is a share, shown as a percentage.
        mark: the training length.
        then: what else to do with the axes.
        limits: other properties of the axes, such as `ylim`.
    """
    drawn = [curve for curve in curves if curve.x]
    if not drawn:
        return None
    canvas, axes = blank(*labels)
    for curve in drawn:
        axes.plot(curve.x, curve.y, label=curve.label, **curve.style)
        if curve.spread:
            low, high = zip(*curve.spread, strict=True)
            axes.fill_between(curve.x, low, high, color=curve.style["color"], alpha=0.2, lw=0)
    if lengths:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [short(n) for n in lengths])
        axes.set_xlim(min(lengths) / 1.25, max(lengths) * 1.25)
    elif ranges:
        axes.set_xticks(range(len(ranges)), ranges)
    elif labels[1] == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(**limits)
    axes.xaxis.set_minor_locator(NullLocator())
    if mark is not None:
        axes.axvline(mark, color=FAINT, linewidth=1.2, linestyle=":", label="training length")
    then(axes)
    return finish(canvas, name, caption)


def finish(canvas: Canvas, name: str, caption: str = "") -> Figure:
    """Put the legend below the axes and draw both formats."""
    axes = canvas.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    with matplotlib.rc_context(STYLE):
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        if handles:
            fit = int(14 * canvas.get_figwidth()) // (6 + max(map(len, labels)))  # 14 letters per inch
            texts += canvas.legend(handles, labels, loc="outside lower center", ncols=max(1, min(3, fit))).get_texts()
        for text in texts:  # a label such as "$\frac{$" is no formula
            text.set_parse_math(False)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once; each format would do it again
        svg, png = io.BytesIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        canvas.savefig(png, format="png", dpi=160)
    return Figure(name, axes.get_title().replace("\n", " "), caption, svg.getvalue().decode(), png.getvalue())


def inline_svg(figure: Figure) -> str:
    """Return the SVG as part of a page: no outside references, its own ids, ink in the page's text colour."""
    body = re.sub(r"<metadata>.*?</metadata>", "", figure.svg[figure.svg.index("<svg") :], flags=re.DOTALL)
    head, rest = body.split(">", 1)
    head = re.sub(r'\s(xmlns(:xlink)?|version|width|height)="[^"]*"', "", head)
    body = head.replace("<svg", '<svg role="img" aria-hidden="true"', 1) + ">" + rest
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    body = re.sub(r'\bid="', f'id="{figure.name}-', body)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{figure.name}-", body)


def short(length: float) -> str:
    """Return a length as a tick label.

    >>> short(512), short(1024), short(32768), short(1000)
    ('512', '1k', '32k', '1,000')
    """
    return f"{length / 1024:g}k" if length >= 1024 and length % 1024 == 0 else f"{length:,g}"


def log_axis(axes: Axes, values: Sequence[float], top: float = math.inf) -> None:
    """Make y logarithmic with readable ticks: 1-2-5, denser when the range is small."""
    low = max(min(values) / 1.1, 1e-4)
    high = max(min(max(values) * 1.2, top), low * 1.5)
    digits = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high / low < 8 else (1, 2, 5) if high / low < 1e4 else (1,)
    ticks = [digit * 10.0**power for power in range(-4, 13) for digit in digits]
    axes.set(yscale="log", ylim=(low, high))
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def curve(label: str | None, x: Iterable[float], found: Iterable[Estimate | None], style: Mapping[str, Any]) -> Curve:
    """Return the finite estimates with their intervals, or the range over seeds."""
    known = [(n, e) for n, e in zip(x, found, strict=True) if e and math.isfinite(e.value)]
    spread = [e.interval or (e.low, e.high) for _, e in known]
    return Curve(label, [n for n, _ in known], [e.value for _, e in known], style, spread)


def control_style(style: Mapping[str, Any], dash: str) -> dict[str, Any]:
    return {"color": style["color"], "linestyle": dash, "linewidth": 1}


# Lengths


def perplexity_figures(run: Run) -> Iterator[Figure | None]:
    """Draw perplexity against the window, with the truncation control of each variant (the paper's Fig. 1)."""
    lengths, base = run.lengths("perplexity"), run.train_length or 0
    several = len({row.seed for row in run.of("perplexity")}) > 1
    caption = "The axis ends at a million." + (" Bands: range over seeds." if several else "")
    for scaling in run.scalings("perplexity"):
        curves = []
        for v in variants_in(run, "perplexity"):
            style = variant_style(v)
            whole = curve(variant_name(v), lengths, [run.at("perplexity", v, scaling, n) for n in lengths], style)
            past = [int(n) for n in whole.x if n >= base]
            cut = curve(None, past, [run.control(v, scaling, n) for n in past], control_style(style, "--"))
            curves += [whole, replace(cut, spread=())]
        if run.of("perplexity", mode="truncated") and any(each.x for each in curves):
            curves.append(Curve("context cut (control)", [math.nan], [math.nan], control_style({"color": FAINT}, "--")))
        labels = f"Perplexity, {scaling_name(scaling)}", "window length (tokens)", "perplexity"
        values = [row.ppl for row in run.of("perplexity") if math.isfinite(row.ppl)]
        then, name = partial(log_axis, values=values, top=1e6), file_of("perplexity", scaling)
        yield chart(name, labels, curves, caption, lengths=lengths, mark=base, then=then)


def passkey_figures(run: Run) -> Iterator[Figure | None]:
    """Draw accuracy against the prompt's length, and by the key's distance from the end (the paper's Fig. 4 and 5)."""
    lengths, ends = run.lengths("passkey"), [0, *(end * (run.train_length or 0) for end in DISTANCES), math.inf]
    names = [f"{low:,}–{high:,}" if high < math.inf else f"> {low:,}" for low, high in pairwise(ends)]
    looks = [(v, variant_name(v), variant_style(v)) for v in variants_in(run, "passkey")]
    for scaling in run.scalings("passkey"):
        curves = []
        for v, name, style in looks:
            curves.append(curve(name, lengths, [run.at("passkey", v, scaling, n) for n in lengths], style))
        labels = f"Passkey, {scaling_name(scaling)}", LENGTH, SHARE
        yield chart(file_of("passkey", scaling), labels, curves, lengths=lengths, mark=run.train_length, **ACCURACY)
        curves = []
        for v, name, style in looks:
            found = [run.passkey_between(v, scaling, low, high) for low, high in pairwise(ends)]
            curves.append(curve(name, range(len(names)), found, style))
        labels = f"Passkey by distance, {scaling_name(scaling)}", "tokens from the key to the end", SHARE
        yield chart(file_of("distance", scaling), labels, curves, ranges=names, **ACCURACY)


# Positions and depths


def retrieval_figures(run: Run) -> Iterator[Figure | None]:
    """Draw accuracies by length and depth with their numbers."""
    for task, variant, scaling in dict.fromkeys((x.task, x.variant, x.scaling) for x in run.of("retrieval")):
        rows = run.of("retrieval", task=task, variant=variant, scaling=scaling)
        rows = [row for row in rows if row.depth is not None]
        lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
        if not depths:
            continue
        canvas, axes = blank(f"{task}: {condition(variant, scaling)}", LENGTH, "depth of the key")
        axes.grid(visible=False)
        found = [[share_of(find(rows, depth=depth, length=n)) for n in lengths] for depth in depths]
        values = [[estimate.value if estimate else math.nan for estimate in row] for row in found]
        axes.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for i, row in enumerate(values):
            for k, value in enumerate(row):
                colour = INK if math.isnan(value) else "black" if value > 0.5 else "white"
                text = "–" if math.isnan(value) else f"{value:.2f}"
                axes.text(k, i, text, ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(lengths)), [short(n) for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        name, caption = file_of("retrieval", task, variant, scaling), "0% is the start of the prompt, 100% its end."
        yield finish(canvas, name, caption)


def position_figure(run: Run) -> Figure | None:
    """Draw the loss by position; dotted: with the context cut to the training length."""
    rows, curves = run.of("positions"), []
    stops = sorted({x.stop for x in rows})
    for v, s in dict.fromkeys((x.variant, x.scaling) for x in rows):
        each, style = [find(rows, variant=v, scaling=s, stop=stop) for stop in stops], variant_style(v)
        whole = curve(condition(v, s), stops, [loss_of(one, "nll") for one in each], style)
        cut = curve(None, stops, [loss_of(one, "control_nll") for one in each], control_style(style, ":"))
        curves += [replace(whole, spread=()), replace(cut, spread=())]
    labels = "Loss by position", "position (end of the range, tokens)", "loss (nats per token)"
    return chart("positions", labels, curves, "Dotted: context cut to the training length.", lengths=stops)


# Training


def loss_figure(rows: Sequence[Record]) -> Figure | None:
    """Draw the training loss, a line per seed."""
    rows, curves = [row for row in rows if row.losses], []
    first = {row.variant: row for row in reversed(rows)}
    for row in rows:
        label = variant_name(row.variant) if first[row.variant] is row else None
        style = variant_style(row.variant) | {"markevery": max(1, len(row.losses) // 8), "alpha": 0.9}
        curves.append(Curve(label, [step for step, _ in row.losses], [loss for _, loss in row.losses], style))
    caption = "One line per seed." if len(rows) > len(first) else ""
    return chart("loss", ("Training loss", "optimiser step", "loss (nats per token)"), curves, caption)
