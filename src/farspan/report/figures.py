"""Measurements → figures. Importing this loads matplotlib; the command line does so only for the report."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from farspan.report.build import distance_ranges, passkey_lengths, sliding_lengths
from farspan.report.canvas import (
    FAINT,
    INK,
    Figure,
    blank,
    file_of,
    finish,
    length_axis,
    mark_training_length,
    perplexity_axis,
    short,
)
from farspan.report.collect import Run
from farspan.report.estimates import (
    Estimate,
    control_at,
    passkey_at,
    passkey_at_depth,
    passkey_between,
    perplexity_at,
    scaling_order,
    scalings,
)
from farspan.report.experiment import Experiment
from farspan.report.names import scaling_name, variant_name, variant_style, variants_in
from farspan.report.records import TaskResult, Training

DEPTHS = 5
POINT: dict[str, Any] = {"markersize": 5.5, "linewidth": 1.6}


def all_figures(run: Run, experiments: list[Experiment]) -> list[Figure]:
    """Every figure the measurements allow."""
    made: list[Figure | None] = []
    for law in sorted({law for variant in variants_in(run) for law in scalings(run, variant)}, key=scaling_order):
        made += [perplexity_figure(run, law), passkey_figure(run, law)]
        made += [depth_figure(run, variant, law) for variant in variants_in(run)]
    for experiment in experiments:
        if experiment.kind == "near-far":
            made += [near_far_figure(run, experiment, part) for part in ("near", "far")]
        if experiment.kind == "distance":
            laws = dict.fromkeys(row.scaling for row in experiment.rows)
            made += [distance_figure(run, experiment, law) for law in laws]
    made += [loss_figure(run), *task_loss_figures(run)]
    return [figure for figure in made if figure is not None]


def _points(lengths: Iterable[int], measure: Callable[[int], Estimate | None]) -> tuple[list[int], list[Estimate]]:
    """The lengths that were measured with a finite result, and the results."""
    found = [(length, measure(length)) for length in lengths]
    kept = [(length, estimate) for length, estimate in found if estimate and math.isfinite(estimate.value)]
    return [length for length, _ in kept], [estimate for _, estimate in kept]


def perplexity_figure(run: Run, law: str) -> Figure | None:
    """Perplexity against the window, log-log, each variant beside its truncation control."""
    lengths = sliding_lengths(run)
    curves = {name: _points(lengths, partial(perplexity_at, run, name, law)) for name in variants_in(run)}
    curves = {name: curve for name, curve in curves.items() if curve[0]}
    if not curves:
        return None
    canvas, axes = blank(f"Perplexity, {scaling_name(law)}", "window length (tokens)", "perplexity")
    every = [
        estimate.value
        for name in variants_in(run)
        for other in _laws(run)
        for n in lengths
        if (estimate := perplexity_at(run, name, other, n)) and math.isfinite(estimate.value)
    ]
    for name, (x, found) in curves.items():
        style = variant_style(name)
        axes.plot(x, [e.value for e in found], label=variant_name(name), **style, **POINT)
        axes.fill_between(x, [e.low for e in found], [e.high for e in found], color=style["color"], alpha=0.2, lw=0)
        past = [n for n in x if n >= (run.train_length or 0)]
        cut_x, cut = _points(past, partial(control_at, run, name, law))
        axes.plot(cut_x, [e.value for e in cut], color=style["color"], linestyle="--", linewidth=1)
        every += [e.value for e in cut]
    if any(row.mode == "truncated" for row in run.perplexity):
        axes.plot([], [], color=FAINT, linestyle="--", linewidth=1, label="context cut (control)")
    length_axis(axes, lengths)
    perplexity_axis(axes, every)
    mark_training_length(axes, run.train_length or lengths[0])
    caption = "Bands: range over seeds. Results that are not finite are left out; the axis ends at a million."
    return finish(canvas, file_of("perplexity", law), "perplexity", caption)


def _laws(run: Run) -> set[str]:
    return {row.scaling for row in run.perplexity if row.mode == "sliding"}


def _error_bars(axes: Axes, x: list[float], found: list[Estimate], **style: Any) -> None:
    """Points joined by lines, with the 95% interval of each."""
    values = [e.value for e in found]
    axes.errorbar(
        x, values, yerr=[*zip(*map(_reach, found), strict=True)], capsize=2.5, elinewidth=0.9, **style, **POINT
    )


def _reach(estimate: Estimate) -> tuple[float, float]:
    """How far the interval reaches below and above; rounding may put an end beyond the value by 1e-17."""
    low, high = estimate.interval or (estimate.value, estimate.value)
    return max(0.0, estimate.value - low), max(0.0, high - estimate.value)


def _share_axis(axes: Axes) -> None:
    axes.set_ylim(-0.04, 1.04)


def passkey_figure(run: Run, law: str) -> Figure | None:
    """Passkey accuracy against the prompt's length, with Wilson intervals."""
    lengths = passkey_lengths(run)
    curves = {name: _points(lengths, partial(passkey_at, run, name, law)) for name in variants_in(run)}
    curves = {name: curve for name, curve in curves.items() if curve[0]}
    if not curves:
        return None
    canvas, axes = blank(f"Passkey, {scaling_name(law)}", "prompt length (tokens)", "accuracy (share of cases)")
    for i, (name, (x, found)) in enumerate(curves.items()):
        shifted = [n * 2 ** (0.06 * (i - (len(curves) - 1) / 2)) for n in x]  # side by side, so that bars do not hide
        _error_bars(axes, shifted, found, label=variant_name(name), **variant_style(name))
    length_axis(axes, lengths)
    _share_axis(axes)
    mark_training_length(axes, run.train_length or lengths[0], at="bottom")
    caption = "Bars: 95% Wilson interval over the cases of all seeds; variants are set slightly apart."
    return finish(canvas, file_of("passkey", law), "passkey", caption)


def near_far_figure(run: Run, experiment: Experiment, part: str) -> Figure | None:
    """Bars by length for keys near the end, or far from it (the paper's Fig. 4)."""
    lengths = passkey_lengths(run)
    rows = [row for row in experiment.rows if any(passkey_at(run, row.variant, row.scaling, n, part) for n in lengths)]
    if not rows:
        return None
    where = "within one training length of the end" if part == "near" else "farther from the end"
    canvas, axes = blank(f"Passkey, key {where}", "prompt length (tokens)", "accuracy (share of cases)")
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        style = variant_style(row.variant)
        for k, n in enumerate(lengths):
            estimate = passkey_at(run, row.variant, row.scaling, n, part)
            if estimate:
                error = [[part] for part in _reach(estimate)]
                place = k + (i - (len(rows) - 1) / 2) * width
                axes.bar(
                    place,
                    estimate.value,
                    width * 0.92,
                    yerr=error,
                    color=style["color"],
                    hatch=HATCHES[i % 4],
                    edgecolor="white",
                    capsize=2,
                    error_kw={"elinewidth": 0.9, "ecolor": INK},
                )
        axes.bar(
            0,
            0,
            color=style["color"],
            hatch=HATCHES[i % 4],
            edgecolor="white",
            label=_row_name(row.variant, row.scaling),
        )
    axes.set_xticks(range(len(lengths)), [short(n) for n in lengths])
    axes.set_xlim(-0.6, len(lengths) - 0.4)
    _share_axis(axes)
    caption = "Bars: 95% Wilson interval. No bar: no key of that length lay there."
    return finish(canvas, file_of(experiment.name, part), "near-far", caption, columns=1)


HATCHES = ("", "///", "...", "xx")


def _row_name(variant: str, scaling: str) -> str:
    return variant_name(variant) + ("" if scaling == "none" else f" + {scaling_name(scaling)}")


def distance_figure(run: Run, experiment: Experiment, law: str) -> Figure | None:
    """Accuracy by the key's distance from the end (the paper's Fig. 5)."""
    ranges = distance_ranges(run, experiment)
    curves = {}
    for name in dict.fromkeys(row.variant for row in experiment.rows if row.scaling == law):
        found = [(i, passkey_between(run, name, law, low, high)) for i, (_, low, high) in enumerate(ranges)]
        if any(estimate for _, estimate in found):
            curves[name] = [(i, estimate) for i, estimate in found if estimate]
    if not curves:
        return None
    canvas, axes = blank(
        f"Passkey by distance, {scaling_name(law)}", "tokens from the key to the end", "accuracy (share of cases)"
    )
    for i, (name, points) in enumerate(curves.items()):
        shift = 0.05 * (i - (len(curves) - 1) / 2)
        _error_bars(
            axes,
            [k + shift for k, _ in points],
            [e for _, e in points],
            label=variant_name(name),
            **variant_style(name),
        )
    axes.set_xticks(range(len(ranges)), [name for name, _, _ in ranges])
    axes.set_xlim(-0.4, len(ranges) - 0.6)
    _share_axis(axes)
    caption = "All lengths together. Bars: 95% Wilson interval."
    return finish(canvas, file_of(experiment.name, law), "distance", caption)


def depth_figure(run: Run, variant: str, law: str) -> Figure | None:
    """A heat map: where in the prompt, at which length, the key is found."""
    lengths = [n for n in passkey_lengths(run) if passkey_at(run, variant, law, n)]
    if not lengths:
        return None
    grid = []
    for step in range(DEPTHS):
        low, high = step / DEPTHS, (step + 1) / DEPTHS + (step == DEPTHS - 1)
        found = [passkey_at_depth(run, variant, law, n, low, high) for n in lengths]
        grid.append([estimate.value if estimate else math.nan for estimate in found])
    title = f"{variant_name(variant)}, {scaling_name(law)}"
    canvas, axes = blank(title, "prompt length (tokens)", "depth of the key", (4.2, 2.9))
    axes.grid(visible=False)
    axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for i, row in enumerate(grid):
        for k, value in enumerate(row):
            colour = INK if math.isnan(value) else "black" if value > 0.5 else "white"
            text = "–" if math.isnan(value) else f"{value:.2f}"
            axes.text(k, i, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(lengths)), [short(n) for n in lengths])
    axes.set_yticks(range(DEPTHS), [f"{100 * i // DEPTHS}–{100 * (i + 1) // DEPTHS}%" for i in range(DEPTHS)])
    caption = "Accuracy; 0% is the start of the prompt, 100% its end."
    return finish(canvas, file_of("depth", variant, law), "depth", caption)


def loss_figure(run: Run) -> Figure | None:
    """Training loss against the step."""
    rows = [row for name in variants_in(run) for row in run.training if row.variant == name and row.losses]
    return _losses(rows, "Training loss", "loss", "training", "loss (nats a token)")


def task_loss_figures(run: Run) -> list[Figure | None]:
    """The same for each task."""
    found = []
    for task in dict.fromkeys(row.task for row in run.tasks):
        rows = [row for row in run.tasks if row.task == task and row.losses]
        found.append(_losses(rows, f"Training loss, {task}", file_of("loss", task), "task-training", "loss (nats)"))
    return found


def _losses(rows: Sequence[Training | TaskResult], title: str, name: str, group: str, unit: str) -> Figure | None:
    if not rows:
        return None
    canvas, axes = blank(title, "optimiser step", unit)
    named: set[str] = set()
    for row in rows:
        label = None if row.variant in named else variant_name(row.variant)
        named.add(row.variant)
        steps, losses = zip(*row.losses, strict=True)
        every = max(1, len(steps) // 8)
        axes.plot(
            steps,
            losses,
            label=label,
            **variant_style(row.variant),
            markevery=every,
            linewidth=1.1,
            markersize=4.5,
            alpha=0.9,
        )
    caption = "One line for each seed; the loss of the training batches, as recorded."
    return finish(canvas, name, group, caption)
