"""What `farspan analyze` found → a table and figures. Importing this loads matplotlib."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.scale import SymmetricalLogScale

from farspan.report.figures import FAINT, INK, Curve, Figure, chart
from farspan.report.results import Run
from farspan.report.tables import SCALINGS, Table, file_of, listing, variant_name, variant_style

MODEL = (
    "Θ past π {plain:.1%}; by |q||k| {energy:.1%}; by attention {attention:.1%}; "
    "attention on damped tokens {none:.1%}; the same under PI {linear:.1%}; evenness, window → longest {even}; "
    "excess loss at the longest {excess:+.2f}; training length {train_length:,}; longest {longest:,}; texts {texts:,}; "
    "tokens {tokens:,}; layers {depth}; heads {heads}"
)
WEIGHTS = {
    "plain": ("unweighted", {"color": "#0081c9", "linestyle": "-"}),
    "energy": ("by |q||k|", {"color": "#E69F00", "linestyle": "--"}),
    "attention": ("by attention", {"color": "#009E73", "linestyle": ":"}),
}
BORDERS = {
    "k": ("k: irregular", "#D55E00", "o"),
    "-q": ("−q: every period", "#0081c9", "s"),
    "q": ("q: every period", "#009E73", "^"),
}
LAYERS = (("#D55E00", "-"), ("#0081c9", "--"), ("#009E73", "-."))
DRIFTS = (
    ("even", "evenness of attention", "entropy / its maximum"),
    ("far", "attention beyond any distance of training", "share of attention"),
    ("first", "attention on the first 4 tokens", "share of attention"),
    ("logit_top", "largest logit", "logit"),
    ("excess", "excess loss over a cut context", "nats per token"),
)


Part = tuple[str, str, Table | None, Iterator[Figure | None], str]
"""Anchor, title, table, figures and headline of a section."""


def sections(analyses: Sequence[Run]) -> Iterator[Part]:
    """Yield everything that a page shows of analysed models."""
    text = "Past π a term of the score rises with distance first, and the nearest tokens are damped."
    yield "look-angles", "Initial angles", model_table(analyses), angle_figures(analyses), text
    text = "What the softmax sees, by the distance between query and key, in three layers."
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
    caption = "Queries inside the training length, all layers. Excess loss: over the same tokens with the context cut."
    lines = []
    for found in analyses:
        inside, (first, *_, last) = found.of("census", region="inside"), found.model["lengths"]
        made = found.model | {weight: mean([row["past_pi"][weight] for row in inside]) for weight in WEIGHTS}
        for scaling in {"none", "linear"} & set(found.model["scalings"]):
            made[scaling] = mean([row["zone"][scaling]["attention"] for row in inside])
        made["even"] = " → ".join(f"{drift(found, 'even', 'none', n):.2f}" for n in (first, last))
        made["excess"], made["depth"] = drift(found, "excess", "none", last), len(found.model["layers"])
        lines.append((variant_name(found.model.label), "", made))
    return listing("analysis", "What rotary attention does", MODEL, lines, caption=caption, heading="Model")


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
    how: Any = {"then": lambda axes: axes.axhline(0.5, color=FAINT, linewidth=1.2, linestyle=":"), "ylim": (-0.03, 1.0)}
    yield chart("angles-layers", labels, curves, "Dotted: random.", percent=True, **how)
    labels = "Initial angle Θ, {}", "angle from k to q before rotation (degrees)", "share"
    for found in with_angles(analyses):
        curves = []
        for weight, (label, style) in WEIGHTS.items():
            bins = [row["histogram"][weight] for row in found.of("census", region="inside")]
            values = [mean(each) for each in zip(*bins, strict=True)]
            degrees = [360 * i / len(values) for i in range(len(values) + 1)]
            curves.append(Curve(label, degrees, [*values, values[-1]], {**style, "drawstyle": "steps-post"}))
        yield draw(
            found, "angles-histogram", labels, curves, "Means over layers and heads.", percent=True, then=_halves
        )


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
    labels = "{}: borders first past the window", "wavelength of the pair (tokens)", "share of pairs"
    for found in with_angles(analyses):
        waves = [2 * math.pi / theta for theta in found.model["theta"][0]]
        rows = {row.border: row.first_past for row in found.of("borders", scaling="none")}
        curves = [_styled(look, waves, rows[border]) for border, look in BORDERS.items()]
        how: Any = {"percent": True, "mark": found.model["train_length"], "xscale": "log", "ylim": (-0.03, 1.03)}
        yield draw(found, "borders", labels, curves, **how)


def score_figures(analyses: Sequence[Run]) -> Iterator[Figure | None]:
    """Draw logits against distance in three layers."""
    labels = "Score against distance, {}", "distance (tokens)", "logit a(s)/√d"
    for found in analyses:
        rows, curves = found.of("curve"), []
        chosen = {row["layer"]: row for row in (rows[0], rows[len(rows) // 2], rows[-1])}.values()
        for row, (colour, dash) in zip(chosen, LAYERS, strict=False):
            at = [i for i, value in enumerate(row["mean"]) if value is not None]  # a window layer has none beyond it
            low, mid, high = ([row["quantiles"][q][i] for i in at] for q in ("0.25", "0.5", "0.75"))
            x, style = [row["distance"][i] for i in at], {"color": colour, "linestyle": dash}
            curves.append(Curve(f"layer {row['layer']}", x, mid, style, [*zip(low, high, strict=True)]))
        scale = SymmetricalLogScale(None, linthresh=1, linscale=0.5)  # from 0, the query itself
        how: Any = {"mark": found.model["train_length"], "xscale": scale, "xlim": (-0.1, found.model["longest"])}
        yield draw(found, "scores", labels, curves, "Median and middle half.", **how)


def drift_figures(analyses: Sequence[Run]) -> Iterator[Figure | None]:
    """Draw each quantity against the length under each scaling."""
    for found in analyses:
        lengths, scalings = found.model["lengths"], found.model["scalings"]
        for what, title, y in DRIFTS:
            curves = [_styled(SCALINGS[s], lengths, [drift(found, what, s, n) for n in lengths]) for s in scalings]
            labels = f"{{}}: {title}", "length (tokens)", y
            yield draw(found, f"drift-{what}", labels, curves, lengths=lengths, percent=what in ("far", "first"))
