"""The steps of a reproduction in order, each with the file that shows it is done."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from farspan.errors import require
from farspan.experiments import load_all
from farspan.layers import AttentionSpec
from farspan.reproduce.preset import CHECKPOINT, Evaluation, Preset
from farspan.reproduce.work import Work
from farspan.tasks import TASKS
from farspan.utils import Progress

ANSWERS = {"perplexity": "ppl", "passkey": "passkey", "near-far": "passkey", "distance": "passkey"}
"""The kind of step that gives a kind of table or figure its numbers."""
MODELS, FOR_TASKS, COSTLY, SPEED = 0, 1, 2, 1000
"""Phases: models with what is quick to measure, by seed; tasks; what takes longer; beyond each limit; benchmarks."""


@dataclass(frozen=True)
class Step:
    """A piece of work, done when its result exists."""

    kind: str
    name: str
    result: Path
    do: Callable[[Path, Progress], object]
    needs: tuple[str, ...] = ()
    """Names of the steps that must be done before."""
    chosen_by: frozenset[str] = frozenset()
    """Names of models and tasks that choose it with ``--only``."""
    order: tuple[int, ...] = ()


def plan(preset: Preset, folder: Path, only: list[str] | None = None) -> list[Step]:
    """Return the steps that `only` chooses, with all that they need, in the order of work.

    Args:
        only: names of tables and figures, kinds of step, models and tasks. Kinds, models and tasks narrow each other:
            "ppl" and "rope" choose the perplexity of rope. None = all steps but "speed".
    """
    steps = sorted(_steps(preset, Work(preset, folder)), key=lambda step: step.order)
    kinds, names = {step.kind for step in steps}, set[str]().union(*(step.chosen_by for step in steps))
    tasks, papers = set(preset.tasks), {name: what & (kinds | names) for name, what in tables().items()}
    known = [*(name for name, what in papers.items() if what), *sorted(kinds), *preset.models, *preset.tasks]
    chosen = set[str]()
    for name in only or []:
        require(name in known, f"--only must name some of {', '.join(known)}, got {name!r}; separate them by commas")
        missing = f"--only {name} needs labelled texts, got none; name three files with --labelled"
        require(name not in tasks - names, missing)
        chosen |= papers.get(name) or {name}
    by_kind = chosen & kinds or kinds - {"speed"}
    by_name = [some for some in (chosen & tasks, chosen - kinds - tasks) if some]
    wanted = [s for s in steps if s.kind in by_kind and all(some & s.chosen_by for some in by_name)]
    require(bool(wanted), f"--only must choose at least one step, got {','.join(only or [])}; leave it out for all")
    needed = {step.name for step in wanted}
    for step in reversed(steps):  # what a step needs comes before it
        needed |= set(step.needs) if step.name in needed else set()
    return [step for step in steps if step.name in needed]


def tables() -> dict[str, set[str]]:
    """Return each table and figure of the papers with the kinds of step, or the tasks, that give its numbers."""
    found = {}
    for table in load_all():
        kinds = {table.kind, *(row.kind for row in table.rows)} & ANSWERS.keys()
        found[table.name] = {ANSWERS[kind] for kind in kinds} or set(table.columns) & TASKS.keys()
    return dict(sorted(found.items(), key=lambda table: (not table[0].startswith("table"), table)))


def _steps(preset: Preset, work: Work) -> Iterator[Step]:
    """Make every step of a preset, to be sorted by `order`: phase, seed, what is made before what is measured."""
    results = work.folder / "results"
    for number, name in enumerate(work.token_folders):  # the first sets the vocabulary for all
        needs = ("tokens source-0",) if number else ()
        result = work.folder / "data" / name / "manifest.json"
        yield Step("tokens", f"tokens {name}", result, partial(work.tokens, number), needs, order=(MODELS, -1, number))
    for number, (name, model) in enumerate(preset.models.items()):
        for seed in range(0 if preset.tasks_of(name) else 1 if model.start else model.seeds):
            make = _making(work, name, seed, number)
            yield make
            yield from _measuring(work, name, seed, make)
    for number, task in enumerate(preset.tasks):
        if preset.corpus.labelled or not TASKS[task].needs_labelled:
            yield from _task_steps(work, task, (FOR_TASKS, number))
    for part in preset.speed:
        name = "speed-cosformer" if part == "cosformer" else f"{part}-coca"
        yield Step("speed", f"speed {part}", results / f"{name}.json", partial(work.speed, part), order=(SPEED,))


def _making(work: Work, name: str, seed: int, number: int) -> Step:
    """Make the step that trains, converts or fine-tunes a model."""
    models, result, chosen_by = work.preset.models, work.made(name, seed), frozenset({name})
    start = models[name].start
    if not start:
        do, order = partial(work.train, name, seed), (MODELS, seed, 0, number)
        return Step("train", f"train {name} seed {seed}", result, do, work.text_steps, chosen_by, order)
    if start == CHECKPOINT:  # the longest calibration first
        do, order = partial(work.convert, name), (MODELS, 0, 0, -models[name].calibrate_tokens)
        return Step("convert", f"convert {name}", result, do, (), chosen_by, order)
    before = {"": f"train {start} seed 0", CHECKPOINT: f"convert {start}"}.get(models[start].start, f"finetune {start}")
    do, order = partial(work.finetune, name), (MODELS, 0, 1, number)
    return Step("finetune", f"finetune {name}", result, do, (*work.text_steps, before), chosen_by, order)


def _measuring(work: Work, name: str, seed: int, make: Step) -> Iterator[Step]:
    """Make the steps that measure a model."""
    of, (_, _, subject) = work.preset.measured(name), make.name.partition(" ")

    def step(kind: str, phase: int, scaling: str = "none", lengths: Sequence[int] = (), far: int = 0) -> Step:
        scaled = scaling if kind in ("ppl", "passkey", "retrieval", "positions") else ""
        title = " ".join(filter(None, (kind, subject, scaled, f"from {lengths[0]}" if far else "")))
        file = title.replace(" seed ", "-s").replace("/", "-").replace(" ", "-")
        needs = (make.name, *(work.text_steps if kind in ("ppl", "positions") else ()))
        do = partial(work.measure, kind, name, seed, scaling, lengths, far)
        order = (phase, seed, 2)
        return Step(kind, title, work.folder / "results" / f"{file}.json", do, needs, make.chosen_by, order)

    if of.window:
        yield from (
            step(kind, MODELS) for kind in ("cache", "bits", "pairs") if kind != "cache" or make.kind == "convert"
        )
    asked = of.retrieval_lengths if of.retrieval_tasks else []
    for scaling in scalings_of(work.preset, name):
        for kind, every in (("ppl", of.perplexity_lengths), ("passkey", of.passkey_lengths), ("retrieval", asked)):
            for far, lengths in _split(of, every, scaling):
                yield step(kind, COSTLY + far if far or kind == "retrieval" else MODELS, scaling, lengths, far)
        if of.position_tokens:
            yield step("positions", MODELS, scaling)


def _split(measures: Evaluation, lengths: Iterable[int], scaling: str) -> Iterator[tuple[int, list[int]]]:
    """Yield the lengths between the limits of `long`, less those at which a scaling changes nothing."""
    repeated = scaling == "none+log" and "none" in measures.scalings
    same = measures.inside if scaling.startswith("dynamic_ntk") or repeated else 0
    for far in range(len(measures.long) + 1):
        part = [n for n in lengths if n > same and sum(n > limit for limit in measures.long) == far]
        if part:
            yield far, part


def scalings_of(preset: Preset, name: str) -> list[str]:
    """Return the scalings that a model is measured under; ALiBi and linear layers take none."""
    found, attention = preset.measured(name).scalings, preset.attention(name)
    hybrid = str(attention).startswith("hybrid")
    if hybrid or AttentionSpec.parse(attention).kind not in ("alibi", "cosformer", "linear-coca"):
        return found
    return [scaling for scaling in found if scaling.startswith(("none", "own"))] or ["none"]


def _task_steps(work: Work, task: str, order: tuple[int, int]) -> Iterator[Step]:
    """Make the examples of a task, and the steps that train each model for it and test it."""
    preset, examples = work.preset, f"examples {task}"
    needs = work.text_steps if TASKS[task].needs_text else ()
    result, do = work.folder / "data" / f"{task}.json", partial(work.examples, task)
    yield Step("examples", examples, result, do, needs, frozenset({task}), (*order, -1))
    for name in preset.models:
        for seed in range(preset.models[name].seeds if task in preset.tasks_of(name) else 0):
            done, do = (
                work.folder / "results" / f"task-{task}-{name}-s{seed}.json",
                partial(work.task, task, name, seed),
            )
            title, chosen_by = f"train {task} {name} seed {seed}", frozenset({task, name})
            yield Step("task", title, done, do, (examples, *needs), chosen_by, (*order, seed))
