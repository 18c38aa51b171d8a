"""Figures of measurements by length. Importing this loads matplotlib."""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from farspan.experiments import Experiment, load
from farspan.report.measured import by_distance, distance_ranges, retrieval_at, variants_in
from farspan.report.results import (
    Estimate,
    Record,
    Run,
    control_at,
    lengths_of,
    mean_of,
    passkey_at,
    passkey_where,
    perplexity_at,
    scaling_order,
    scalings,
)
from farspan.report.speed import LOOKS, group_title, timings
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
DEPTHS = 5
HATCHES = ("", "///", "...", "xx")
COLOURS, MARKERS = ("#D55E00", "#0081c9", "#009E73", "#CC79A7", "#8a8a8a"), "osD^v"


@dataclass(frozen=True)
class Figure:
    """A finished figure; `group` is the section that shows it."""

    name: str
    group: str
    title: str
    caption: str
    svg: str
    png: bytes


def blank(title: str, x: str, y: str, size: tuple[float, float] = (5.0, 3.9)) -> tuple[Canvas, Axes]:
    """Return a canvas with titled, labelled axes; without pyplot nothing global is left behind."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
    axes.set(title=textwrap.fill(title, 44), xlabel=x, ylabel=y)
    return canvas, axes


def finish(canvas: Canvas, name: str, group: str, caption: str = "", columns: int = 3) -> Figure:
    """Put the legend below the axes and draw both formats."""
    axes = canvas.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    with matplotlib.rc_context(STYLE):
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        if handles:
            texts += canvas.legend(handles, labels, loc="outside lower center", ncols=columns).get_texts()
        for text in texts:  # a label such as "$\frac{$" is no formula
            text.set_parse_math(False)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # laid out once; each format would do it again
        svg, png = io.BytesIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        canvas.savefig(png, format="png", dpi=160)
    return Figure(name, group, axes.get_title().replace("\n", " "), caption, svg.getvalue().decode(), png.getvalue())


def inline_svg(figure: Figure) -> str:
    """Return the SVG as part of a page: no outside references, its own ids, ink in the page's text colour."""
    body = re.sub(r"<metadata>.*?</metadata>", "", figure.svg[figure.svg.index("<svg") :], flags=re.DOTALL)
    head, rest = body.split(">", 1)
    head = re.sub(r'\s(xmlns(:xlink)?|version|width|height)="[^"]*"', "", head)
    body = head.replace("<svg", '<svg role="img" aria-hidden="true"', 1) + ">" + rest
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    body = re.sub(r'\bid="', f'id="{figure.name}-', body)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{figure.name}-", body)


# Axes


def short(length: float) -> str:
    """Return a length as a tick label.

    >>> short(512), short(1024), short(32768), short(1000)
    ('512', '1k', '32k', '1,000')
    """
    return f"{length / 1024:g}k" if length >= 1024 and length % 1024 == 0 else f"{length:,g}"


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Make x logarithmic, with one tick for each measured length."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlim(min(lengths) / 1.25, max(lengths) * 1.25)


def log_axis(axes: Axes, values: Sequence[float], top: float = math.inf) -> None:
    """Make y logarithmic with readable ticks: 1-2-5, denser when the range is small."""
    low = max(min(values) / 1.1, 1e-4)
    high = max(min(max(values) * 1.2, top), low * 1.5)
    digits = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high / low < 8 else (1, 2, 5) if high / low < 1e4 else (1,)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks = [digit * 10.0**power for power in range(-4, 13) for digit in digits]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def mark_training_length(axes: Axes, length: int, at: str = "top") -> None:
    """Draw a vertical line with its name, at the end where the curves are not."""
    axes.axvline(length, color=FAINT, linewidth=1.2, linestyle=":")
    top = at == "top"
    axes.annotate(
        "training length",
        (length, float(top)),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3, -2 if top else 8),
        textcoords="offset points",
        rotation=90,
        va="top" if top else "bottom",
        fontsize=8,
        color=FAINT,
    )


def reach(estimate: Estimate) -> tuple[float, float]:
    """Return how far the interval reaches below and above; rounding may put an end beyond the value by 1e-17."""
    low, high = estimate.interval or (estimate.low, estimate.high)
    return max(0.0, estimate.value - low), max(0.0, high - estimate.value)


def points(lengths: Iterable[int], at: Any) -> tuple[list[int], list[Estimate]]:
    """Return the lengths that were measured with a finite result, and the results."""
    found = [(length, estimate) for length in lengths if (estimate := at(length)) and math.isfinite(estimate.value)]
    return [length for length, _ in found], [estimate for _, estimate in found]


def heat_map(
    title: str, found: list[list[Estimate | None]], lengths: list[int], depths: list[str], name: str
) -> Figure:
    """Draw accuracies by length and depth with their numbers."""
    canvas, axes = blank(title, "prompt length (tokens)", "depth of the key", (4.2, 2.9))
    axes.grid(visible=False)
    grid = [[estimate.value if estimate else math.nan for estimate in row] for row in found]
    axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for i, row in enumerate(grid):
        for k, value in enumerate(row):
            colour = INK if math.isnan(value) else "black" if value > 0.5 else "white"
            text = "–" if math.isnan(value) else f"{value:.2f}"
            axes.text(k, i, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(lengths)), [short(n) for n in lengths])
    axes.set_yticks(range(len(depths)), depths)
    return finish(canvas, name, name.partition("-")[0], "0% is the start of the prompt, 100% its end.")


# Figures


def length_figures(run: Run) -> list[Figure]:
    """Draw everything measured by length."""
    made: list[Figure | None] = []
    for scaling in sorted({s for v in variants_in(run) for s in scalings(run, v)}, key=scaling_order):
        made += [perplexity_figure(run, scaling), passkey_figure(run, scaling)]
        made += [depth_figure(run, variant, scaling) for variant in variants_in(run)]
    for experiment in load("near-far"):
        made += [near_far_figure(run, experiment, part) for part in ("near", "far")]
    for experiment in load("distance"):
        used = dict.fromkeys(row.scaling for row in experiment.rows)
        made += [distance_figure(run, experiment, scaling) for scaling in used]
    return [figure for figure in made if figure]


def other_figures(run: Run) -> list[Figure]:
    """Draw training, tasks, positions, retrieval and speed."""
    losses = loss_figure(run.of("training"), "Training loss", "loss", "training")
    made = [losses, position_figure(run), *retrieval_figures(run)]
    for task in dict.fromkeys(x.task for x in run.of("task")):
        rows = run.of("task", task=task)
        made.append(loss_figure(rows, f"Training loss, {task}", file_of("loss", task), "task-training"))
    made += [figure for experiment in load("speed") for figure in speed_figures(run, experiment)]
    return [figure for figure in made if figure]


def perplexity_figure(run: Run, scaling: str) -> Figure | None:
    """Draw perplexity against the window, with the truncation control of each variant."""
    lengths = lengths_of(run, "perplexity")
    curves = {v: points(lengths, partial(perplexity_at, run, v, scaling)) for v in variants_in(run, "perplexity")}
    if not any(x for x, _ in curves.values()):
        return None
    canvas, axes = blank(f"Perplexity, {scaling_name(scaling)}", "window length (tokens)", "perplexity")
    for variant, (x, found) in curves.items():
        style, past = variant_style(variant), [n for n in x if n >= (run.train_length or 0)]
        if x:
            axes.plot(x, [e.value for e in found], label=variant_name(variant), **style)
            axes.fill_between(x, [e.low for e in found], [e.high for e in found], color=style["color"], alpha=0.2, lw=0)
            cut_x, cut = points(past, partial(control_at, run, variant, scaling))
            axes.plot(cut_x, [e.value for e in cut], color=style["color"], linestyle="--", linewidth=1)
    if any(row.mode == "truncated" for row in run.of("perplexity")):
        axes.plot([], [], color=FAINT, linestyle="--", linewidth=1, label="context cut (control)")
    length_axis(axes, lengths)
    log_axis(axes, [row.ppl for row in run.of("perplexity") if math.isfinite(row.ppl)], 1e6)
    mark_training_length(axes, run.train_length or lengths[0])
    caption = "Bands: range over seeds. The axis ends at a million."
    return finish(canvas, file_of("perplexity", scaling), "perplexity", caption)


def accuracy_figure(
    title: str, x: str, curves: dict[str, tuple[list[float], list[Estimate]]], shift: Any
) -> tuple[Canvas, Axes] | None:
    """Draw accuracies with their intervals; `shift` sets the curves slightly apart, so that bars do not hide."""
    curves = {variant: curve for variant, curve in curves.items() if curve[0]}
    if not curves:
        return None
    canvas, axes = blank(title, x, "accuracy (share of cases)")
    for i, (variant, (at, found)) in enumerate(curves.items()):
        moved = [shift(place, i - (len(curves) - 1) / 2) for place in at]
        errors = [*zip(*map(reach, found), strict=True)]
        style = {"label": variant_name(variant), **variant_style(variant)}
        axes.errorbar(moved, [e.value for e in found], yerr=errors, capsize=2.5, elinewidth=0.9, **style)
    axes.set_ylim(-0.04, 1.04)
    return canvas, axes


def passkey_figure(run: Run, scaling: str) -> Figure | None:
    """Draw passkey accuracy against the prompt's length."""
    lengths = lengths_of(run, "passkey")
    curves: Any = {v: points(lengths, partial(passkey_at, run, v, scaling)) for v in variants_in(run, "passkey")}
    title = f"Passkey, {scaling_name(scaling)}"
    if (made := accuracy_figure(title, "prompt length (tokens)", curves, lambda n, i: n * 2 ** (0.06 * i))) is None:
        return None
    length_axis(made[1], lengths)
    mark_training_length(made[1], run.train_length or lengths[0], at="bottom")
    caption = "Bars: 95% Wilson interval over the cases of all seeds."
    return finish(made[0], file_of("passkey", scaling), "passkey", caption)


def distance_figure(run: Run, experiment: Experiment, scaling: str) -> Figure | None:
    """Draw accuracy by the key's distance from the end (the paper's Fig. 5)."""
    ranges = distance_ranges(run, experiment)
    curves: Any = {}
    for row in experiment.rows:
        if row.scaling == scaling:
            found = [(float(i), e) for i, e in enumerate(by_distance(run, row, ranges)) if e]
            curves[row.variant] = [i for i, _ in found], [e for _, e in found]
    title = f"Passkey by distance, {scaling_name(scaling)}"
    if (made := accuracy_figure(title, "tokens from the key to the end", curves, lambda n, i: n + 0.05 * i)) is None:
        return None
    made[1].set_xticks(range(len(ranges)), [name for name, *_ in ranges])
    caption = "All lengths together. Bars: 95% Wilson interval."
    return finish(made[0], file_of(experiment.name, scaling), "distance", caption)


def near_far_figure(run: Run, experiment: Experiment, part: str) -> Figure | None:
    """Draw bars by length for keys near the end, or far from it (the paper's Fig. 4)."""
    lengths = lengths_of(run, "passkey")
    found = [[passkey_at(run, row.variant, row.scaling, n, part) for n in lengths] for row in experiment.rows]
    rows = [(row, each) for row, each in zip(experiment.rows, found, strict=True) if any(each)]
    if not rows:
        return None
    where = "within one training length of the end" if part == "near" else "farther from the end"
    canvas, axes = blank(f"Passkey, key {where}", "prompt length (tokens)", "accuracy (share of cases)")
    width = 0.8 / len(rows)
    style: Any = {"edgecolor": "white", "capsize": 2, "error_kw": {"elinewidth": 0.9, "ecolor": INK}}
    for i, (row, each) in enumerate(rows):
        x, known = zip(*[(k + (i - (len(rows) - 1) / 2) * width, e) for k, e in enumerate(each) if e], strict=True)
        bars = {"color": variant_style(row.variant)["color"], "hatch": HATCHES[i % 4], **style}
        bars |= {"label": f"{variant_name(row.variant)} + {scaling_name(row.scaling)}"}
        axes.bar(x, [e.value for e in known], width * 0.92, yerr=[*zip(*map(reach, known), strict=True)], **bars)
    axes.set_xticks(range(len(lengths)), [short(n) for n in lengths])
    axes.set_ylim(-0.04, 1.04)
    return finish(canvas, file_of(experiment.name, part), "near-far", "Bars: 95% Wilson interval.", columns=1)


def depth_figure(run: Run, variant: str, scaling: str) -> Figure | None:
    """Draw where in the prompt, at which length, the key is found."""
    lengths = [n for n in lengths_of(run, "passkey") if passkey_at(run, variant, scaling, n)]

    def at(depth: int, length: int) -> Estimate | None:
        def here(n: int, far: int) -> bool:
            return n == length and min(DEPTHS - 1, int((1 - far / n) * DEPTHS)) == depth

        return passkey_where(run, variant, scaling, here)

    grid = [[at(depth, n) for n in lengths] for depth in range(DEPTHS)]
    rows = [f"{100 * i // DEPTHS}–{100 * (i + 1) // DEPTHS}%" for i in range(DEPTHS)]
    name = file_of("depth", variant, scaling)
    return heat_map(f"{variant_name(variant)}, {scaling_name(scaling)}", grid, lengths, rows, name) if lengths else None


def retrieval_figures(run: Run) -> list[Figure]:
    """Draw accuracy by length and depth for each task and model."""
    made = []
    for key in dict.fromkeys((x.task, x.variant, x.scaling) for x in run.of("retrieval")):
        wanted = dict(zip(("task", "variant", "scaling"), key, strict=True))
        rows = run.of("retrieval", **wanted)
        lengths, depths = sorted({x.length for x in rows}), sorted({x.depth for x in rows if x.depth is not None})
        if depths:
            grid = [[retrieval_at(run, depth, **wanted, length=n) for n in lengths] for depth in depths]
            title = f"{key[0]}: {variant_name(key[1])}, {scaling_name(key[2])}"
            made.append(heat_map(title, grid, lengths, [f"{d:.0%}" for d in depths], file_of("retrieval", *key)))
    return made


def position_figure(run: Run) -> Figure | None:
    """Draw the loss by position; dotted: with the context cut to the training length."""
    rows = run.of("positions")
    if not rows:
        return None
    canvas, axes = blank("Loss by position", "position (end of the range, tokens)", "loss (nats per token)")
    stops = sorted({x.stop for x in rows})
    for variant, scaling in dict.fromkeys((x.variant, x.scaling) for x in rows):
        label, style = f"{variant_name(variant)}, {scaling_name(scaling)}", variant_style(variant)
        cut: dict[str, Any] = {"color": style["color"], "linestyle": ":", "linewidth": 1}
        for field, how in (("nll", {"label": label, **style}), ("control_nll", cut)):

            def at(stop: int, field: str = field, wanted: Any = (variant, scaling)) -> Estimate | None:
                found = run.of("positions", variant=wanted[0], scaling=wanted[1], stop=stop)
                return mean_of([x[field] / x.tokens for x in found if x[field] is not None])

            x, found = points(stops, at)
            axes.plot(x, [e.value for e in found], **how)
    length_axis(axes, stops)
    return finish(canvas, "positions", "positions", "Dotted: context cut to the training length.", columns=2)


def loss_figure(rows: Sequence[Record], title: str, name: str, group: str) -> Figure | None:
    """Draw the training loss, a line per seed."""
    rows = [row for row in rows if row.losses]
    if not rows:
        return None
    canvas, axes = blank(title, "optimiser step", "loss (nats per token)")
    first = {row.variant: i for i, row in reversed(list(enumerate(rows)))}
    for i, row in enumerate(rows):
        label = variant_name(row.variant) if first[row.variant] == i else None
        style = variant_style(row.variant) | {"markevery": max(1, len(row.losses) // 8), "alpha": 0.9}
        axes.plot(*zip(*row.losses, strict=True), label=label, **style)
    return finish(canvas, name, group, "One line per seed.")


def speed_figures(run: Run, experiment: Experiment) -> list[Figure]:
    """Draw time against length, for each thing timed at two lengths or more."""
    look, made = LOOKS[experiment.name], []
    for group, found in timings(run, look.kind).items():
        if len(found) < 2:
            continue
        curves = []
        for row in experiment.rows:
            times = [(x.length, x.fastest(row.contestants or [row.variant])) for x in found]
            curves.append((row, [(n, time) for n, time in times if time]))
        canvas, axes = blank(group_title(look, group), "tokens per sequence", f"time / {look.owner}", (5.0, 4.1))
        length_axis(axes, [x.length for x in found])
        paper = [float(value) for row in experiment.rows for value in row.paper]
        values = [1.0, *paper, *(end for _, each in curves for _, time in each for end in time)]
        log_axis(axes, values)
        if look.ceiling:
            axes.set_yscale("linear")
            axes.set_ylim(min(values) - 0.07, min(max(values) + 0.07, look.ceiling))
            axes.yaxis.set_major_locator(MultipleLocator(0.1))
        baseline: Any = {"color": INK, "linestyle": ":"}
        if paper:
            baseline = {"color": variant_style("rope")["color"], "label": look.reference}
        axes.axhline(1.0, linewidth=1.4, zorder=1, **baseline)
        width, top = found[-1].length / found[0].length, axes.get_ylim()[1]
        for i, ((row, each), colour, marker) in enumerate(zip(curves, cycle(COLOURS), cycle(MARKERS), strict=False)):
            if row.paper:
                axes.axhspan(*paper, color=FAINT, alpha=0.35, lw=0, label=row.label, zorder=0)
            if not each:
                continue
            style = variant_style(row.variant) if row.variant else {"color": colour, "marker": marker}
            ranged = any(time.low < time.high for _, time in each)
            apart = width ** (0.014 * (i - len(curves) // 2)) if ranged else 1  # bars side by side
            at = [n * apart for n, _ in each]
            bars = [[t.median - t.low for _, t in each], [t.high - t.median for _, t in each]]
            axes.errorbar(
                at, [t.median for _, t in each], bars if ranged else None, label=row.label, capsize=3, **style
            )
            for x, (_, time) in zip(at, each, strict=True):
                if time.median > top:
                    axes.annotate(f"↑ {time.median:.1f}", (x, top), ha="center", va="top", color=style["color"])
        caption = "Above the dotted line cosFormer is faster."
        if look.ceiling:
            caption = "Bars: the middle three fifths. Values above the figure stand at its edge."
        name = file_of(experiment.name, group.replace(", ", "-"))
        made.append(finish(canvas, name, experiment.name, caption, 2 if paper else 1))
    return made
