"""Measurements → tables: ours beside the papers', aligned by multiples of the training length."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from farspan.experiments import Experiment, Row, load
from farspan.report.results import Estimate, Record, Run, find, mean_of, share_of
from farspan.report.tables import (
    NOTHING,
    Entry,
    Table,
    Value,
    cell,
    grid,
    listing,
    noted,
    perplexity_text,
    pivot,
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
    """Return the variants measured or trained, in the order of the papers' tables."""
    found = {row.variant for kind in kinds or ("training", "perplexity", "passkey") for row in run.of(kind)}
    return sorted(found, key=variant_order)


def condition(variant: str, scaling: str) -> str:
    return f"{variant_name(variant)}, {scaling_name(scaling)}"


def _column(ours: int | None, paper: int | None, same: bool) -> str:
    if same or paper is None:
        return f"{ours or paper:,}"
    return f"{ours:,} (paper {paper:,})" if ours else f"(paper {paper:,})"


# The CoCA paper


def experiment_tables(run: Run, experiment: Experiment) -> list[Table]:
    """Make the tables of an experiment on lengths: the rows that were run, each with the paper's below."""
    kinds = {row.kind or experiment.kind for row in experiment.rows}
    ranges = distance_ranges(run, experiment)
    entries: Entries = [(row.label, "ours", by_distance(run, row, ranges)) for row in experiment.rows_of("distance")]
    title, heads = (
        f"{experiment.title} (tokens from the key to the end, higher is better)",
        [name for name, *_ in ranges],
    )
    made = [grid(experiment.name, title, heads, entries, caption=experiment.caption, heading="Method")]
    for kind, of in (("perplexity", "perplexity"), ("passkey", "passkey"), ("near", "near-far"), ("far", "near-far")):
        name = f"{experiment.name}-{kind}" if len(kinds) > 1 or of == "near-far" else experiment.name
        made.append(_by_length(run, experiment, experiment.rows_of(of), kind, name))
    return [table for table in made if table]


def _by_length(run: Run, experiment: Experiment, rows: list[Row], kind: str, name: str) -> Table | None:
    lengths, base = run.lengths("perplexity" if kind == "perplexity" else "passkey"), run.train_length or 1
    ours = {Fraction(length, base): length for length in lengths}
    paper = {Fraction(length, experiment.train_length): i for i, length in enumerate(experiment.lengths)}
    columns = [(ours.get(ratio), paper.get(ratio)) for ratio in sorted(ours.keys() | paper)]
    show = perplexity_text if kind == "perplexity" else share_text
    entries: Entries = []
    for row in rows:
        modes = [scaling for scaling in run.scalings(row.variant) if scaling.startswith(f"{row.scaling}/")]
        before = len(entries)
        for scaling in (row.scaling, *modes):
            source = "ours" + "".join(f", {mode.replace('_', ' ')}" for mode in scaling.split("/")[1:])
            found = [run.at(kind, row.variant, scaling, n) if n else None for n, _ in columns]
            entries += [(row.label, source, found)] if any(found) else []
        if row.paper and len(entries) > before:
            entries.append((row.label, "paper", [None if i is None else show(row.paper[i]) for _, i in columns]))
    same = base == experiment.train_length
    heads = [_column(n, None if i is None else experiment.lengths[i], same) for n, i in columns]
    title = f"{experiment.title} ({SUBJECTS[kind]})"
    return grid(name, title, heads, entries, caption=experiment.caption, heading="Method")


def distance_ranges(run: Run, experiment: Experiment) -> list[tuple[str, float, float]]:
    """Return name, lower and upper end of each range of distance in tokens."""
    ends = [end * (run.train_length or experiment.train_length) for end in experiment.ranges]
    pairs = zip([0.0, *ends], [*ends, math.inf], strict=True)
    return [(f"{low:,.0f}–{high:,.0f}" if high < math.inf else f"> {low:,.0f}", low, high) for low, high in pairs]


def by_distance(run: Run, row: Row, ranges: Sequence[tuple[str, float, float]]) -> list[Estimate | None]:
    return [run.passkey_between(row.variant, row.scaling, low, high) for _, low, high in ranges]


# Everything measured


def measured_tables(run: Run) -> list[Table]:
    """Make tables of everything measured by length: the mean and, where there are several, each seed."""
    made = []
    for kind in ("perplexity", "passkey"):
        lengths, entries = run.lengths(kind), []
        for variant in variants_in(run, kind):
            for scaling in run.scalings(variant, kind):
                rows = run.of(kind, variant=variant, scaling=scaling)
                seeds = sorted({row.seed for row in rows})
                for seed in [None, *seeds] if len(seeds) > 1 else [None]:
                    one = Run({kind: [row for row in rows if seed in (None, row.seed)]})
                    source = scaling_name(scaling) + ("" if seed is None else f", seed {seed}")
                    found = [one.at(kind, variant, scaling, n) for n in lengths]
                    entries.append((variant_name(variant), source, found))
        title = f"All measurements ({SUBJECTS[kind]})"
        made.append(grid(f"measured-{kind}", title, (f"{n:,}" for n in lengths), entries))
    return [table for table in made if table]


def control_table(run: Run) -> Table | None:
    """Compare a long context with the same tokens whose context is cut to the training length."""
    lengths, found = run.lengths("perplexity"), []
    for variant in variants_in(run, "perplexity"):
        for scaling in run.scalings(variant):
            cut = [run.control(variant, scaling, n) for n in lengths]
            full = [run.at("perplexity", variant, scaling, n) for n in lengths]
            if any(cut) and any(full):
                found.append((variant, scaling, full, cut))
    heads = [f"{n:,}" for n in lengths]
    if all(len(set(cut)) == 1 for *_, cut in found):  # one number for all lengths has a column of its own
        heads = ["context cut", *heads]
        entries = [(variant_name(v), scaling_name(s), cut[:1] + full) for v, s, full, cut in found]
    else:
        names = ("whole window", "context cut")
        entries = [(condition(v, s), names[i], each[i]) for v, s, *each in found for i in (0, 1)]
    title = "Control: does the longer context help? (perplexity, lower is better)"
    caption = f"Context cut: the same tokens with the context cut to the training length of {run.train_length or 0:,}."
    return grid("control", title, heads, entries, caption=caption)


def training_table(run: Run) -> Table | None:
    rows = sorted(run.of("training"), key=lambda x: (variant_order(x.variant), x.seed))
    lines = [(variant_name(x.variant), "", {**x, "minutes": x.seconds / 60}) for x in rows]
    return listing("training", "Training", TRAINING, lines, caption="Loss in nats per token.", heading="Variant")


def position_table(run: Run) -> Table | None:
    """Show the loss by position, and what the far context gains over one cut to the training length."""
    rows, entries = run.of("positions"), list[Entry]()
    for v, s, a, b in dict.fromkeys((x.variant, x.scaling, x.start, x.stop) for x in rows):
        found, label, at = (
            find(rows, variant=v, scaling=s, start=a, stop=b),
            condition(v, s),
            ((a, b), f"{a:,}–{b - 1:,}"),
        )
        entries.append((label, "loss", at, loss_of(found, "nll")))
        entries.append((label, "context cut", at, loss_of(found, "control_nll")))
        entries.append((label, "gain", at, _gain(found)))
    title = "Loss by position (nats per token, lower is better)"
    caption = "Gain: loss with the context cut to the training length less loss with all of it, and its 95% interval."
    return pivot("positions", title, entries, caption=caption, heading="Model", show=THREE)


def loss_of(rows: Sequence[Record], name: str) -> Estimate | None:
    return mean_of([row[name] / row.tokens for row in rows if row[name] is not None])


def _gain(rows: list[Record]) -> str:
    gains = [(row.gain, row.gain_ci95) for row in rows if row.gain is not None]
    if not gains:
        return NOTHING
    note = f"95% {gains[0][1][0]:+.3f} to {gains[0][1][1]:+.3f}" if len(gains) == 1 and gains[0][1] else ""
    return noted(f"{sum(gain for gain, _ in gains) / len(gains):+.3f}", note)


def retrieval_table(run: Run) -> Table | None:
    """Show the accuracy over all depths."""
    entries: list[Entry] = []
    for task, v, s, n in sorted({(x.task, x.variant, x.scaling, x.length) for x in run.of("retrieval")}):
        rows = run.of("retrieval", task=task, variant=v, scaling=s, length=n)
        entries.append((task, condition(v, s), ((n,), f"{n:,}"), share_of(find(rows, depth=None) or rows)))
    return pivot("retrieval", "Retrieval by prompt length (accuracy, higher is better)", entries, heading="Task")


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
    once: list[Value] = [cell(pairs, THREE), bits, amount(model.tokens), minutes]
    lines: list[tuple[str, list[Value]]] = []
    for scaling in run.scalings(name) or ["none"]:
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


def amount(number: float) -> str:
    """
    >>> amount(33_400_000), amount(1500), amount(12)
    ('33.4M', '1.5k', '12')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


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
