"""Measurements → tables: ours beside the papers', aligned by multiples of the training length."""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from farspan.experiments import Experiment, load
from farspan.report.results import Estimate, Record, Run, find, mean_of, share_of
from farspan.report.tables import (
    NOTHING,
    Table,
    Value,
    cell,
    grid,
    listing,
    noted,
    perplexity_text,
    scaling_name,
    share_text,
    variant_name,
    variant_order,
)

SUBJECTS = {
    "perplexity": "perplexity, lower is better",
    "passkey": "passkey accuracy, higher is better",
}
TASKS = {
    "accuracy": "accuracy on the test set, higher is better",
    "perplexity": "perplexity of held-out text, lower is better",
}
TRAINING = (
    "seed {seed}; parameters {parameters:,}; tokens {tokens:,}; steps {steps:,}; length {length:,}; "
    "final loss {final_loss:.3f}; minutes {minutes:,.1f}; tokens/s {tokens_per_second:,.0f}; MFU {mfu:.1%}; "
    "passkey share {passkey_share:.1%}; retrieval share {retrieval_share:.1%}"
)
STAGES = "stages {stages}; passkey share {passkey_share:.1%}; retrieval share {retrieval_share:.1%}"
TASK_TRAINING = (
    "seeds {seeds}; parameters {parameters:,}; length {length:,}; pre-training steps {pretraining_steps:,}; "
    "steps {steps:,}; minutes {minutes:,.1f}; tokens/s {speed.value:,.0f}; GB {memory.value:.1f}"
)
CACHE = "tokens {length:,}; bytes {bytes:,}; bytes per token {each:,.0f}; of the original's {share:.4f}"
THREE, FOUR = partial(share_text, digits=3), partial(share_text, digits=4)
Entries = list[tuple[str, str, Sequence[Value]]]


def variants_in(run: Run, *kinds: str) -> list[str]:
    """Return the variants with rows of these kinds, in the order of the papers' tables."""
    found = {row.variant for kind in kinds for row in run.of(kind)}
    return sorted(found, key=variant_order)


def condition(variant: str, scaling: str) -> str:
    return f"{variant_name(variant)}, {scaling_name(scaling)}"


def _column(ours: int | None, paper: int | None, same: bool) -> str:
    if same or paper is None:
        return f"{ours or paper:,}"
    return f"{ours:,} (paper {paper:,})" if ours else f"(paper {paper:,})"


# By length


def experiment_tables(run: Run, experiment: Experiment) -> list[Table]:
    """Make the tables of an experiment on lengths: the rows that were run, each with the paper's below."""
    kinds = dict.fromkeys(row.kind or experiment.kind for row in experiment.rows)
    return [table for kind in kinds if (table := _by_length(run, experiment, kind))]


def _by_length(run: Run, experiment: Experiment, kind: str) -> Table | None:
    rows = [row for row in experiment.rows if (row.kind or experiment.kind) == kind]
    name = experiment.name if rows == experiment.rows else f"{experiment.name}-{kind}"
    base = run.train_length or 1
    ours = {Fraction(length, base): length for length in run.lengths(kind)}
    paper = {Fraction(length, experiment.train_length): i for i, length in enumerate(experiment.lengths)}
    columns = [(ours.get(ratio), paper.get(ratio)) for ratio in sorted(ours.keys() | paper)]
    show = perplexity_text if kind == "perplexity" else share_text
    entries: Entries = []
    for row in rows:
        label = row.label or condition(row.variant, row.scaling)
        found = [run.at(kind, row.variant, row.scaling, n) if n else None for n, _ in columns]
        entries.append((label, "ours", found))
        if row.paper and any(found):
            entries.append((label, "paper", [None if i is None else show(row.paper[i]) for _, i in columns]))
    same = base == experiment.train_length
    heads = [_column(n, None if i is None else experiment.lengths[i], same) for n, i in columns]
    title = f"{experiment.title} ({SUBJECTS[kind]})"
    return grid(name, title, heads, entries, caption=experiment.caption, heading="Method")


def measured_table(run: Run, kind: str) -> Table | None:
    """Make a table of everything measured by length.

    Below a perplexity stands its control, the same tokens with the context cut to the training length.
    """
    lengths, entries, caption = run.lengths(kind), Entries(), ""
    for variant in variants_in(run, kind):
        for scaling in run.scalings(kind, variant=variant):
            label, source = variant_name(variant), scaling_name(scaling)
            entries.append((label, source, [run.at(kind, variant, scaling, n) for n in lengths]))
            if kind == "perplexity" and run.of(kind, variant=variant, scaling=scaling, mode="truncated"):
                entries.append((label, f"{source}, context cut", [run.control(variant, scaling, n) for n in lengths]))
                caption = "Context cut: the same tokens with the context cut to the training length."
    title = f"All measurements ({SUBJECTS[kind]})"
    return grid(f"measured-{kind}", title, [f"{n:,}" for n in lengths], entries, caption=caption)


# Training, positions, retrieval


def training_table(run: Run) -> Table | None:
    rows = sorted(run.of("training"), key=lambda x: (variant_order(x.variant), x.seed))
    lines = [(variant_name(x.variant), "", {**x, "minutes": x.seconds / 60}) for x in rows]
    return listing("training", "Training", TRAINING, lines, caption="Loss in nats per token.", heading="Variant")


def position_table(run: Run) -> Table | None:
    """Show the loss by position, and what the far context gains over one cut to the training length."""
    rows, entries = run.of("positions"), Entries()
    ends = sorted({(x.start, x.stop) for x in rows})
    for v, s in dict.fromkeys((x.variant, x.scaling) for x in rows):
        label, each = condition(v, s), [find(rows, variant=v, scaling=s, start=a, stop=b) for a, b in ends]
        entries.append((label, "loss", [loss_of(found, "nll") for found in each]))
        entries.append((label, "context cut", [loss_of(found, "control_nll") for found in each]))
        entries.append((label, "gain", [_gain(found) for found in each]))
    title, heads = "Loss by position (nats per token, lower is better)", [f"{a:,}–{b - 1:,}" for a, b in ends]
    caption = "Gain: loss with the context cut to the training length less loss with all of it, and its 95% interval."
    return grid("positions", title, heads, entries, caption=caption, heading="Model", show=THREE)


def loss_of(rows: Sequence[Record], name: str) -> Estimate | None:
    return mean_of([row[name] / row.tokens for row in rows if row[name] is not None])


def _gain(rows: list[Record]) -> str | None:
    gains = [(row.gain, row.gain_ci95) for row in rows if row.gain is not None]
    if not gains:
        return None
    note = f"95% {gains[0][1][0]:+.3f} to {gains[0][1][1]:+.3f}" if len(gains) == 1 and gains[0][1] else ""
    return noted(f"{sum(gain for gain, _ in gains) / len(gains):+.3f}", note)


def retrieval_table(run: Run) -> Table | None:
    """Show the accuracy over all depths."""
    lengths, entries = run.lengths("retrieval"), Entries()
    for task, v, s in sorted({(x.task, x.variant, x.scaling) for x in run.of("retrieval")}):
        each = [run.of("retrieval", task=task, variant=v, scaling=s, length=n) for n in lengths]
        entries.append((task, condition(v, s), [share_of(find(rows, depth=None) or rows) for rows in each]))
    title = "Retrieval by prompt length (accuracy, higher is better)"
    return grid("retrieval", title, [f"{n:,}" for n in lengths], entries, heading="Task")


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
    show = FOUR if experiment.measure == "accuracy" else perplexity_text  # as in the paper
    entries: Entries = []
    for row in experiment.rows:
        found = [task_at(run, experiment.measure, task, row.variant) for task in experiment.columns]
        if any(found):
            entries += [(row.label, "ours", found), (row.label, "paper", [show(x) or NOTHING for x in row.paper])]
    title, caption = f"{experiment.title} ({TASKS[experiment.measure]})", experiment.caption
    return grid(experiment.name, title, experiment.headings, entries, caption=caption, heading="Attention", show=show)


def task_training_table(run: Run) -> Table | None:
    lines = []
    for task, variant in dict.fromkeys((x.task, x.variant) for x in run.of("task")):
        rows = run.of("task", task=task, variant=variant)
        made = {measure: task_at(run, measure, task, variant) for measure in ("speed", "memory")}
        minutes = sum(row.seconds for row in rows) / len(rows) / 60
        lines.append((task, variant_name(variant), {**rows[0], **made, "seeds": len(rows), "minutes": minutes}))
    caption = "Means over seeds."
    return listing("task-training", "Training for tasks", TASK_TRAINING, lines, caption=caption, heading="Task")


# Drop-in studies


def study_tables(run: Run) -> list[Table]:
    """Compare the models of a study: a line per scaling, then the paper's; their caches, and what they were shown."""
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
    order = [*(name for name in labels if name in made), *sorted(made.keys() - labels.keys())]
    entries: Entries = []
    for name in order:
        label = labels.setdefault(name, name)
        mine = _model_values(run, made[name], [base * k for k in windows], [base * k for k in prompts])
        entries += [(label, source, values) for source, values in mine]
        for row in experiment.rows if mine else ():
            if row.variant == name and row.paper:
                ppl, keys = row.paper[: len(windows)], row.paper[len(windows) :]
                ratio = (
                    f"×{ppl[-1] / ppl[0]:,.2f}" if isinstance(ppl[0], float) and isinstance(ppl[-1], float) else None
                )
                paper = [*map(perplexity_text, ppl), ratio, None, *map(share_text, keys), None, None, None, None]
                entries.append((label, f"paper, {scaling_name(row.scaling)}", paper))
    table = grid(experiment.name, experiment.title, heads, entries, caption=experiment.caption, heading="Model")
    caches = _cache_table(run, f"{experiment.name}-cache", [(labels[name], made[name]) for name in order])
    rows = [(labels[name], "", made[name]) for name in order if made[name].stages]
    caption = "Largest share of the rows of any stage that show passkeys, or retrieval tasks, with their answers."
    stages = listing(f"{experiment.name}-stages", "Fine-tuning", STAGES, rows, caption=caption, heading="Model")
    return [found for found in (table, caches, stages) if found]


def _model_values(run: Run, model: Record, windows: list[int], prompts: list[int]) -> list[tuple[str, list[Value]]]:
    """Return each scaling's values; the first line has what depends on none: short context, and what the model took."""
    name, pairs = model.model, share_of(run.of("pairs", variant=model.model, kind="all"))
    bits: Value = next((f"{row.bits_per_byte:.3f}" for row in run.of("bits", variant=name)), None)
    minutes = f"{model.seconds / 60:,.1f}" if model.seconds is not None and model.tokens else NOTHING
    once: list[Value] = [cell(pairs, THREE), bits, f"{model.tokens:,}", minutes]
    lines: list[tuple[str, list[Value]]] = []
    for scaling in run.scalings("perplexity", "passkey", variant=name) or ["none"]:
        # Inside a model's training length dynamic NTK and log length change nothing.
        inside = model.train_length if scaling.startswith(("dynamic_ntk-", "none+")) else 0
        found = [
            run.at("perplexity", name, scaling, n) or (run.at("perplexity", name, "none", n) if n <= inside else None)
            for n in windows
        ]
        keys, cut = [run.at("passkey", name, scaling, n) for n in prompts], run.control(name, scaling, 0)
        ratio = f"×{found[-1].value / found[0].value:,.2f}" if found[0] and found[-1] else None
        control = noted(cell(cut).split("\n")[0], f"{model.train_length:,}") if cut else None
        if any([*found, *keys, pairs, bits]):
            lines.append((scaling_name(scaling), [*found, ratio, control, *keys, *(once if not lines else [None] * 4)]))
    return lines


def _cache_table(run: Run, name: str, models: list[tuple[str, Record]]) -> Table | None:
    """Show the bytes of each key-value cache, and their share of the original's."""
    each = {row.variant: row.bytes / row.length for row in run.of("cache")}
    # The original: RoPE in every layer, not trained. Windows make another model of it.
    plain = [model.model for _, model in models if model.attention == "rope" and not model.window and not model.stages]
    if not plain or plain[0] not in each:
        return None
    lines = [
        (label, "", {**row, "each": each[row.variant], "share": each[row.variant] / each[plain[0]]})
        for label, model in models
        for row in run.of("cache", variant=model.model)
    ]
    return listing(name, "Key-value cache", CACHE, lines, caption="After reading a document.", heading="Model")
