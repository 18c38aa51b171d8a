"""What `farspan analyze` found → figures: angles, scores, attention past the window. This loads matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from farspan.report.canvas import FAINT, INK, Figure, blank, file_of, finish, length_axis, mark_training_length
from farspan.report.look_borders import border_figure, cases_figure
from farspan.report.looks import Look, relation, theorems
from farspan.report.names import LAW_STYLES, variant_name, variant_style

LINE: dict[str, Any] = {"linewidth": 1.6, "markersize": 5}
WEIGHTS = (
    ("plain", "all alike", "#0081c9", "-"),
    ("energy", "by |q||k|", "#E69F00", "--"),
    ("attention", "by attention", "#009E73", ":"),
)


def look_figures(looks: Sequence[Look]) -> list[Figure]:
    """Every figure of the analysed models; models side by side where one axis can hold them."""
    if not looks:
        return []
    made: list[Figure | None] = [layers_figure(looks)]
    for look in looks:
        anomalous = any(row["past_pi"]["plain"] > 0 for row in look.of("census"))
        if anomalous:
            made += [angle_figure(look), pair_figure(look), zone_figure(look)]
            made += [cases_figure(look), border_figure(look)]
        made += [score_figure(look), bound_figure(look), slack_figure(look)]
        made += [drift_figure(look, *what) for what in DRIFTS]
        made += [study_figure(look, row) for row in look.of("study", primary=True)]
    return [figure for figure in made if figure is not None]


def name_of(look: Look) -> str:
    return variant_name(look.label)


def share_axis(axis: Any, digits: int = 0) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, decimals=digits))


def layers_figure(looks: Sequence[Look]) -> Figure:
    """Models side by side: how many pairs begin past π, layer by layer."""
    canvas, axes = blank("Pairs that first rise with distance", "layer", "share of pairs with Θ past π")
    for look in looks:
        rows = look.of("census", region="inside")
        values = [row["past_pi"]["plain"] for row in rows]
        axes.plot([row["layer"] for row in rows], values, label=name_of(look), **variant_style(look.label), **LINE)
    axes.axhline(0.5, color=FAINT, linewidth=1.2, linestyle=":")
    axes.annotate("random vectors", (0, 0.5), xytext=(0, 3), textcoords="offset points", fontsize=8, color=FAINT)
    axes.set_ylim(-0.03, 1.0)
    share_axis(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = "Queries inside the training length; random directions would give one half."
    return finish(canvas, "angles-layers", "angles", caption)


def angle_figure(look: Look) -> Figure:
    """The distribution of the initial angle."""
    canvas, axes = blank(f"Initial angle Θ, {name_of(look)}", "angle from k to q before rotation (degrees)", "share")
    rows = look.of("census", region="inside")
    bins = len(rows[0]["histogram"]["plain"])
    edges = [360 * i / bins for i in range(bins + 1)]
    for weight, label, colour, dash in WEIGHTS:
        mean = [sum(row["histogram"][weight][i] for row in rows) / len(rows) for i in range(bins)]
        axes.stairs(mean, edges, label=label, color=colour, linestyle=dash, linewidth=1.7, baseline=None)
    axes.axvspan(180, 360, color=FAINT, alpha=0.15, linewidth=0)
    axes.annotate(
        "rises first", (270, 1), xycoords=axes.get_xaxis_transform(), va="top", ha="center", fontsize=8, color=INK
    )
    axes.annotate(
        "falls first", (90, 1), xycoords=axes.get_xaxis_transform(), va="top", ha="center", fontsize=8, color=INK
    )
    axes.set(xlim=(0, 360), ylim=(0, None))
    axes.set_xticks(range(0, 361, 90))
    axes.margins(y=0.15)
    share_axis(axes.yaxis, 1)
    caption = f"Mean over layers, in bins of {360 // bins}°. Past 180° (shaded) a term first rises with distance."
    return finish(canvas, file_of("angles-histogram", look.label), "angles", caption)


def pair_figure(look: Look) -> Figure:
    """A heat map: share past π by layer and rotary pair."""
    rows = look.of("census", region="inside")
    canvas, axes = blank(f"Θ past π by pair, {name_of(look)}", "rotary pair j (fast to slow)", "layer")
    axes.grid(visible=False)
    grid = [row["past_pi_pair"]["plain"] for row in rows]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    step = max(1, len(rows) // 8)
    axes.set_yticks(range(0, len(rows), step), [str(row["layer"]) for row in rows[::step]])
    bar = canvas.colorbar(image, ax=axes, ticks=[0, 0.25, 0.5, 0.75, 1.0])
    share_axis(bar.ax.yaxis)
    caption = "Share of pairs of query and key with Θ past π, mean over heads; one half is what random vectors have."
    return finish(canvas, file_of("angles-pairs", look.label), "angles", caption)


def wave_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())


def zone_figure(look: Look) -> Figure:
    """How many of the nearest tokens are damped, under each law."""
    rows, cap = look.of("census", region="inside"), look.model["train_length"]
    canvas, axes = blank(f"Nearest tokens damped, {name_of(look)}", "wavelength of the pair (tokens)", "tokens, mean")
    for law in look.model["laws"]:
        values = [sum(row["damped_pair"][law][j] for row in rows) / len(rows) for j in range(look.model["pairs"])]
        label, colour, marker = LAW_STYLES[law]
        axes.plot(look.wavelengths, values, label=label, color=colour, marker=marker, **{**LINE, "markersize": 4})
    wave_axis(axes)
    axes.set_ylim(0, None)
    caption = f"Over all pairs of query and key, 0 where Θ is not past π; counted up to the training length of {cap:,}."
    return finish(canvas, file_of("zone", look.label), "angles", caption)


def score_figure(look: Look) -> Figure:
    """Logits against distance: median and middle half, in three layers."""
    canvas, axes = blank(f"Score against distance, {name_of(look)}", "distance (tokens)", "logit a(s)/√d")
    rows = look.of("curve")
    chosen = list({row["layer"]: row for row in (rows[0], rows[len(rows) // 2], rows[-1])}.values())
    for row, (colour, dash) in zip(chosen, (("#D55E00", "-"), ("#0081c9", "--"), ("#009E73", "-.")), strict=False):
        at = [i for i, value in enumerate(row["mean"]) if value is not None]
        x = [row["distance"][i] for i in at]
        low, mid, high = ([row["quantiles"][q][i] for i in at] for q in ("0.25", "0.5", "0.75"))
        axes.plot(x, mid, label=f"layer {row['layer']}", color=colour, linestyle=dash, linewidth=1.7)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    _distance_axis(axes, look)
    caption = "Median over queries and heads, and the middle half of them."
    return finish(canvas, file_of("scores", look.label), "scores", caption)


def _distance_axis(axes: Axes, look: Look, at: Literal["top", "bottom"] = "top") -> None:
    """0 has its place: logarithmic from 1 on."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    axes.set_xlim(-0.1, look.model["longest"])
    axes.xaxis.set_minor_locator(NullLocator())
    mark_training_length(axes, look.model["train_length"], at)


def bound_figure(look: Look) -> Figure:
    """The bounds on the decay above what they bound."""
    rows = look.of("curve")
    canvas, axes = blank(f"Long-term decay, {name_of(look)}", "distance (tokens)", "size of the logit")
    # A window layer has no scores beyond its window: each mean is over the layers that have one there.
    holders = {i: [row for row in rows if row["mean"][i] is not None] for i in range(len(rows[0]["mean"]))}
    at = [i for i, held in holders.items() if held]
    x = [rows[0]["distance"][i] for i in at]

    def mean(read: Callable[[Mapping[str, Any], int], float]) -> list[float]:
        return [sum(read(row, i) for row in holders[i]) / len(holders[i]) for i in at]

    def size(row: Mapping[str, Any], i: int) -> float:
        return max(abs(row["quantiles"]["0.05"][i]), abs(row["quantiles"]["0.95"][i]))

    lines = [("bound of Eq. 19", mean(lambda row, i: row["bound_eq19"][i]), "#D55E00", "--")]
    if "eq20" in theorems(look.model["attention"]):
        lines.append(("bound of Eq. 20", mean(lambda row, i: row["bound_eq20"][i]), "#0081c9", "-."))
    lines.append(("measured, 5% to 95%", mean(size), INK, "-"))
    for label, values, colour, dash in lines:
        axes.plot(x, values, label=label, color=colour, linestyle=dash, linewidth=1.7)
    axes.set_yscale("log")
    _distance_axis(axes, look, "bottom")
    caption = "Means over layers, queries and heads; the bounds were checked on every single score."
    if look.of("slack"):
        caption = "Means over layers, queries and heads; the bound holds for the relative part of slack's score alone."
    return finish(canvas, file_of("bounds", look.label), "scores", caption)


DRIFTS = (
    ("even", "evenness of attention", "entropy / its maximum", "Evenness: 1 is attention spread over the whole text."),
    ("far", "far attention", "share of attention", "Far: on keys beyond any distance of training."),
    ("first", "first 4 tokens", "share of attention", "First tokens: where models park attention they do not need."),
    ("logit_top", "largest logit", "logit", "Largest logit: of a query, mean over queries, heads and layers."),
    (
        "excess",
        "excess loss",
        "nats a token",
        "Excess loss: of the last half window before each length, less the loss of the same tokens when the unscaled "
        "model sees one window only.",
    ),
)


def drift_figure(look: Look, field: str, title: str, y: str, caption: str) -> Figure:
    """One quantity against the length, a line for each law; mean over layers and heads."""
    canvas, axes = blank(f"{name_of(look)}: {title}", "length (tokens)", y, (4.2, 3.3))
    for law in look.model["laws"]:
        label, colour, marker = LAW_STYLES[law]
        values = [_at(look, field, law, length) for length in look.model["lengths"]]
        axes.plot(look.model["lengths"], values, label=label, color=colour, marker=marker, **LINE)
    length_axis(axes, look.model["lengths"])
    if field in ("far", "first"):
        share_axis(axes.yaxis, 0 if axes.get_ylim()[1] > 0.1 else 1)
    return finish(canvas, file_of("drift", field, look.label), "drift", caption)


def _at(look: Look, field: str, law: str, length: int) -> float:
    if field == "excess":
        row = look.of("loss", law=law, length=length)[0]
        return float(row["loss"] - row["control"])
    return look.mean("drift", lambda row: _mean(row[field]), law=law, length=length)


def _mean(value: float | list[float]) -> float:
    return sum(value) / len(value) if isinstance(value, list) else value


def slack_figure(look: Look) -> Figure | None:
    """Slack CoCA: what of its score is absolute, and what that does to attention."""
    rows = look.of("slack")
    if not rows:
        return None
    canvas, axes = blank(f"Absolute position in {name_of(look)}", "layer", "share")
    lines = (
        ("absolute_share", "of the score's energy", "#E69F00", "^"),
        ("moved_share", "of attention moved by a shift", "#0081c9", "o"),
    )
    for field, label, colour, marker in lines:
        axes.plot(
            [row["layer"] for row in rows],
            [_mean(row[field]) for row in rows],
            label=label,
            color=colour,
            marker=marker,
            **LINE,
        )
    axes.set_ylim(0, None)
    share_axis(axes.yaxis, 0 if axes.get_ylim()[1] > 0.1 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = "Mean over heads. A relative score has none; the shift is one training length."
    return finish(canvas, file_of("slack", look.label), "slack", caption, columns=2)


def study_figure(look: Look, row: Mapping[str, Any]) -> Figure:
    """One point a head."""
    canvas, axes = blank(
        f"Heads of {name_of(look)}", "share of Θ past π, by |q||k|", "rise of evenness, training length → longest"
    )
    layers = len(row["x"])
    for i, (x, y) in enumerate(zip(row["x"], row["y"], strict=True)):
        shade = i / max(1, layers - 1)
        axes.scatter(x, y, s=24, color=_shade(shade), edgecolor=INK, linewidth=0.3)
    axes.annotate(
        "\n".join(relation(row)),
        (0.02, 0.98),
        xycoords="axes fraction",
        va="top",
        fontsize=9,
        color=INK,
    )
    share_axis(axes.xaxis)
    axes.margins(y=0.25)
    caption = "One point a head, dark for the first layer, light for the last; interval by resampling layers and heads."
    return finish(canvas, file_of("study", look.label), "study", caption)


def _shade(share: float) -> Any:
    import matplotlib

    return matplotlib.colormaps["cividis"](share)
