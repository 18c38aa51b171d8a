"""Experiments and measurements → tables: ours beside the paper's, aligned by multiples of the training length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from farspan.report.collect import Run
from farspan.report.estimates import (
    Estimate,
    control_at,
    passkey_at,
    passkey_between,
    perplexity_at,
    scalings,
)
from farspan.report.experiment import Experiment, Row
from farspan.report.names import scaling_name, variant_name, variants_in
from farspan.report.tables import Cell, Line, Table, counts_text, estimate_cell, perplexity_text, share_text

Measure = Callable[[str, str, int], Estimate | None]


@dataclass(frozen=True)
class Column:
    """A multiple of the training length, and the length it means for us and for the paper."""

    ours: int | None
    paper: int | None
    same: bool
    """Whether both have the same training length, so that a length means the same for both."""

    @property
    def heading(self) -> str:
        if self.same or self.paper is None:
            return f"{self.ours or self.paper:,}"
        return f"(paper {self.paper:,})" if self.ours is None else f"{self.ours:,} (paper {self.paper:,})"


def columns(run: Run, experiment: Experiment, lengths: Sequence[int]) -> list[Column]:
    """Our lengths and the paper's, matched by their ratio to the training length."""
    ours = {Fraction(length, run.train_length or length): length for length in lengths}
    paper = {Fraction(length, experiment.train_length): length for length in experiment.lengths}
    same = run.train_length in (None, experiment.train_length)
    return [Column(ours.get(ratio), paper.get(ratio), same) for ratio in sorted(ours.keys() | paper.keys())]


def experiment_tables(run: Run, experiment: Experiment) -> list[Table]:
    """The tables of an experiment: two where it measures two kinds, or near and far."""
    made = []
    for kind in ("perplexity", "passkey", "near-far"):
        rows = experiment.rows_of(kind)
        for part in ("near", "far") if kind == "near-far" else ("all",):
            if rows:
                made.append(_by_length(run, experiment, rows, kind, part))
    if rows := experiment.rows_of("distance"):
        made.append(_by_distance(run, experiment, rows))
    return made


def _by_length(run: Run, experiment: Experiment, rows: Sequence[Row], kind: str, part: str) -> Table:
    perplexity = kind == "perplexity"
    lengths = sliding_lengths(run) if perplexity else passkey_lengths(run)
    across = columns(run, experiment, lengths)
    measure = _measure(run, kind, part)
    lines = [line for row in rows for line in _lines(run, experiment, row, across, measure, perplexity)]
    mixed = len({row.kind for row in experiment.rows}) > 1
    suffix = {"near": "near", "far": "far"}.get(part, kind if mixed else "")
    what = {"near": "key within one training length of the end", "far": "key farther from the end"}
    subject = what.get(part, "perplexity, lower is better" if perplexity else "passkey accuracy, higher is better")
    return Table(
        name="-".join(filter(None, (experiment.name, suffix))),
        title=f"{experiment.title} ({subject})",
        caption=experiment.caption + _alignment(run, experiment) + _small_print(run, perplexity),
        columns=tuple(column.heading for column in across),
        lines=tuple(lines),
    )


def _measure(run: Run, kind: str, part: str) -> Measure:
    if kind == "perplexity":
        return lambda variant, scaling, length: perplexity_at(run, variant, scaling, length)
    return lambda variant, scaling, length: passkey_at(run, variant, scaling, length, part)


def _lines(
    run: Run, experiment: Experiment, row: Row, across: list[Column], measure: Measure, perplexity: bool
) -> list[Line]:
    """Our line, one more for each other NTK mode that was measured, and the paper's."""
    others = [law for law in scalings(run, row.variant) if law.startswith(f"{row.scaling}/")]
    lines = []
    for law in (row.scaling, *others):
        found = [measure(row.variant, law, column.ours) if column.ours else None for column in across]
        source = "ours" if law == row.scaling else f"ours, {law.partition('/')[2].replace('_', ' ')}"
        cells = tuple(estimate_cell(estimate) for estimate in found)
        lines.append(Line(row.label, source, cells, counts_text(found) or "not run"))
    if row.paper:
        values = dict(zip(experiment.lengths, row.paper, strict=True))
        show = perplexity_text if perplexity else share_text
        cells = tuple(Cell(show(values[column.paper])) if column.paper else Cell() for column in across)
        lines.append(Line(row.label, "paper", cells))
    return lines


def _alignment(run: Run, experiment: Experiment) -> str:
    if run.train_length in (None, experiment.train_length):
        return ""
    return (
        f" Our training length is {run.train_length:,}, the paper's {experiment.train_length:,}: "
        "columns are aligned by multiples of it."
    )


def _small_print(run: Run, perplexity: bool) -> str:
    several = len({row.seed for row in run.rows}) > 1
    if perplexity:
        return " Small print: range over seeds." if several else ""
    return " Small print: 95% Wilson interval over all cases" + (", and range over seeds." if several else ".")


def distance_ranges(run: Run, experiment: Experiment) -> list[tuple[str, float, float]]:
    """Name, lower and upper end of each distance range in tokens."""
    ends = [end * (run.train_length or experiment.train_length) for end in experiment.ranges]
    pairs = list(zip([0.0, *ends], [*ends, float("inf")], strict=True))
    return [(f"{low:,.0f}–{high:,.0f}" if high < float("inf") else f"> {low:,.0f}", low, high) for low, high in pairs]


def _by_distance(run: Run, experiment: Experiment, rows: Sequence[Row]) -> Table:
    ranges = distance_ranges(run, experiment)
    lines = []
    for row in rows:
        found = [passkey_between(run, row.variant, row.scaling, low, high) for _, low, high in ranges]
        cells = tuple(estimate_cell(estimate) for estimate in found)
        lines.append(Line(row.label, "ours", cells, counts_text(found) or "not run"))
    return Table(
        name=experiment.name,
        title=f"{experiment.title} (tokens from the key to the end, higher is better)",
        caption=experiment.caption,
        columns=tuple(name for name, _, _ in ranges),
        lines=tuple(lines),
    )


def measured_tables(run: Run) -> list[Table]:
    """Everything that was measured, whether or not the paper has it."""
    made = []
    subjects = (("perplexity", "perplexity, lower is better"), ("passkey", "passkey accuracy, higher is better"))
    for kind, subject in subjects:
        lengths = sliding_lengths(run) if kind == "perplexity" else passkey_lengths(run)
        measure = _measure(run, kind, "all")
        lines = []
        for variant in variants_in(run):
            for law in scalings(run, variant):
                found = [measure(variant, law, length) for length in lengths]
                if any(found):
                    label, cells = variant_name(variant), tuple(estimate_cell(estimate) for estimate in found)
                    lines.append(Line(label, scaling_name(law), cells, counts_text(found)))
        if lines:
            heads = tuple(f"{length:,}" for length in lengths)
            made.append(Table(f"measured-{kind}", f"All measurements ({subject})", "", heads, tuple(lines), "Variant"))
    return made


def control_table(run: Run) -> Table | None:
    """Long context against the same tokens with the context cut to the training length.

    The control has a column of its own where it is one number for all lengths, and a line of its own otherwise.
    """
    lengths = sliding_lengths(run)
    found = []
    for variant in variants_in(run):
        for law in scalings(run, variant):
            cut = [control_at(run, variant, law, length) for length in lengths]
            full = [perplexity_at(run, variant, law, length) for length in lengths]
            if any(cut) and any(full):
                found.append((variant_name(variant), scaling_name(law), full, cut))
    if not found:
        return None
    single = all(len(set(cut)) == 1 for *_, cut in found)
    lines = []
    for variant, law, full, cut in found:
        if single:
            lines.append(Line(variant, law, tuple(map(estimate_cell, cut[:1] + full)), counts_text(full)))
            continue
        for source, shown in (("whole window", full), ("context cut", cut)):
            lines.append(Line(f"{variant}, {law}", source, tuple(map(estimate_cell, shown)), counts_text(shown)))
    caption = (
        f"The control scores the same tokens with the context cut to the training length of {run.train_length:,}. "
        "Where the whole window is not below it, the longer context does not help."
    ) + _small_print(run, perplexity=True)
    heads = (("context cut",) if single else ()) + tuple(f"{length:,}" for length in lengths)
    title = "Control: does the longer context help? (perplexity, lower is better)"
    return Table("control", title, caption, heads, tuple(lines), "Variant")


def training_table(run: Run) -> Table | None:
    """How each model was trained."""
    if not run.training:
        return None
    heads = (
        "seed",
        "parameters",
        "tokens",
        "steps",
        "length",
        "final loss",
        "minutes",
        "tokens/s",
        "MFU",
        "passkey share",
    )
    lines = []
    for variant in variants_in(run):
        for row in sorted((row for row in run.training if row.variant == variant), key=lambda row: row.seed):
            texts = [f"{row.seed}", f"{row.parameters:,}", f"{row.tokens:,}", f"{row.steps:,}", f"{row.length:,}"]
            texts += [f"{row.final_loss:.3f}", f"{row.seconds / 60:,.1f}", f"{row.tokens_per_second:,.0f}"]
            texts += ["—" if row.mfu is None else f"{row.mfu:.1%}", f"{row.passkey_share:.1%}"]
            lines.append(Line(variant_name(variant), "", tuple(Cell(text) for text in texts)))
    return Table("training", "Training", "Loss in nats a token.", heads, tuple(lines), "Variant")


def sliding_lengths(run: Run) -> list[int]:
    """Window lengths with a sliding-window perplexity."""
    return sorted({row.length for row in run.perplexity if row.mode == "sliding"})


def passkey_lengths(run: Run) -> list[int]:
    """Prompt lengths of the passkey task."""
    return sorted({row.length for row in run.passkey})
