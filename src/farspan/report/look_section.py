"""What `farspan analyze` found, in words and in one table."""

import math
from collections.abc import Sequence
from typing import Any

from farspan.report.looks import Look, relation, theorems
from farspan.report.names import variant_name
from farspan.report.tables import NOTHING, Cell, Line, Table

TEXTS = {
    "angles": (
        "Where the angle starts",
        "A rotary score is a sum of |q_j||k_j| cos(Θ_j + (m-n)θ_j). Where Θ_j, the angle from k_j to q_j before any "
        "rotation, is past π, the term rises with distance before it falls: the nearest tokens are damped (Sec. 2.2).",
    ),
    "scores": (
        "Score against distance",
        "What the softmax sees, and the paper's bounds on its decay (Eq. 19, Eq. 20), checked on every score counted.",
    ),
    "borders": (
        "Borders",
        "Where a turning term changes direction (Fig. 3, Fig. 7), and which of these borders training never showed.",
    ),
    "drift": (
        "Past the window",
        "Attention, scores and loss as the text outgrows the training length, under each scaling law.",
    ),
    "slack": (
        "Slack under the microscope",
        "The published form's score has terms that turn with m+n: they depend on where the text starts.",
    ),
    "study": (
        "Do anomalous heads behave worse?",
        "Each head's share of anomalous pairs inside the window against what its attention does past it.",
    ),
}
"""Title and opening of each section, by its figures' group."""


def look_verdicts(looks: Sequence[Look]) -> list[str]:
    """The angles of every model, then slack's hidden ones, the bounds, and what the study found."""
    said = [" ".join(_angles(look) for look in looks)] if looks else []
    said += [_slack(look) for look in looks if look.of("slack")]
    said += [_failures(look) for look in looks]
    for look in looks:
        for row in look.of("study", primary=True):
            said.append(
                f"{variant_name(look.label)}, {row['n']} heads: share of Θ past π against the rise of attention's "
                f"evenness past the window, {': '.join(relation(row))}."
            )
    return said


def _angles(look: Look) -> str:
    plain, attention = (_past(look, weight) for weight in ("plain", "attention"))
    name = variant_name(look.label)
    if plain == 0:
        return f"{name}: no pair of query and key starts past π: nothing is damped by its initial angle."
    return (
        f"{name}: {plain:.1%} of pairs of query and key start past π, {attention:.1%} where attention looks; "
        "random directions would give 50%."
    )


def _slack(look: Look) -> str:
    def mean(field: str) -> float:
        return look.mean("slack", lambda row: sum(row[field]) / len(row[field]))

    return (
        f"{variant_name(look.label)}: its vectors are collinear but its score is not: the relative part starts at "
        f"{math.degrees(mean('mean_angle')):.0f}° on average, {mean('rising_share'):.0%} of it rising with distance at "
        f"first; {mean('absolute_share'):.1%} of the score's energy depends on absolute position, and starting the "
        f"text one window later moves {mean('moved_share'):.1%} of attention."
    )


def _failures(look: Look) -> str:
    rows = look.of("curve")
    samples = sum(sum(row["samples"]) for row in rows)
    checks = theorems(look.model["attention"])
    failed = sum(row["broken"][check] for row in rows for check in checks)
    names = ", ".join(f"Eq. {check[2:]}" for check in checks)
    return f"{variant_name(look.label)}: {names} failed on {failed:,} of {samples:,} scores."


def _past(look: Look, weight: str) -> float:
    return look.mean("census", lambda row: row["past_pi"][weight], region="inside")


def look_table(looks: Sequence[Look]) -> Table:
    """The models side by side."""
    longest = max(look.model["longest"] for look in looks)
    columns = (
        "Θ past π",
        "by |q||k|",
        "by attention",
        "attention on damped tokens",
        "the same under PI",
        "evenness, window → longest",
        "excess loss at the longest",
        "effective window",
    )
    lines = [Line(variant_name(look.label), "", tuple(Cell(text) for text in _cells(look))) for look in looks]
    caption = f"Queries inside the training length, all layers; the longest text has {longest:,} tokens. "
    caption += "Excess loss: against the same tokens with the context cut to one window. "
    caption += "Effective window: at least – at most, in tokens, from passkeys (App. B.1)."
    return Table("analysis", "What rotary attention does", caption, columns, tuple(lines), "Model")


def _cells(look: Look) -> list[str]:
    def zone(law: str) -> str:
        if law not in look.model["laws"]:
            return NOTHING
        return f"{look.mean('census', lambda row: row['zone'][law]['attention'], region='inside'):.1%}"

    first, last = look.model["lengths"][0], look.model["lengths"][-1]

    def even(length: int) -> float:
        return look.mean("drift", lambda row: sum(row["even"]) / len(row["even"]), law="none", length=length)

    loss = look.of("loss", law="none", length=last)[0]
    windows = look.of("window", law="none")
    return [
        *(f"{_past(look, weight):.1%}" for weight in ("plain", "energy", "attention")),
        zone("none"),
        zone("pi"),
        f"{even(first):.2f} → {even(last):.2f}",
        f"{loss['loss'] - loss['control']:+.2f}",
        _window(windows[0]) if windows else NOTHING,
    ]


def _window(row: Any) -> str:
    most = "no limit seen" if row["at_most"] is None else f"{row['at_most']:,}"
    return f"{row['at_least']:,} – {most}"


def look_notes(looks: Sequence[Look]) -> list[str]:
    """Conditions a reader must know."""
    if not looks:
        return []
    each = [
        f"{variant_name(look.label)}: {look.model['texts']} text(s), {look.model['tokens']:,} tokens, training length "
        f"{look.model['train_length']:,}, {len(look.model['layers'])} layers, {look.model['heads']} heads"
        for look in looks
    ]
    return [
        *each,
        "Shares weighted by attention look at every key of the sampled queries; the others at evenly spaced keys.",
        "Scaling laws are applied without any further training.",
    ]
