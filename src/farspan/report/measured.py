"""Measurements → tables: ours beside the papers', aligned by multiples of the training length."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from farspan.experiments import Experiment, Row, load
from farspan.report.results import (
    Estimate,
    Record,
    Run,
    control_at,
    find,
    lengths_of,
    mean_of,
    passkey_at,
    passkey_where,
    perplexity_at,
    scalings,
    share_of,
)
from farspan.report.tables import (
    NOTHING,
    Cell,
    Line,
    Table,
    amount,
    counts_text,
    estimate_cell,
    grid,
    listing,
    perplexity_text,
    scaling_name,
    share_text,
    variant_name,
    variant_order,
)

SUBJECTS = {
    "perplexity": "perplexity, lower is better",
    "passkey": "passkey accuracy, higher is better",
    "near": "passkey accuracy, key within one training length of the end",
    "far": "passkey accuracy, key farther from the end",
}
TASKS = {
    "accuracy": "accuracy on the test set, higher is better",
    "perplexity": "perplexity of held-out text, lower is better",
    "speed": "tokens per second in training, higher is better",
    "memory": "GPU memory in training, GB, lower is better",
}
THREE = partial(share_text, digits=3)


def variants_in(run: Run, *kinds: str) -> list[str]:
    """Return the variants measured or trained, in the order of the papers' tables."""
    found = {row.variant for kind in kinds or ("training", "perplexity", "passkey") for row in run.of(kind)}
    return sorted(found, key=variant_order)


def at_of(run: Run, kind: str) -> Callable[[str, str, int], Estimate | None]:
    """Return the function (variant, scaling, length) that reads "perplexity", "passkey" or its "near" or "far" part."""
    if kind == "perplexity":
        return partial(perplexity_at, run)
    return partial(passkey_at, run, part="all" if kind == "passkey" else kind)


def _column(ours: int | None, paper: int | None, same: bool) -> str:
    if same or paper is None:
        return f"{ours or paper:,}"
    return f"{ours:,} (paper {paper:,})" if ours else f"(paper {paper:,})"


def experiment_tables(run: Run, experiment: Experiment) -> list[Table]:
    """Make the tables of an experiment on lengths: the rows that were run, each with the paper's below."""
    kinds = {row.kind or experiment.kind for row in experiment.rows}
    ranges = distance_ranges(run, experiment)
    heads = [name for name, *_ in ranges]
    entries = [(row.label, "ours", by_distance(run, row, ranges)) for row in experiment.rows_of("distance")]
    title = f"{experiment.title} (tokens from the key to the end, higher is better)"
    made = [grid(experiment.name, title, heads, entries, caption=experiment.caption, heading="Method")]
    for kind, of in (("perplexity", "perplexity"), ("passkey", "passkey"), ("near", "near-far"), ("far", "near-far")):
        name = f"{experiment.name}-{kind}" if len(kinds) > 1 or of == "near-far" else experiment.name
        made.append(_by_length(run, experiment, experiment.rows_of(of), kind, name))
    return [table for table in made if table]


def _by_length(run: Run, experiment: Experiment, rows: list[Row], kind: str, name: str) -> Table | None:
    lengths, base = lengths_of(run, "perplexity" if kind == "perplexity" else "passkey"), run.train_length or 1
    ours = {Fraction(length, base): length for length in lengths}
    paper = {Fraction(length, experiment.train_length): i for i, length in enumerate(experiment.lengths)}
    columns = [(ours.get(ratio), paper.get(ratio)) for ratio in sorted(ours.keys() | paper)]
    at, lines = at_of(run, kind), list[Line]()
    show = perplexity_text if kind == "perplexity" else share_text
    for row in rows:
        mine = []
        modes = [scaling for scaling in scalings(run, row.variant) if scaling.startswith(f"{row.scaling}/")]
        for scaling in (row.scaling, *modes):
            found = [at(row.variant, scaling, n) if n else None for n, _ in columns]
            source = "ours" + "".join(f", {mode.replace('_', ' ')}" for mode in scaling.split("/")[1:])
            if any(found):
                mine.append(Line(row.label, source, tuple(map(estimate_cell, found)), counts_text(found)))
        if row.paper and mine:
            cells = tuple(Cell() if i is None else Cell(show(row.paper[i])) for _, i in columns)
            mine.append(Line(row.label, "paper", cells))
        lines += mine
    same = base == experiment.train_length
    heads = tuple(_column(n, None if i is None else experiment.lengths[i], same) for n, i in columns)
    title = f"{experiment.title} ({SUBJECTS[kind]})"
    return Table(name, title, experiment.caption, heads, tuple(lines)) if lines else None


def distance_ranges(run: Run, experiment: Experiment) -> list[tuple[str, float, float]]:
    """Return name, lower and upper end of each range of distance in tokens."""
    ends = [end * (run.train_length or experiment.train_length) for end in experiment.ranges]
    pairs = zip([0.0, *ends], [*ends, math.inf], strict=True)
    return [(f"{low:,.0f}–{high:,.0f}" if high < math.inf else f"> {low:,.0f}", low, high) for low, high in pairs]


def by_distance(run: Run, row: Row, ranges: Sequence[tuple[str, float, float]]) -> list[Estimate | None]:
    """Return passkey accuracy over all lengths for each range of distance."""

    def between(low: float, high: float) -> Estimate | None:
        return passkey_where(run, row.variant, row.scaling, lambda _, distance: low < distance <= high)

    return [between(low, high) for _, low, high in ranges]


def measured_tables(run: Run) -> list[Table]:
    """Make tables of everything measured by length: the mean and, where there are several, each seed."""
    made = []
    for kind in ("perplexity", "passkey"):
        lengths, entries = lengths_of(run, kind), []
        for variant in variants_in(run, kind):
            for scaling in scalings(run, variant, kind):
                rows = run.of(kind, variant=variant, scaling=scaling)
                seeds = sorted({row.seed for row in rows})
                for seed in [None, *seeds] if len(seeds) > 1 else [None]:
                    at = at_of(Run({kind: [row for row in rows if seed in (None, row.seed)]}), kind)
                    source = scaling_name(scaling) + ("" if seed is None else f", seed {seed}")
                    entries.append((variant_name(variant), source, [at(variant, scaling, n) for n in lengths]))
        title = f"All measurements ({SUBJECTS[kind]})"
        made.append(grid(f"measured-{kind}", title, (f"{n:,}" for n in lengths), entries))
    return [table for table in made if table]


def control_table(run: Run) -> Table | None:
    """Compare a long context with the same tokens whose context is cut to the training length."""
    lengths, found = lengths_of(run, "perplexity"), []
    for variant in variants_in(run, "perplexity"):
        for scaling in scalings(run, variant):
            cut, full = ([at(run, variant, scaling, n) for n in lengths] for at in (control_at, perplexity_at))
            if any(cut) and any(full):
                found.append((variant_name(variant), scaling_name(scaling), full, cut))
    heads = [f"{n:,}" for n in lengths]
    if all(len(set(cut)) == 1 for *_, cut in found):  # one number for all lengths has a column of its own
        heads = ["context cut", *heads]
        entries = [(variant, scaling, cut[:1] + full) for variant, scaling, full, cut in found]
    else:
        names = ("whole window", "context cut")
        entries = [(f"{v}, {s}", names[i], each[i]) for v, s, *each in found for i in (0, 1)]
    title = "Control: does the longer context help? (perplexity, lower is better)"
    caption = f"Context cut: the same tokens with the context cut to the training length of {run.train_length or 0:,}."
    return grid("control", title, heads, entries, caption=caption)


def training_table(run: Run) -> Table | None:
    """Show how each model was trained."""
    heads = ["seed", "parameters", "tokens", "steps", "length", "final loss", "minutes", "tokens/s", "MFU"]
    heads.append("passkey share")
    rows = [
        [
            *(variant_name(x.variant), "", f"{x.seed}", f"{x.parameters:,}", f"{x.tokens:,}", f"{x.steps:,}"),
            *(f"{x.length:,}", f"{x.final_loss:.3f}", f"{x.seconds / 60:,.1f}"),
            NOTHING if x.tokens_per_second is None else f"{x.tokens_per_second:,.0f}",
            *(NOTHING if x.mfu is None else f"{x.mfu:.1%}", f"{x.passkey_share:.1%}"),
        ]
        for x in sorted(run.of("training"), key=lambda x: (variant_order(x.variant), x.seed))
    ]
    return listing("training", "Training", heads, rows, caption="Loss in nats per token.", heading="Variant")


def position_table(run: Run) -> Table | None:
    """Show the loss by position, and what the far context gains over one cut to the training length."""
    rows, lines = run.of("positions"), list[Line]()
    bins = sorted({(x.start, x.stop) for x in rows})
    for variant, scaling in dict.fromkeys((x.variant, x.scaling) for x in rows):
        each = [run.of("positions", variant=variant, scaling=scaling, start=a, stop=b) for a, b in bins]
        label = f"{variant_name(variant)}, {scaling_name(scaling)}"
        for source, name in (("loss", "nll"), ("context cut", "control_nll")):
            found = [mean_of([x[name] / x.tokens for x in one if x[name] is not None]) for one in each]
            lines += [Line(label, source, tuple(estimate_cell(e, THREE) for e in found))] if any(found) else []
        lines.append(Line(label, "gain", tuple(map(_gain, each))))
    title = "Loss by position (nats per token, lower is better)"
    caption = "Gain: loss with the context cut to the training length less loss with all of it, and its 95% interval."
    heads = tuple(f"{a:,}–{b - 1:,}" for a, b in bins)
    return Table("positions", title, caption, heads, tuple(lines), "Model") if lines else None


def _gain(rows: list[Record]) -> Cell:
    gains = [(row.gain, row.gain_ci95) for row in rows if row.gain is not None]
    if not gains:
        return Cell()
    note = f"95% {gains[0][1][0]:+.3f} to {gains[0][1][1]:+.3f}" if len(gains) == 1 and gains[0][1] else ""
    return Cell(f"{sum(gain for gain, _ in gains) / len(gains):+.3f}", note)


def retrieval_at(run: Run, depth: float | None, **wanted: str | int) -> Estimate | None:
    """Return the accuracy of a task, variant, scaling and length at a depth; None: all depths."""
    rows = run.of("retrieval", **wanted)
    return share_of(find(rows, depth=depth) or (rows if depth is None else []))


def retrieval_table(run: Run) -> Table | None:
    """Show the accuracy of each retrieval task by length."""
    rows, entries = run.of("retrieval"), []
    lengths = sorted({x.length for x in rows})
    for task, v, s in sorted({(x.task, x.variant, x.scaling) for x in rows}):
        found = [retrieval_at(run, None, task=task, variant=v, scaling=s, length=n) for n in lengths]
        entries.append((task, f"{variant_name(v)}, {scaling_name(s)}", found))
    title = "Retrieval by prompt length (accuracy, higher is better)"
    return grid("retrieval", title, (f"{n:,}" for n in lengths), entries, heading="Task")


# Tasks


def task_at(run: Run, measure: str, task: str, variant: str) -> Estimate | None:
    """Return what a table of this measure shows for a variant."""
    rows = run.of("task", task=task, variant=variant)
    if measure == "accuracy":
        return share_of(rows)
    name, unit = {"perplexity": ("ppl", 1), "speed": ("tokens_per_second", 1), "memory": ("peak_bytes", 1e9)}[measure]
    return mean_of([row[name] / unit for row in rows if row[name] is not None])


def task_table(run: Run, experiment: Experiment) -> Table | None:
    """Compare variants on tasks; below each that was run, the paper's numbers."""
    lines = list[Line]()
    show = partial(share_text, digits=4) if experiment.measure == "accuracy" else perplexity_text  # as in the paper
    for row in experiment.rows:
        found = [task_at(run, experiment.measure, task, row.variant) for task in experiment.columns]
        if any(found):
            cells = tuple(estimate_cell(estimate, show) for estimate in found)
            lines.append(Line(row.label, "ours", cells, counts_text(found)))
            paper = tuple(Cell() if value == "" else Cell(show(value)) for value in row.paper)
            lines += [Line(row.label, "paper", paper)] if row.paper else []
    title, heads = f"{experiment.title} ({TASKS[experiment.measure]})", tuple(experiment.headings)
    return Table(experiment.name, title, experiment.caption, heads, tuple(lines), "Attention") if lines else None


def task_training_table(run: Run) -> Table | None:
    """Show how each model was trained for its task."""
    heads = "seeds", "parameters", "length", "pre-training steps", "steps", "minutes", "tokens/s", "GB"
    lines = []
    for task, variant in dict.fromkeys((x.task, x.variant) for x in run.of("task")):
        rows = run.of("task", task=task, variant=variant)
        speed, memory = (task_at(run, measure, task, variant) for measure in ("speed", "memory"))
        sizes = [f"{rows[0][name]:,}" for name in ("parameters", "length", "pretraining_steps", "steps")]
        rates = f"{speed.value:,.0f}" if speed else NOTHING, f"{memory.value:.1f}" if memory else NOTHING
        minutes = f"{sum(row.seconds for row in rows) / len(rows) / 60:,.1f}"
        lines.append([task, variant_name(variant), str(len(rows)), *sizes, minutes, *rates])
    return listing("task-training", "Training for tasks", heads, lines, caption="Means over seeds.", heading="Task")


# Drop-in studies


def study_tables(run: Run) -> list[Table]:
    """Compare the models of a study: a line per scaling, then the paper's; and their caches."""
    made = {model.model: model for model in run.of("model")}
    if not made:
        return []
    (experiment,) = load("study")
    base = min([x.train_length for x in made.values() if x.stages] or [x.train_length for x in made.values()])
    windows, prompts = ([k // experiment.train_length for k in x] for x in (experiment.lengths, experiment.prompts))
    names = [_column(k * base, k * experiment.train_length, base == experiment.train_length) for k in windows + prompts]
    heads = [f"ppl at {name}" for name in names[: len(windows)]]
    heads += [f"×{windows[-1]} to ×{windows[0]}", "context cut"]
    heads += [f"passkey at {name}" for name in names[len(windows) :]]
    heads += ["minimal pairs", "bits per byte", "tokens", "minutes"]
    labels = {row.variant: row.label for row in experiment.rows}
    order, lines = [*(name for name in labels if name in made), *sorted(made.keys() - labels.keys())], []
    for name in order:
        label = labels.setdefault(name, name)
        mine = _model_lines(run, label, made[name], [base * k for k in windows], [base * k for k in prompts])
        paper = [row for row in experiment.rows if row.variant == name and row.paper and mine]
        lines += [*mine, *(_paper_line(row, len(windows)) for row in paper)]
    table = Table(experiment.name, experiment.title, experiment.caption, tuple(heads), tuple(lines), "Model")
    caches = _cache_table(run, f"{experiment.name}-cache", [(labels[name], made[name]) for name in order])
    return [table for table in (table, caches) if table and table.lines]


def _model_lines(run: Run, label: str, model: Record, windows: list[int], prompts: list[int]) -> list[Line]:
    """Show each scaling of a model; the first line has what depends on none: short context, and what the model took."""
    name, lines = model.model, list[Line]()
    for scaling in scalings(run, name) or ["none"]:
        # Inside a model's training length dynamic NTK and log length change nothing.
        inside = model.train_length if scaling.startswith(("dynamic_ntk-", "none+")) else 0
        found = [perplexity_at(run, name, scaling, n) for n in windows]
        found = [
            e or perplexity_at(run, name, "none", n) if n <= inside else e for n, e in zip(windows, found, strict=True)
        ]
        keys, cut = [passkey_at(run, name, scaling, n) for n in prompts], control_at(run, name, scaling, 0)
        start, end, pairs = found[0], found[-1], share_of(run.of("pairs", variant=name, kind="all"))
        bits = [f"{row.bits_per_byte:.3f}" for row in run.of("bits", variant=name)]
        minutes = f"{model.seconds / 60:,.1f}" if model.seconds is not None and model.tokens else NOTHING
        once = [estimate_cell(pairs, THREE), Cell(*bits[:1]), Cell(amount(model.tokens)), Cell(minutes)]
        cells = [
            *map(estimate_cell, found),
            Cell(f"×{end.value / start.value:,.2f}") if start and end else Cell(),
            Cell(estimate_cell(cut).text, f"{model.train_length:,}") if cut else Cell(),
            *map(estimate_cell, keys),
            *([Cell()] * len(once) if lines else once),
        ]
        if any([*found, *keys, pairs, bits]):
            lines.append(Line(label, scaling_name(scaling), tuple(cells), counts_text([*found, *keys])))
    return lines


def _paper_line(row: Row, windows: int) -> Line:
    start, end = row.paper[0], row.paper[windows - 1]
    ratio = f"×{end / start:,.2f}" if isinstance(start, float) and isinstance(end, float) else NOTHING
    texts = [*map(perplexity_text, row.paper[:windows]), ratio, NOTHING, *map(share_text, row.paper[windows:])]
    return Line(row.label, f"paper, {scaling_name(row.scaling)}", tuple(map(Cell, [*texts, *[NOTHING] * 4])))


def _cache_table(run: Run, name: str, models: list[tuple[str, Record]]) -> Table | None:
    """Show the bytes of each key-value cache, and their share of the original's."""
    held = {row.variant: row.bytes / row.length for row in run.of("cache")}
    # The original: RoPE in every layer, not trained. Windows make another model of it.
    plain = [model.model for _, model in models if model.attention == "rope" and not model.window and not model.stages]
    if not plain or plain[0] not in held:
        return None
    rows = []
    for label, row in ((label, row) for label, model in models for row in run.of("cache", variant=model.model)):
        each = held[row.variant]
        rows.append((label, "", f"{row.length:,}", f"{row.bytes:,}", f"{each:,.0f}", f"{each / held[plain[0]]:.4f}"))
    heads = "tokens", "bytes", "bytes per token", "of the original's"
    return listing(name, "Key-value cache", heads, rows, caption="After reading a document.", heading="Model")
