"""What `farspan analyze` found → a table and figures. Importing this loads matplotlib."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from farspan.report.figures import FAINT, INK, Figure, blank, finish, length_axis, mark_training_length
from farspan.report.results import Analysis, relation, theorems
from farspan.report.tables import NOTHING, SCALINGS, Table, file_of, listing, variant_name, variant_style

SECTIONS = {
    "angles": (
        "Initial angles",
        "Past π a term of the score rises with distance first, and the nearest tokens are damped.",
    ),
    "scores": (
        "Score against distance",
        "The paper's bounds on the decay (Eq. 19, Eq. 20) were checked on every score.",
    ),
    "borders": ("Borders", "Share of pairs that first change direction beyond the training length (Fig. 7)."),
    "drift": ("Past the window", "Each scaling is applied without further training."),
    "slack": ("Slack CoCA", "Absolute position in slack CoCA's score."),
    "study": ("Anomalous heads", "Angles inside the window against the rise of attention's evenness past it."),
}
WEIGHTS = (
    ("plain", "unweighted", "#0081c9", "-"),
    ("energy", "by |q||k|", "#E69F00", "--"),
    ("attention", "by attention", "#009E73", ":"),
)
BORDERS = {
    "k": ("k: irregular", "#D55E00", "o"),
    "-q": ("−q: every period", "#0081c9", "s"),
    "q": ("q: every period", "#009E73", "^"),
}
DRIFTS = (
    ("even", "evenness of attention", "entropy / its maximum"),
    ("far", "attention beyond any distance of training", "share of attention"),
    ("first", "attention on the first 4 tokens", "share of attention"),
    ("logit_top", "largest logit", "logit"),
    ("excess", "excess loss over a cut context", "nats per token"),
)


def mean(values: float | Sequence[float]) -> float:
    """Average over heads where a value is per head."""
    return sum(values) / len(values) if isinstance(values, Sequence) else values


def excess(found: Analysis, method: str, length: int) -> float:
    """Return how much the loss rises over that of the same tokens with the context cut."""
    row = found.of("loss", law=method, length=length)[0]
    return float(row.loss - row.control)


def analysis_tables(analyses: Sequence[Analysis]) -> list[Table]:
    """Compare the analysed models, and describe slack CoCA's."""
    heads = [
        *("Θ past π", "by |q||k|", "by attention", "attention on damped tokens", "the same under PI"),
        *("evenness, window → longest", "excess loss at the longest", "effective window", "bounds failed", "of scores"),
        *("training length", "longest", "texts", "tokens", "layers", "heads"),
    ]
    caption = "Queries inside the training length, all layers. Excess loss: over the same tokens with the context cut. "
    caption += "Effective window: at least – at most, in tokens, from passkeys (App. B.1)."
    rows = [[variant_name(found.label), "", *_cells(found)] for found in analyses]
    made = [listing("analysis", "What rotary attention does", heads, rows, caption=caption, heading="Model")]
    rows = [[variant_name(found.label), "", *_slack(found)] for found in analyses if found.of("slack")]
    heads = ["mean angle", "rises first", "absolute share of the score", "attention moved by a shift"]
    made.append(listing("analysis-slack", "Slack CoCA's hidden angles", heads, rows, heading="Model"))
    return [table for table in made if table]


def _slack(found: Analysis) -> list[str]:
    names = ("mean_angle", "rising_share", "absolute_share", "moved_share")
    angle, *shares = (mean([mean(row[name]) for row in found.of("slack")]) for name in names)
    return [f"{math.degrees(angle):.0f}°", *(f"{share:.1%}" for share in shares)]


def _cells(found: Analysis) -> list[str]:
    def past_pi(weight: str) -> float:
        return found.mean("census", lambda row: row["past_pi"][weight], region="inside")

    def zone(method: str) -> str:
        if method not in found.model["laws"]:
            return NOTHING
        return f"{found.mean('census', lambda row: row['zone'][method]['attention'], region='inside'):.1%}"

    first, last = found.model["lengths"][0], found.model["lengths"][-1]
    even = [found.mean("drift", lambda row: mean(row["even"]), law="none", length=n) for n in (first, last)]
    curves, window = found.of("curve"), NOTHING
    for row in found.of("window", law="none")[:1]:
        window = f"{row.at_least:,} – " + ("no limit seen" if row.at_most is None else f"{row.at_most:,}")
    failed = sum(row["broken"][check] for row in curves for check in theorems(found.model["attention"]))
    return [
        *(f"{past_pi(weight):.1%}" for weight, *_ in WEIGHTS),
        *(zone("none"), zone("linear"), " → ".join(f"{x:.2f}" for x in even)),
        *(f"{excess(found, 'none', last):+.2f}", window),
        *(f"{failed:,}", f"{sum(sum(row['samples']) for row in curves):,}"),
        *(f"{found.model[name]:,}" for name in ("train_length", "longest", "texts", "tokens")),
        *(str(len(found.model["layers"])), str(found.model["heads"])),
    ]


def analysis_figures(analyses: Sequence[Analysis]) -> list[Figure]:
    """Draw every analysed model; those that one axis can hold together."""
    made = [layers_figure(analyses)] if analyses else []
    for found in analyses:
        if any(row["past_pi"]["plain"] > 0 for row in found.of("census")):
            made += [angle_figure(found), pair_figure(found), zone_figure(found), border_figure(found)]
        made += [score_figure(found), bound_figure(found), *([slack_figure(found)] if found.of("slack") else [])]
        made += [drift_figure(found, *what) for what in DRIFTS]
        made += [head_figure(found, row) for row in found.of("study", primary=True)]
    return made


def _percent(axis: Any, digits: int = 0) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, decimals=digits))


def _waves(found: Analysis, axes: Axes) -> list[float]:
    """Put the wavelengths of the rotary pairs on x."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    return [2 * math.pi / theta for theta in found.model["theta"][0]]


def layers_figure(analyses: Sequence[Analysis]) -> Figure:
    """Draw the share of pairs past π by layer."""
    canvas, axes = blank("Pairs that first rise with distance", "layer", "share of pairs with Θ past π")
    for found in analyses:
        rows = found.of("census", region="inside")
        values = [row["past_pi"]["plain"] for row in rows]
        axes.plot([row["layer"] for row in rows], values, label=variant_name(found.label), **variant_style(found.label))
    axes.axhline(0.5, color=FAINT, linewidth=1.2, linestyle=":")
    axes.set_ylim(-0.03, 1.0)
    _percent(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(canvas, "angles-layers", "angles", "Dotted: random directions.")


def angle_figure(found: Analysis) -> Figure:
    """Draw the distribution of the initial angle."""
    title = f"Initial angle Θ, {variant_name(found.label)}"
    canvas, axes = blank(title, "angle from k to q before rotation (degrees)", "share")
    rows = found.of("census", region="inside")
    bins = len(rows[0]["histogram"]["plain"])
    for weight, label, colour, dash in WEIGHTS:
        values = [sum(row["histogram"][weight][i] for row in rows) / len(rows) for i in range(bins)]
        edges = [360 * i / bins for i in range(bins + 1)]
        axes.stairs(values, edges, label=label, color=colour, linestyle=dash, linewidth=1.7, baseline=None)
    axes.axvspan(180, 360, color=FAINT, alpha=0.15, linewidth=0)
    for x, text in ((90, "falls first"), (270, "rises first")):
        axes.annotate(text, (x, 1), xycoords=axes.get_xaxis_transform(), va="top", ha="center", fontsize=8, color=INK)
    axes.margins(y=0.15)
    axes.set(xlim=(0, 360), xticks=range(0, 361, 90), ylim=(0, None))
    _percent(axes.yaxis, 1)
    return finish(canvas, file_of("angles-histogram", found.label), "angles", "Mean over layers.")


def pair_figure(found: Analysis) -> Figure:
    """Draw the share past π by layer and rotary pair."""
    rows = found.of("census", region="inside")
    canvas, axes = blank(f"Θ past π by pair, {variant_name(found.label)}", "rotary pair j (fast to slow)", "layer")
    axes.grid(visible=False)
    grid = [row["past_pi_pair"]["plain"] for row in rows]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    step = max(1, len(rows) // 8)
    axes.set_yticks(range(0, len(rows), step), [str(row["layer"]) for row in rows[::step]])
    _percent(canvas.colorbar(image, ax=axes, ticks=[0, 0.25, 0.5, 0.75, 1.0]).ax.yaxis)
    return finish(canvas, file_of("angles-pairs", found.label), "angles", "Mean over heads.")


def zone_figure(found: Analysis) -> Figure:
    """Draw how many of the nearest tokens are damped under each scaling."""
    rows = found.of("census", region="inside")
    title = f"Nearest tokens damped, {variant_name(found.label)}"
    canvas, axes = blank(title, "wavelength of the pair (tokens)", "tokens, mean")
    for method in found.model["laws"]:
        values = [sum(row["damped_pair"][method][j] for row in rows) / len(rows) for j in range(found.model["pairs"])]
        label, colour, marker = SCALINGS[method]
        axes.plot(_waves(found, axes), values, label=label, color=colour, marker=marker)
    axes.set_ylim(0, None)
    return finish(canvas, file_of("zone", found.label), "angles", "Counted up to the training length.")


def border_figure(found: Analysis) -> Figure:
    """Draw the borders that longer distances reach and training did not."""
    title = f"{variant_name(found.label)}: borders first past the window"
    canvas, axes = blank(title, "wavelength of the pair (tokens)", "share of pairs")
    for border, (label, colour, marker) in BORDERS.items():
        for row in found.of("borders", law="none", border=border):
            axes.plot(_waves(found, axes), row["first_past"], label=label, color=colour, marker=marker)
    axes.set_ylim(-0.03, 1.03)
    _percent(axes.yaxis)
    axes.axvline(found.model["train_length"], color=FAINT, linewidth=1.2, linestyle=":")
    return finish(canvas, file_of("borders", found.label), "borders", "Dotted: the training length.")


def _distances(axes: Axes, found: Analysis, at: str = "top") -> None:
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xlim(-0.1, found.model["longest"])
    axes.xaxis.set_minor_locator(NullLocator())
    mark_training_length(axes, found.model["train_length"], at)


def score_figure(found: Analysis) -> Figure:
    """Draw logits against distance in three layers."""
    canvas, axes = blank(f"Score against distance, {variant_name(found.label)}", "distance (tokens)", "logit a(s)/√d")
    rows = found.of("curve")
    chosen = {row["layer"]: row for row in (rows[0], rows[len(rows) // 2], rows[-1])}.values()
    for row, (colour, dash) in zip(chosen, (("#D55E00", "-"), ("#0081c9", "--"), ("#009E73", "-.")), strict=False):
        at = [i for i, value in enumerate(row["mean"]) if value is not None]
        x = [row["distance"][i] for i in at]
        low, mid, high = ([row["quantiles"][q][i] for i in at] for q in ("0.25", "0.5", "0.75"))
        axes.plot(x, mid, label=f"layer {row['layer']}", color=colour, linestyle=dash)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    _distances(axes, found)
    return finish(canvas, file_of("scores", found.label), "scores", "Median and middle half over queries and heads.")


def bound_figure(found: Analysis) -> Figure:
    """Draw the bounds on the decay above what they bound."""
    rows = found.of("curve")
    canvas, axes = blank(f"Long-term decay, {variant_name(found.label)}", "distance (tokens)", "size of the logit")
    # A window layer has no scores beyond its window: each mean is over the layers that have one there.
    holders = {i: [row for row in rows if row["mean"][i] is not None] for i in range(len(rows[0]["mean"]))}
    at = [i for i, held in holders.items() if held]

    def draw(label: str, colour: str, dash: str, read: Callable[[Mapping[str, Any], int], float]) -> None:
        values = [sum(read(row, i) for row in holders[i]) / len(holders[i]) for i in at]
        axes.plot([rows[0]["distance"][i] for i in at], values, label=label, color=colour, linestyle=dash)

    draw("bound of Eq. 19", "#D55E00", "--", lambda row, i: row["bound_eq19"][i])
    if "eq20" in theorems(found.model["attention"]):
        draw("bound of Eq. 20", "#0081c9", "-.", lambda row, i: row["bound_eq20"][i])
    draw("measured, 5% to 95%", INK, "-", lambda row, i: max(abs(row["quantiles"][q][i]) for q in ("0.05", "0.95")))
    axes.set_yscale("log")
    _distances(axes, found, "bottom")
    caption = "Slack CoCA: the bound holds for the relative part alone." if found.of("slack") else ""
    return finish(canvas, file_of("bounds", found.label), "scores", caption)


def drift_figure(found: Analysis, field: str, title: str, y: str) -> Figure:
    """Draw one quantity against the length for each scaling."""
    canvas, axes = blank(f"{variant_name(found.label)}: {title}", "length (tokens)", y, (4.2, 3.3))
    lengths = found.model["lengths"]

    def at(method: str, n: int) -> float:
        if field == "excess":
            return excess(found, method, n)
        return found.mean("drift", lambda row: mean(row[field]), law=method, length=n)

    for method in found.model["laws"]:
        label, colour, marker = SCALINGS[method]
        axes.plot(lengths, [at(method, n) for n in lengths], label=label, color=colour, marker=marker)
    length_axis(axes, lengths)
    if field in ("far", "first"):
        _percent(axes.yaxis, 0 if axes.get_ylim()[1] > 0.1 else 1)
    return finish(canvas, file_of("drift", field, found.label), "drift")


def slack_figure(found: Analysis) -> Figure:
    """Draw what of slack CoCA's score is absolute, and what that does to attention."""
    rows = found.of("slack")
    canvas, axes = blank(f"Absolute position in {variant_name(found.label)}", "layer", "share")
    for field, label, colour, marker in (
        ("absolute_share", "of the score's energy", "#E69F00", "^"),
        ("moved_share", "of attention moved by a shift", "#0081c9", "o"),
    ):
        values = [mean(row[field]) for row in rows]
        axes.plot([row["layer"] for row in rows], values, label=label, color=colour, marker=marker)
    axes.set_ylim(0, None)
    _percent(axes.yaxis, 0 if axes.get_ylim()[1] > 0.1 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(canvas, file_of("slack", found.label), "slack", "The shift is one training length.", columns=2)


def head_figure(found: Analysis, row: Mapping[str, Any]) -> Figure:
    """Draw one point per head."""
    title, y = f"Heads of {variant_name(found.label)}", "rise of evenness, training length → longest"
    canvas, axes = blank(title, "share of Θ past π, by |q||k|", y)
    for i, (xs, ys) in enumerate(zip(row["x"], row["y"], strict=True)):
        colour = matplotlib.colormaps["cividis"](i / max(1, len(row["x"]) - 1))
        axes.scatter(xs, ys, s=24, color=colour, edgecolor=INK, linewidth=0.3)
    said = "\n".join(relation(row))
    axes.annotate(said, (0.02, 0.98), xycoords="axes fraction", va="top", fontsize=9, color=INK)
    _percent(axes.xaxis)
    axes.margins(y=0.25)
    caption = "Dark: the first layer. Interval by resampling layers and heads."
    return finish(canvas, file_of("study", found.label), "study", caption)
