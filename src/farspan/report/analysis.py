"""What `farspan analyze` found → a table and figures. Importing this loads matplotlib."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from farspan.report.figures import FAINT, INK, Curve, Figure, chart
from farspan.report.results import Run
from farspan.report.tables import NOTHING, SCALINGS, Table, file_of, listing, variant_name, variant_style

MODEL = (
    "Θ past π {plain:.1%}; by |q||k| {energy:.1%}; by attention {attention:.1%}; "
    "attention on damped tokens {none:.1%}; the same under PI {linear:.1%}; evenness, window → longest {even}; "
    "excess loss at the longest {excess:+.2f}; effective window {window}; bounds failed {failed:,}; "
    "of scores {scores:,}; training length {train_length:,}; longest {longest:,}; texts {texts:,}; tokens {tokens:,}; "
    "layers {depth}; heads {heads}"
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
ANGLE = "angle from k to q before rotation (degrees)"


Part = tuple[str, str, Table | None, Iterator[Figure | None], str]
"""Anchor, title, table, figures and headline of a section."""


def sections(analyses: Sequence[Run]) -> Iterator[Part]:
    """Yield everything that a page shows of analysed models."""
    text = "Past π a term of the score rises with distance first, and the nearest tokens are damped."
    yield "look-angles", "Initial angles", model_table(analyses), angle_figures(analyses), text
    text = "The paper's bounds on the decay (Eq. 19, Eq. 20) were checked on every score."
    yield "look-scores", "Score against distance", None, score_figures(analyses), text
    text = "Share of pairs that first change direction beyond the training length (Fig. 7)."
    yield "look-borders", "Borders", None, border_figures(analyses), text
    text = "Each scaling is applied without further training."
    yield "look-drift", "Past the window", None, drift_figures(analyses), text


def mean(values: float | Sequence[float]) -> float:
    """Average over heads, or layers, where there is a value for each."""
    return sum(values) / len(values) if isinstance(values, Sequence) else values


def drift(found: Run, what: str, scaling: str, length: int) -> float:
    """Return a mean over layers and heads; "excess": the loss over that of the same tokens with the context cut."""
    if what == "excess":
        row = found.of("loss", scaling=scaling, length=length)[0]
        return float(row.loss - row.control)
    return mean([mean(row[what]) for row in found.of("drift", scaling=scaling, length=length)])


def model_table(analyses: Sequence[Run]) -> Table | None:
    """Compare the analysed models."""
    caption = "Queries inside the training length, all layers. Excess loss: over the same tokens with the context cut. "
    caption += "Effective window: at least – at most, in tokens, from passkeys (App. B.1)."
    rows = [(variant_name(found.model.label), "", _summary(found)) for found in analyses]
    return listing("analysis", "What rotary attention does", MODEL, rows, caption=caption, heading="Model")


def _summary(found: Run) -> dict[str, Any]:
    inside, curves, (first, *_, last) = found.of("census", region="inside"), found.of("curve"), found.model["lengths"]
    made = {weight: mean([row["past_pi"][weight] for row in inside]) for weight, *_ in WEIGHTS}
    for scaling in {"none", "linear"} & set(found.model["scalings"]):
        made[scaling] = mean([row["zone"][scaling]["attention"] for row in inside])
    window = NOTHING
    for row in found.of("window", scaling="none")[:1]:
        window = f"{row.at_least:,} – " + ("no limit seen" if row.at_most is None else f"{row.at_most:,}")
    # Eq. 20 needs initial angles of zero.
    bounds = ("eq19", "eq20", "eq21") if found.model.attention in ("coca-exact", "coca-strict") else ("eq19", "eq21")
    return {
        **found.model,
        **made,
        "even": " → ".join(f"{drift(found, 'even', 'none', n):.2f}" for n in (first, last)),
        "excess": drift(found, "excess", "none", last),
        "window": window,
        "failed": sum(row["broken"][bound] for row in curves for bound in bounds),
        "scores": sum(sum(row["samples"]) for row in curves),
        "depth": len(found.model["layers"]),
    }


# Figures


def draw(
    found: Run, name: str, labels: tuple[str, str, str], curves: Sequence[Curve], caption: str = "", **how: Any
) -> Figure | None:
    """Draw the curves of one model, whose name the title has."""
    title, x, y = labels
    model = found.model.label
    return chart(file_of(name, model), (title.format(variant_name(model)), x, y), curves, caption, **how)


def _styled(look: tuple[str, str, str], x: Sequence[float], y: Sequence[float]) -> Curve:
    label, colour, marker = look
    return Curve(label, x, y, {"color": colour, "marker": marker})


def angle_figures(analyses: Sequence[Run]) -> Iterator[Figure | None]:
    """Draw the share of pairs past π by layer, and the initial angles of each model that has some."""
    curves = []
    for found in analyses:
        rows = found.of("census", region="inside")
        layers, values = [row["layer"] for row in rows], [row["past_pi"]["plain"] for row in rows]
        curves.append(Curve(variant_name(found.model.label), layers, values, variant_style(found.model.label)))
    labels = "Pairs that first rise with distance", "layer", "share of pairs with Θ past π"
    half = lambda axes: axes.axhline(0.5, color=FAINT, linewidth=1.2, linestyle=":")  # noqa: E731
    yield chart("angles-layers", labels, curves, "Dotted: random.", percent=0, ylim=(-0.03, 1.0), then=half)
    for found in with_angles(analyses):
        rows, curves = found.of("census", region="inside"), []
        bins = len(rows[0]["histogram"]["plain"])
        for weight, label, colour, dash in WEIGHTS:
            values = [mean([row["histogram"][weight][i] for row in rows]) for i in range(bins)]
            style = {"color": colour, "linestyle": dash, "drawstyle": "steps-post"}
            curves.append(Curve(label, [360 * i / bins for i in range(bins + 1)], [*values, values[-1]], style))
        labels, caption = ("Initial angle Θ, {}", ANGLE, "share"), "Means over layers and heads."
        yield draw(found, "angles-histogram", labels, curves, caption, percent=1, then=_halves)


def with_angles(analyses: Sequence[Run]) -> list[Run]:
    """Return the models whose initial angles are not all zero."""
    return [found for found in analyses if any(row["past_pi"]["plain"] > 0 for row in found.of("census"))]


def _halves(axes: Axes) -> None:
    axes.axvspan(180, 360, color=FAINT, alpha=0.15, linewidth=0)
    for x, text in ((90, "falls first"), (270, "rises first")):
        axes.text(x, 1, text, transform=axes.get_xaxis_transform(), va="top", ha="center", fontsize=8, color=INK)
    axes.margins(y=0.15)
    axes.set(xlim=(0, 360), xticks=range(0, 361, 90), ylim=(0, None))


def border_figures(analyses: Sequence[Run]) -> Iterator[Figure | None]:
    """Draw the share of pairs that first change direction past the training length (the paper's Fig. 7)."""
    for found in with_angles(analyses):
        waves, curves = [2 * math.pi / theta for theta in found.model["theta"][0]], []
        for border, look in BORDERS.items():
            for row in found.of("borders", scaling="none", border=border):
                curves.append(_styled(look, waves, row["first_past"]))
        labels = "{}: borders first past the window", "wavelength of the pair (tokens)", "share of pairs"
        how: Any = {"percent": 0, "mark": found.model["train_length"], "xscale": "log", "ylim": (-0.03, 1.03)}
        yield draw(found, "borders", labels, curves, **how)


def score_figures(analyses: Sequence[Run]) -> Iterator[Figure | None]:
    """Draw logits against distance in three layers."""
    for found in analyses:
        rows, curves = found.of("curve"), []
        chosen = {row["layer"]: row for row in (rows[0], rows[len(rows) // 2], rows[-1])}.values()
        for row, (colour, dash) in zip(chosen, (("#D55E00", "-"), ("#0081c9", "--"), ("#009E73", "-.")), strict=False):
            at = [i for i, value in enumerate(row["mean"]) if value is not None]  # a window layer has none beyond it
            low, mid, high = ([row["quantiles"][q][i] for i in at] for q in ("0.25", "0.5", "0.75"))
            x, style = [row["distance"][i] for i in at], {"color": colour, "linestyle": dash}
            curves.append(Curve(f"layer {row['layer']}", x, mid, style, [*zip(low, high, strict=True)]))

        def from_zero(axes: Axes, longest: int = found.model["longest"]) -> None:
            axes.set_xscale("symlog", linthresh=1, linscale=0.5)
            axes.set_xlim(-0.1, longest)
            axes.xaxis.set_minor_locator(NullLocator())

        labels = "Score against distance, {}", "distance (tokens)", "logit a(s)/√d"
        how: Any = {"mark": found.model["train_length"], "then": from_zero}
        yield draw(found, "scores", labels, curves, "Median and middle half.", **how)


def drift_figures(analyses: Sequence[Run]) -> Iterator[Figure | None]:
    """Draw each quantity against the length under each scaling."""
    for found in analyses:
        lengths, scalings = found.model["lengths"], found.model["scalings"]
        for what, title, y in DRIFTS:
            curves = [_styled(SCALINGS[s], lengths, [drift(found, what, s, n) for n in lengths]) for s in scalings]
            digits = 0 if any(value > 0.1 for curve in curves for value in curve.y) else 1
            how: Any = {"size": (4.2, 3.3), "lengths": lengths, "percent": digits if what in ("far", "first") else None}
            yield draw(found, f"drift-{what}", (f"{{}}: {title}", "length (tokens)", y), curves, **how)
