"""Results of tasks → tables beside the paper's, and what they say about re-weighting and linear attention."""

from collections.abc import Callable, Sequence
from functools import partial

from farspan.report.collect import Run
from farspan.report.estimates import Estimate, share_of
from farspan.report.names import variant_name
from farspan.report.records import Share, TaskResult
from farspan.report.tables import (
    Cell,
    Line,
    Table,
    counts_text,
    estimate_cell,
    perplexity_text,
    share_text,
)
from farspan.report.task_table import TaskTable

SUBJECTS = {
    "accuracy": "accuracy on the test set, higher is better",
    "perplexity": "perplexity of held-out text, lower is better",
    "speed": "tokens a second in training, higher is better",
    "memory": "GPU memory in training, GB, lower is better",
}
DIGITS = 4
"""Of an accuracy: what the paper gives."""
FEWEST_SEEDS = 3
"""A side, before the range over seeds alone may part two variants."""
COMPARED = (("cosformer", "rope"), ("cosformer", "cosformer-plain"), ("linear-coca", "cosformer"))


def of(run: Run, task: str, variant: str) -> list[TaskResult]:
    """The results of one variant on one task, one a seed."""
    return [row for row in run.tasks if (row.task, row.variant) == (task, variant)]


def spread(values: Sequence[float]) -> Estimate | None:
    """Mean and range over seeds."""
    return Estimate(sum(values) / len(values), min(values), max(values), len(values)) if values else None


def measured(run: Run, measure: str, task: str, variant: str) -> Estimate | None:
    """What a table of this measure shows for a variant."""
    rows = of(run, task, variant)
    if measure == "accuracy":
        return share_of(Share(row.cases, row.correct) for row in rows if row.cases and row.correct is not None)
    reads: dict[str, Callable[[TaskResult], float | None]] = {
        "perplexity": lambda row: row.ppl,
        "speed": lambda row: row.tokens_per_second,
        "memory": lambda row: None if row.peak_bytes is None else row.peak_bytes / 1e9,
    }
    return spread([value for row in rows if (value := reads[measure](row)) is not None])


def _shown(measure: str) -> Callable[[float | str], str]:
    return partial(share_text, digits=DIGITS) if measure == "accuracy" else perplexity_text


def task_table(run: Run, table: TaskTable) -> Table | None:
    """Ours beside the paper's; None where nothing of it was measured."""
    lines, any_found = [], False
    show = _shown(table.measure)
    for row in table.rows:
        found = [measured(run, table.measure, task, row.variant) for task in table.columns]
        any_found = any_found or any(found)
        cells = tuple(estimate_cell(estimate, DIGITS) for estimate in found)
        lines.append(Line(row.label, "ours", cells, counts_text(found) or "not run"))
        if row.paper:
            lines.append(
                Line(row.label, "paper", tuple(Cell(show(value)) if value != "" else Cell() for value in row.paper))
            )
    small = " Small print: " + (
        "95% Wilson interval over the cases of all seeds, " if table.measure == "accuracy" else ""
    )
    title = f"{table.title} ({SUBJECTS[table.measure]})"
    caption = f"{table.caption}{small}range over seeds."
    return Table(table.name, title, caption, table.headings, tuple(lines), "Attention") if any_found else None


def training_table(run: Run) -> Table | None:
    """How each model was trained."""
    if not run.tasks:
        return None
    heads = ("seeds", "parameters", "length", "pre-training steps", "steps", "minutes", "tokens/s", "GB")
    lines = []
    for task in dict.fromkeys(row.task for row in run.tasks):
        for variant in dict.fromkeys(row.variant for row in run.tasks if row.task == task):
            rows = of(run, task, variant)
            first, speed, memory = (
                rows[0],
                measured(run, "speed", task, variant),
                measured(run, "memory", task, variant),
            )
            minutes = sum(row.seconds for row in rows) / len(rows) / 60
            texts = [str(len(rows)), f"{first.parameters:,}", f"{first.length:,}", f"{first.pretraining_steps:,}"]
            texts += [f"{first.steps:,}", f"{minutes:,.1f}", f"{speed.value:,.0f}" if speed else "—"]
            texts.append(f"{memory.value:.1f}" if memory else "—")
            lines.append(Line(task, variant_name(variant), tuple(map(Cell, texts))))
    return Table("task-training", "Training for tasks", "Means over seeds.", heads, tuple(lines), "Task")


def task_verdicts(run: Run, tables: Sequence[TaskTable]) -> list[str]:
    """For each task: is cosFormer ahead of softmax attention, does re-weighting help, is linear CoCA ahead of it?"""
    said = []
    for table in tables:
        if table.measure in ("accuracy", "perplexity"):
            for task, heading in zip(table.columns, table.headings, strict=True):
                parts = [_against(run, table.measure, task, *pair) for pair in COMPARED]
                if kept := [part for part in parts if part]:
                    said.append(f"{heading}: {'; '.join(kept)}.")
    return said


def _against(run: Run, measure: str, task: str, ours: str, other: str) -> str | None:
    """Better or worse only where neither the intervals of the counts nor the ranges over seeds touch.

    Both are asked: all seeds answer the same test set, so that the interval alone knows nothing of their luck. Where
    there is no interval, as for perplexity, the range of one or two seeds says nothing, and so no verdict is given.
    """
    a, b = measured(run, measure, task, ours), measured(run, measure, task, other)
    if a is None or b is None:
        return None
    show = _shown(measure)
    numbers = f"{variant_name(ours)} {show(a.value)}, {variant_name(other)} {show(b.value)}"
    if min(a.seeds, b.seeds) < FEWEST_SEEDS and (a.interval is None or b.interval is None):
        return f"{numbers}: too few seeds to tell apart ({min(a.seeds, b.seeds)} of at least {FEWEST_SEEDS})"
    low_a, low_b = (min(e.low, (e.interval or (e.low,))[0]) for e in (a, b))
    high_a, high_b = (max(e.high, (e.interval or (e.high,))[-1]) for e in (a, b))
    if low_a <= high_b and low_b <= high_a:
        return f"{numbers}: not told apart"
    ahead = (a.value > b.value) == (measure == "accuracy")
    return f"{numbers}: {'better' if ahead else 'worse'}"


def task_notes(run: Run) -> list[str]:
    """Conditions a reader must know."""
    if not run.tasks:
        return []
    said = ["Accuracy is all right cases over all cases of all seeds; perplexity is the mean of the seeds'."]
    said.append(
        "Validation sets are for choices such as the learning rate; the test set is answered once, after the last step."
    )
    seeds = {task: len({row.seed for row in run.tasks if row.task == task}) for task in {r.task for r in run.tasks}}
    alone = sorted(task for task, count in seeds.items() if count == 1)
    if alone:
        said.append(f"One seed only ({', '.join(alone)}): part of any difference is the luck of that seed.")
    return said
