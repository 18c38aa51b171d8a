"""A drop-in study → its table beside the paper's, and what it says about the window and what lies past it."""

import math
from collections.abc import Sequence

from farspan.report.build import Column
from farspan.report.collect import Run
from farspan.report.estimates import Estimate, control_at, passkey_at, perplexity_at, scalings, share_of
from farspan.report.names import PAPER_LAW, scaling_name
from farspan.report.records import Share, StudyModel
from farspan.report.study_table import StudyTable
from farspan.report.summary import amount
from farspan.report.tables import Cell, Line, Table, counts_text, estimate_cell, perplexity_text, share_text


def in_order(run: Run, table: StudyTable) -> list[tuple[str, StudyModel]]:
    """Every model with its label: the table's first, in its order, then the others by name."""
    made = {model.model: model for model in run.study}
    labels = {row.model: row.label for row in table.rows}
    known = [name for name in labels if name in made]
    return [(labels.get(name, name), made[name]) for name in [*known, *sorted(made.keys() - labels.keys())]]


def trained_length(run: Run) -> int:
    """The training length of the fine-tuned models, in whose multiples windows are given; without any, the shortest."""
    tuned = [model.train_length for model in run.study if model.stages]
    return min(tuned or [model.train_length for model in run.study])


def window_perplexity(run: Run, model: StudyModel, law: str, length: int) -> Estimate | None:
    """Sliding-window perplexity; inside a model's training length dynamic NTK and log length change nothing."""
    found = perplexity_at(run, model.model, law, length)
    if found is None and law.startswith(("ntk-", "none+")) and length <= model.train_length:
        return perplexity_at(run, model.model, "none", length)
    return found


def study_table(run: Run, table: StudyTable) -> Table:
    """A line for each model and law, ours and then the paper's."""
    base = trained_length(run)
    same = base == table.train_length
    windows = [Column(k * base, k * table.train_length, same) for k in table.windows]
    prompts = [Column(k * base, k * table.train_length, same) for k in table.prompts]
    paper = {row.model: row.paper for row in table.rows}
    lines = []
    for label, model in in_order(run, table):
        for number, law in enumerate(scalings(run, model.model) or ["none"]):
            lines.append(_line(run, label, model, law, windows, prompts, first=number == 0))
        for law, values in paper.get(model.model, {}).items():
            lines.append(_paper_line(label, law, values, len(windows)))
    heads = [f"ppl at {column.heading}" for column in windows]
    heads += [f"×{table.windows[-1]} to ×{table.windows[0]}", "context cut"]
    heads += [f"passkey at {column.heading}" for column in prompts]
    heads += ["minimal pairs", "bits a byte", "tokens", "minutes"]
    return Table(table.name, table.title, table.caption, tuple(heads), tuple(lines), "Model")


def _line(
    run: Run, label: str, model: StudyModel, law: str, windows: list[Column], prompts: list[Column], *, first: bool
) -> Line:
    """One law; what does not depend on it, short skills and what the model took, stands in the first."""
    found = [window_perplexity(run, model, law, column.ours or 0) for column in windows]
    keys = [passkey_at(run, model.model, law, column.ours or 0) for column in prompts]
    cut = control_at(run, model.model, law, 0)
    cells = [*map(estimate_cell, found), _ratio(found[0], found[-1])]
    cells.append(Cell(estimate_cell(cut).text, f"{model.train_length:,}") if cut else Cell())
    cells += map(estimate_cell, keys)
    cells += _skills(run, model) if first else [Cell()] * 4
    return Line(label, scaling_name(law), tuple(cells), counts_text([*found, *keys]) or "not run")


def _skills(run: Run, model: StudyModel) -> list[Cell]:
    right = [Share(p.cases, p.correct) for p in run.pairs if (p.variant, p.kind) == (model.model, "all")]
    bits = [row.bits_per_byte for row in run.bits if row.variant == model.model]
    minutes = None if model.seconds is None else f"{model.seconds / 60:,.1f}"
    return [
        estimate_cell(share_of(right), 3),
        Cell(f"{bits[0]:.3f}") if bits else Cell(),
        Cell(amount(model.tokens)),
        Cell(minutes) if minutes and model.tokens else Cell(),
    ]


def _ratio(start: Estimate | None, end: Estimate | None) -> Cell:
    return Cell(f"×{end.value / start.value:,.2f}") if start and end else Cell()


def _paper_line(label: str, law: str, values: Sequence[float | str], windows: int) -> Line:
    start, end = values[0], values[windows - 1]
    ratio = f"×{end / start:,.2f}" if isinstance(start, float) and isinstance(end, float) else "—"
    cells = [perplexity_text(value) for value in values[:windows]]
    cells += [ratio, "—", *(share_text(value) for value in values[windows:]), "—", "—", "—", "—"]
    return Line(label, f"paper, {scaling_name(law)}", tuple(map(Cell, cells)))


def cache_table(run: Run, table: StudyTable) -> Table | None:
    """Bytes of the key-value cache, and their share of the original's."""
    held = {row.variant: row for row in run.caches}
    original = next((m.model for m in run.study if m.plain and not m.stages), None)
    if original not in held:
        return None
    lines = []
    for label, model in in_order(run, table):
        if (row := held.get(model.model)) is not None:
            share = row.bytes / row.length * held[original].length / held[original].bytes
            texts = (f"{row.length:,}", f"{row.bytes:,}", f"{row.bytes / row.length:,.0f}", f"{share:.4f}")
            lines.append(Line(label, "", tuple(map(Cell, texts))))
    caption = (
        "Measured after reading a text. CoCA keeps half the width of each key, un-rotated, and all of each value; "
        "a layer with a window keeps no more tokens than that."
    )
    heads = ("tokens", "bytes", "bytes a token", "of the original's")
    return Table(f"{table.name}-cache", "Key-value cache", caption, heads, tuple(lines), "Model")


def study_verdicts(run: Run, table: StudyTable) -> list[str]:
    """What CoCA costs inside the window and how far it reaches: the model that ends lowest first, then the controls."""
    if not run.study:
        return []
    base, models = trained_length(run), in_order(run, table)
    far = base * table.windows[-1]
    original = next((m for _, m in models if m.plain and not m.stages), None)
    before = window_perplexity(run, original, "none", base) if original else None
    said: list[tuple[float, str]] = []
    for label, model in models:
        near = window_perplexity(run, model, "none", base)
        reach = _reach(run, model, far)[1]
        if model.stages and not model.plain and near and reach:
            cost = f", {near.value / before.value - 1:+.1%} against the original's" if before else ""
            said.append((reach.value, _at_both_ends(run, label, model, near, base, far, cost) + "."))
    if not said:
        return ["No fine-tuned model was measured inside and past the window: this study compares nothing yet."]
    ordered = [text for value, text in sorted(said, key=lambda one: math.inf if math.isnan(one[0]) else one[0])]
    return ordered + _paper_verdict(table) + _control_verdict(run, models, base, far)


def _reach(run: Run, model: StudyModel, far: int) -> tuple[str, Estimate | None]:
    """The law a model is judged by far past its window, and its perplexity there; some need no law."""
    law = PAPER_LAW if window_perplexity(run, model, PAPER_LAW, far) else "none"
    return law, window_perplexity(run, model, law, far)


def _at_both_ends(run: Run, label: str, model: StudyModel, near: Estimate, base: int, far: int, cost: str = "") -> str:
    """Perplexity inside the window and, as far as it was measured, what becomes of it far past it, with the keys."""
    said = f"{label} ({amount(model.tokens)} tokens): perplexity {perplexity_text(near.value)} at {base:,}{cost}"
    law, reach = _reach(run, model, far)
    if reach is None:
        return said
    said += f"; with {scaling_name(law)} ×{reach.value / near.value:,.2f} of that at {far:,}"
    found = [passkey_at(run, model.model, name, far) for name in (law, f"{law}+log")]
    for keys, lead in zip(found, ("; passkey there ", ", with log length "), strict=True):
        if keys is not None and keys.interval is not None:
            low, high = map(share_text, keys.interval)
            said += f"{lead}{share_text(keys.value)} (95% {low}–{high})"
    return said


def _paper_verdict(table: StudyTable) -> list[str]:
    """The same numbers of the paper: the last row that has any is its drop-in, the first its original."""
    rows = [row.paper for row in table.rows if PAPER_LAW in row.paper and "none" in row.paper]
    if len(rows) < 2:
        return []
    (was, *_), (now, *_), scaled = rows[0]["none"], rows[-1]["none"], rows[-1][PAPER_LAW]
    end, windows = scaled[len(table.windows) - 1], table.windows
    if not isinstance(was, float) or not isinstance(now, float) or not isinstance(end, float):
        return []
    return [
        f"The paper: perplexity {now / was - 1:+.1%} against its original's at {table.train_length:,}; with "
        f"{scaling_name(PAPER_LAW)} ×{end / now:,.2f} of that at {table.train_length * windows[-1]:,}; passkey there "
        f"{share_text(scaled[-1])}."
    ]


def _control_verdict(run: Run, models: list[tuple[str, StudyModel]], base: int, far: int) -> list[str]:
    """What the text alone did to the original: a model tuned on books is better at books, whatever its attention."""
    controls = [(label, m) for label, m in models if m.plain and m.stages]
    found = [(label, m, window_perplexity(run, m, "none", base)) for label, m in controls]
    if not any(at for _, _, at in found):
        return [
            "The original was not fine-tuned on the same text: how much of any gain on it is the text's is not known."
        ]
    return [
        f"{_at_both_ends(run, label, model, at, base, far)}; what a CoCA model gains on the original must be seen "
        "beside this."
        for label, model, at in found
        if at is not None
    ]


def study_notes(run: Run) -> list[str]:
    """Conditions a reader must know."""
    if not run.study:
        return []
    said = ["One seed: part of any difference between models is its luck."]
    taught = [f"{m.model} ({m.passkey_share:.0%})" for m in run.study if m.passkey_share]
    if taught:
        said.append(f"Passkey texts were among the training rows of {', '.join(taught)}, and of no other model.")
    carried = [f"{m.model} ({scaling_name(m.own_scaling)})" for m in run.study if m.own_scaling != "none"]
    if carried:
        said.append(f"Trained under a law of its own, which “no scaling” takes away: {', '.join(carried)}.")
    strides = sorted({row.stride for row in run.perplexity if row.mode == "sliding"})
    if strides:
        said.append(
            f"Perplexity: sliding windows, stride {', '.join(map(str, strides))}; "
            "each token is scored once, and the same tokens at every length."
        )
    return said
