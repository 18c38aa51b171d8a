"""What `farspan analyze` found → a table and figures. Importing this loads matplotlib."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter

from farspan.report.figures import FAINT, INK, Curve, Figure, blank, chart, finish
from farspan.report.results import Record, Run
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
MODEL = (
    "Θ past π {plain:.1%}; by |q||k| {energy:.1%}; by attention {attention:.1%}; "
    "attention on damped tokens {none:.1%}; the same under PI {linear:.1%}; evenness, window → longest {even}; "
    "excess loss at the longest {excess:+.2f}; effective window {window}; bounds failed {failed:,}; "
    "of scores {scores:,}; training length {train_length:,}; longest {longest:,}; texts {texts:,}; tokens {tokens:,}; "
    "layers {depth}; heads {heads}"
)
SLACK = (
    "mean angle {mean_angle:.0f}°; rises first {rising_share:.1%}; absolute share of the score {absolute_share:.1%}; "
    "attention moved by a shift {moved_share:.1%}"
)
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
    """Average over heads, or layers, where there is a value for each."""
    return sum(values) / len(values) if isinstance(values, Sequence) else values


def theorems(attention: str) -> tuple[str, ...]:
    """Return the bounds that hold on every score: Eq. 20 needs initial angles of zero."""
    return ("eq19", "eq20", "eq21") if attention in ("coca-exact", "coca-strict") else ("eq19", "eq21")


def relation(row: Mapping[str, Any]) -> str:
    """Describe the correlation that an analysis found.

    >>> print(relation({"rho": 0.314, "ci95": [-0.1, 0.6], "null": True}))
    ρ = 0.31 (95% -0.10 to 0.60)
    no relation told from chance
    """
    low, high = row["ci95"]
    found = "no relation told from chance" if row["null"] else "a relation beyond chance"
    return f"ρ = {row['rho']:.2f} (95% {low:.2f} to {high:.2f})\n{found}"


def drift(found: Run, what: str, scaling: str, length: int) -> float:
    """Return a mean over layers and heads; "excess": the loss over that of the same tokens with the context cut."""
    if what == "excess":
        row = found.of("loss", scaling=scaling, length=length)[0]
        return float(row.loss - row.control)
    return mean([mean(row[what]) for row in found.of("drift", scaling=scaling, length=length)])


def analysis_tables(analyses: Sequence[Run]) -> dict[str, Table | None]:
    """Compare the analysed models, and describe slack CoCA's, each for its section."""
    caption = "Queries inside the training length, all layers. Excess loss: over the same tokens with the context cut. "
    caption += "Effective window: at least – at most, in tokens, from passkeys (App. B.1)."
    rows = [(variant_name(found.model.label), "", _summary(found)) for found in analyses]
    angles = listing("analysis", "What rotary attention does", MODEL, rows, caption=caption, heading="Model")
    rows = [(variant_name(found.model.label), "", _slack(found)) for found in analyses if found.of("slack")]
    slack = listing("analysis-slack", "Slack CoCA's hidden angles", SLACK, rows, heading="Model")
    return {"angles": angles, "slack": slack}


def _slack(found: Run) -> dict[str, float]:
    names = ("mean_angle", "rising_share", "absolute_share", "moved_share")
    made = {name: mean([mean(row[name]) for row in found.of("slack")]) for name in names}
    return made | {"mean_angle": math.degrees(made["mean_angle"])}


def _summary(found: Run) -> dict[str, Any]:
    inside, curves, (first, *_, last) = found.of("census", region="inside"), found.of("curve"), found.model["lengths"]
    made = {weight: mean([row["past_pi"][weight] for row in inside]) for weight, *_ in WEIGHTS}
    for scaling in {"none", "linear"} & set(found.model["scalings"]):
        made[scaling] = mean([row["zone"][scaling]["attention"] for row in inside])
    window = NOTHING
    for row in found.of("window", scaling="none")[:1]:
        window = f"{row.at_least:,} – " + ("no limit seen" if row.at_most is None else f"{row.at_most:,}")
    return {
        **found.model,
        **made,
        "even": " → ".join(f"{drift(found, 'even', 'none', n):.2f}" for n in (first, last)),
        "excess": drift(found, "excess", "none", last),
        "window": window,
        "failed": sum(row["broken"][check] for row in curves for check in theorems(found.model["attention"])),
        "scores": sum(sum(row["samples"]) for row in curves),
        "depth": len(found.model["layers"]),
    }


# Figures


def analysis_figures(analyses: Sequence[Run]) -> Iterator[Figure | None]:
    """Draw every analysed model; those that one axis can hold together."""
    yield layers_figure(analyses)
    for found in analyses:
        if any(row["past_pi"]["plain"] > 0 for row in found.of("census")):
            yield from angle_figures(found)
        yield from score_figures(found)
        yield from drift_figures(found)
        for row in found.of("study", primary=True):
            yield head_figure(found, row)


def draw(
    found: Run, name: str, group: str, labels: tuple[str, str, str], curves: Sequence[Curve], **how: Any
) -> Figure | None:
    """Draw the curves of one model, whose name the title has."""
    title, x, y = labels
    title = title.format(variant_name(found.model.label))
    return chart(file_of(name, found.model.label), group, (title, x, y), curves, **how)


def _styled(label: str, colour: str, marker: str, x: Sequence[float], y: Sequence[float]) -> Curve:
    return Curve(label, x, y, {"color": colour, "marker": marker})


def _digits(curves: Sequence[Curve]) -> int:
    return 0 if any(y > 0.1 for curve in curves for y in curve.y) else 1


def layers_figure(analyses: Sequence[Run]) -> Figure | None:
    """Draw the share of pairs past π by layer."""
    curves = []
    for found in analyses:
        rows = found.of("census", region="inside")
        layers, values = [row["layer"] for row in rows], [row["past_pi"]["plain"] for row in rows]
        curves.append(Curve(variant_name(found.model.label), layers, values, variant_style(found.model.label)))

    def half(axes: Axes) -> None:
        axes.axhline(0.5, color=FAINT, linewidth=1.2, linestyle=":")

    labels, caption = (
        ("Pairs that first rise with distance", "layer", "share of pairs with Θ past π"),
        "Dotted: random.",
    )
    return chart(
        "angles-layers", "angles", labels, curves, caption, percent=0, whole=True, ylim=(-0.03, 1.0), then=half
    )


def angle_figures(found: Run) -> Iterator[Figure | None]:
    """Draw the initial angles: their distribution, the share past π by layer and pair, and what follows from them."""
    rows, waves = found.of("census", region="inside"), [2 * math.pi / theta for theta in found.model["theta"][0]]
    bins, curves = len(rows[0]["histogram"]["plain"]), []
    for weight, label, colour, dash in WEIGHTS:
        values = [mean([row["histogram"][weight][i] for row in rows]) for i in range(bins)]
        style = {"color": colour, "linestyle": dash, "drawstyle": "steps-post"}
        curves.append(Curve(label, [360 * i / bins for i in range(bins + 1)], [*values, values[-1]], style))

    def halves(axes: Axes) -> None:
        axes.axvspan(180, 360, color=FAINT, alpha=0.15, linewidth=0)
        for x, text in ((90, "falls first"), (270, "rises first")):
            axes.text(x, 1, text, transform=axes.get_xaxis_transform(), va="top", ha="center", fontsize=8, color=INK)
        axes.margins(y=0.15)
        axes.set(xlim=(0, 360), xticks=range(0, 361, 90), ylim=(0, None))

    labels = "Initial angle Θ, {}", "angle from k to q before rotation (degrees)", "share"
    how: Any = {"caption": "Means over layers and heads.", "percent": 1, "then": halves}
    yield draw(found, "angles-histogram", "angles", labels, curves, **how)

    canvas, axes = blank(
        f"Θ past π by pair, {variant_name(found.model.label)}", "rotary pair j (fast to slow)", "layer"
    )
    axes.grid(visible=False)
    pairs, step = [row["past_pi_pair"]["plain"] for row in rows], max(1, len(rows) // 8)
    image = axes.imshow(pairs, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    axes.set_yticks(range(0, len(rows), step), [str(row["layer"]) for row in rows[::step]])
    canvas.colorbar(image, ax=axes, ticks=[0, 0.25, 0.5, 0.75, 1.0], format=PercentFormatter(1.0, decimals=0))
    yield finish(canvas, file_of("angles-pairs", found.model.label), "angles")

    curves = []
    for scaling in found.model["scalings"]:
        values = [mean([row["damped_pair"][scaling][j] for row in rows]) for j in range(found.model["pairs"])]
        curves.append(_styled(*SCALINGS[scaling], waves, values))
    labels = "Nearest tokens damped, {}", "wavelength of the pair (tokens)", "tokens, mean"
    how = {"caption": "Damped tokens are counted up to the training length.", "xscale": "log", "ylim": (0, None)}
    yield draw(found, "zone", "angles", labels, curves, **how)

    curves = []
    for border, look in BORDERS.items():
        for row in found.of("borders", scaling="none", border=border):
            curves.append(_styled(*look, waves, row["first_past"]))
    labels = "{}: borders first past the window", "wavelength of the pair (tokens)", "share of pairs"
    how = {"percent": 0, "mark": found.model["train_length"], "xscale": "log", "ylim": (-0.03, 1.03)}
    yield draw(found, "borders", "borders", labels, curves, **how)


def score_figures(found: Run) -> Iterator[Figure | None]:
    """Draw logits against distance in three layers, and the bounds on the decay above what they bound."""
    rows, curves = found.of("curve"), []
    chosen = {row["layer"]: row for row in (rows[0], rows[len(rows) // 2], rows[-1])}.values()
    for row, (colour, dash) in zip(chosen, (("#D55E00", "-"), ("#0081c9", "--"), ("#009E73", "-.")), strict=False):
        at = [i for i, value in enumerate(row["mean"]) if value is not None]
        low, mid, high = ([row["quantiles"][q][i] for i in at] for q in ("0.25", "0.5", "0.75"))
        x, style = [row["distance"][i] for i in at], {"color": colour, "linestyle": dash}
        curves.append(Curve(f"layer {row['layer']}", x, mid, style, [*zip(low, high, strict=True)]))

    def from_zero(axes: Axes) -> None:
        axes.set_xscale("symlog", linthresh=1, linscale=0.5)
        axes.set_xlim(-0.1, found.model["longest"])
        axes.xaxis.set_minor_locator(NullLocator())

    how: Any = {"mark": found.model["train_length"], "then": from_zero}
    labels, caption = ("Score against distance, {}", "distance (tokens)", "logit a(s)/√d"), "Median and middle half."
    yield draw(found, "scores", "scores", labels, curves, caption=caption, **how)

    # A window layer has no scores beyond its window: each mean is over the layers that have one there.
    holders = {i: [row for row in rows if row["mean"][i] is not None] for i in range(len(rows[0]["mean"]))}
    at = [i for i, held in holders.items() if held]
    curves, x = [], [rows[0]["distance"][i] for i in at]
    for name, label, colour, dash in (
        ("eq19", "bound of Eq. 19", "#D55E00", "--"),
        ("eq20", "bound of Eq. 20", "#0081c9", "-."),
        ("measured", "measured, 5% to 95%", INK, "-"),
    ):
        if name in (*theorems(found.model["attention"]), "measured"):
            values = [mean([_size(row, name, i) for row in holders[i]]) for i in at]
            curves.append(Curve(label, x, values, {"color": colour, "linestyle": dash}))
    labels = "Long-term decay, {}", "distance (tokens)", "size of the logit"
    caption = "Slack CoCA: the bound holds for the relative part alone." if found.of("slack") else ""
    yield draw(found, "bounds", "scores", labels, curves, caption=caption, yscale="log", at="bottom", **how)


def _size(row: Record, name: str, i: int) -> float:
    if name == "measured":
        return max(abs(row["quantiles"][q][i]) for q in ("0.05", "0.95"))
    return float(row[f"bound_{name}"][i])


def drift_figures(found: Run) -> Iterator[Figure | None]:
    """Draw each quantity against the length under each scaling, and what of slack CoCA's score is absolute."""
    lengths = found.model["lengths"]
    for what, title, y in DRIFTS:
        curves = []
        for scaling in found.model["scalings"]:
            curves.append(_styled(*SCALINGS[scaling], lengths, [drift(found, what, scaling, n) for n in lengths]))
        percent = _digits(curves) if what in ("far", "first") else None
        labels = f"{{}}: {title}", "length (tokens)", y
        how: Any = {"size": (4.2, 3.3), "lengths": lengths, "percent": percent}
        yield draw(found, f"drift-{what}", "drift", labels, curves, **how)
    rows = found.of("slack")
    layers = [row["layer"] for row in rows]
    curves = [
        _styled("of the score's energy", "#E69F00", "^", layers, [mean(row["absolute_share"]) for row in rows]),
        _styled("of attention moved by a shift", "#0081c9", "o", layers, [mean(row["moved_share"]) for row in rows]),
    ]
    labels, caption = ("Absolute position in {}", "layer", "share"), "The shift is one training length."
    how = {"caption": caption, "legend": 2, "percent": _digits(curves), "whole": True, "ylim": (0, None)}
    yield draw(found, "slack", "slack", labels, curves, **how)


def head_figure(found: Run, row: Record) -> Figure | None:
    """Draw one point per head, with the correlation."""
    curves = []
    for i, (xs, ys) in enumerate(zip(row["x"], row["y"], strict=True)):
        colour = matplotlib.colormaps["cividis"](i / max(1, len(row["x"]) - 1))
        style = {"color": colour, "linestyle": "", "marker": "o", "markeredgecolor": INK, "markeredgewidth": 0.3}
        curves.append(Curve(None, xs, ys, style))

    def say(axes: Axes) -> None:
        axes.annotate(relation(row), (0.02, 0.98), xycoords="axes fraction", va="top", fontsize=9, color=INK)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.margins(y=0.25)

    labels = "Heads of {}", "share of Θ past π, by |q||k|", "rise of evenness, training length → longest"
    caption = "Dark: the first layer. Interval by resampling layers and heads."
    return draw(found, "study", "study", labels, curves, caption=caption, then=say)
