"""The steps of a reproduction, in order, each with the file that shows it is done."""

from collections.abc import Sequence
from pathlib import Path

from farspan.errors import require
from farspan.layers import AttentionSpec
from farspan.report.experiment import load_experiments
from farspan.report.task_table import load_task_tables
from farspan.reproduce.preset import Preset
from farspan.reproduce.step import Step
from farspan.reproduce.study_plan import study_steps
from farspan.tasks import TASKS, attention_of

MEASUREMENTS = {"perplexity": "ppl", "passkey": "passkey", "near-far": "passkey", "distance": "passkey"}
"""The step that gives each kind of table or figure its numbers."""


def plan(preset: Preset, folder: Path, only: list[str] | None = None, *, ends: bool = False) -> list[Step]:
    """All steps for the chosen tables and figures; training comes before what needs it.

    ends: of a study, measure only the models that runs end with.
    """
    if preset.study.conversions:
        return study_steps(preset, folder, only, ends=ends)
    require(not ends, "--ends is for a preset with a study, such as dropin, got another; leave it out")
    return _task_steps(preset, folder, only) if preset.tasks else _length_steps(preset, folder, only)


def _length_steps(preset: Preset, folder: Path, only: list[str] | None) -> list[Step]:
    """One model a variant and seed, measured past its training length; CoCA's speed only where it is asked for.

    Nothing else should run on the device while speed is measured, and other processes may be at the same folder.
    """
    kinds = {e.name: {MEASUREMENTS[row.kind or e.kind] for row in e.rows} for e in load_experiments()}
    tables = sorted(kinds, key=lambda name: (not name.startswith("table"), name))
    chosen = _chosen(only, tables, ["speed"] if preset.speed.lengths or preset.speed.contexts else [])
    wanted = set().union(*(kinds[name] for name in chosen if name != "speed"))
    results = folder / "results"
    timed = _speed_steps(preset, results) if "speed" in chosen else []
    if set(chosen) == {"speed"}:
        return timed
    steps = [Step("data", folder / "data" / "done.json")]
    trained = {
        (v, s): Step("train", results / f"train-{v}-s{s}.json", v, s, needs=(steps[0].name,)) for v, s in preset.runs
    }
    steps += trained.values()
    lengths = {"ppl": preset.evaluation.perplexity_lengths, "passkey": preset.evaluation.passkey_lengths}
    for kind in ("ppl", "passkey"):
        if kind in wanted and lengths[kind]:
            for variant, seed in preset.runs:
                for scaling in preset.evaluation.scalings if _stretches(variant) else ["none"]:
                    path = results / f"{kind}-{variant}-s{seed}-{scaling}.json"
                    needs = (trained[variant, seed].name,)
                    steps.append(Step(kind, path, variant, seed, scaling, needs=needs))
    return steps + timed


def _speed_steps(preset: Preset, results: Path) -> list[Step]:
    """CoCA beside RoPE: one layer, and the whole model at inference."""
    parts = {"layer": preset.speed.lengths, "decode": preset.speed.contexts}
    return [Step("speed", results / f"{part}-coca.json", part=part) for part, sizes in parts.items() if sizes]


def _stretches(variant: str) -> bool:
    """Whether dynamic NTK can change a variant: ALiBi and cosFormer have no such angles, linear CoCA's are fixed."""
    return AttentionSpec.parse(attention_of(variant)).kind in ("rope", "coca")


def _task_steps(preset: Preset, folder: Path, only: list[str] | None) -> list[Step]:
    """A model for each task, variant and seed; tasks in the preset's order, the most wanted first; then speed."""
    tables = {table.name: set(table.columns) for table in load_task_tables()}
    known = {**tables, **{name: {name} for name in preset.tasks}}
    if preset.speed.lengths:
        known["speed"] = {"speed"}
    wanted = set().union(*(known[name] for name in _chosen(only, list(known))))
    results = folder / "results"
    timed = [Step("speed", results / "speed-cosformer.json")] if "speed" in wanted else []
    if wanted == {"speed"}:
        return timed
    labelled = preset.corpus.labelled
    for path in labelled:
        require(Path(path).is_file(), f"--labelled must name a JSON-lines file, got {path!r}, which does not exist")
    left_out = [name for name in preset.tasks if name in wanted and TASKS[name].needs_labelled and not labelled]
    tasks = tuple(name for name in preset.tasks if name in wanted and name not in left_out)
    require(
        bool(tasks),
        f"--only {','.join(only or [])} needs labelled texts, got none; name three files with --labelled"
        if left_out
        else f"--only must name something this preset has a task for ({', '.join(preset.tasks)}), got {only}",
    )
    steps = [Step("data", folder / "data" / f"done-{'-'.join(tasks)}.json", tasks=tasks)]
    for task in tasks:
        for v, s in preset.runs:
            result = results / f"task-{task}-{v}-s{s}.json"
            steps.append(Step("train", result, v, s, task=task, needs=(steps[0].name,)))
    return steps + timed


def _chosen(only: list[str] | None, known: list[str], on_request: Sequence[str] = ()) -> list[str]:
    """What was asked for, else all but what is done only `on_request`."""
    names = [*known, *on_request]
    for name in only or []:
        require(name in names, f"--only must name some of {', '.join(names)}, got {name!r}; separate them by commas")
    return only or known
