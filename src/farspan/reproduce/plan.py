"""The steps of a reproduction in order, each with the file that shows it is done."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from farspan.errors import require
from farspan.experiments import load_all
from farspan.layers import AttentionSpec
from farspan.reproduce.preset import Evaluation, Member, Preset
from farspan.reproduce.work import Work
from farspan.tasks import TASKS
from farspan.utils import Progress

WEIGHTS = {"train": 8, "task": 8, "finetune": 8, "convert": 2}
"""How long a kind of step takes, very roughly, beside the others, which count 1."""
ANSWERS = {"perplexity": "ppl", "passkey": "passkey", "near-far": "passkey", "distance": "passkey"}
"""The kind of step that gives a kind of table or figure its numbers."""
MAKE, COSTLY, LONG, SPEED = 0, 1, 2, 1000
"""Phases: models with what is quick to measure, seed by seed; what takes longer; long windows; timing."""


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

    @property
    def weight(self) -> int:
        return WEIGHTS.get(self.kind, 1)


def plan(preset: Preset, folder: Path, only: list[str] | None = None) -> list[Step]:
    """Return the steps that `only` chooses, with all that they need, in the order of work.

    Args:
        only: names of tables and figures, kinds of step, models, runs and tasks. Kinds, models and tasks narrow each
            other: "ppl" and "rope" choose the perplexity of rope. None = all steps but "speed".
    """
    steps = sorted(_steps(preset, Work(preset, folder)), key=lambda step: step.order)
    kinds, names = {step.kind for step in steps}, set[str]().union(*(step.chosen_by for step in steps))
    tasks, papers = set(preset.tasks), {name: what & (kinds | names) for name, what in tables().items()}
    known = [name for name, what in papers.items() if what] + sorted(kinds) + [*preset.members, *tasks] + sorted(names)
    chosen = set[str]()
    for name in only or []:
        listed = ", ".join(dict.fromkeys(known))
        require(name in known, f"--only must name some of {listed}, got {name!r}; separate them by commas")
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
    """Make every step of a preset. `order` is phase, seed, make or measure, and what ends a run before the rest."""
    results = work.folder / "results"
    for number, name in enumerate(work.token_folders):  # the first sets the vocabulary for all
        needs = ("tokens source-0",) if number else ()
        result = work.folder / "data" / name / "manifest.json"
        yield Step("tokens", f"tokens {name}", result, partial(work.tokens, number), needs, order=(MAKE, -1, number))
    for number, member in enumerate(preset.members.values()):
        scratch = not member.model.start
        if scratch and preset.tasks:
            yield from _task_steps(preset, work, member)
            continue
        for seed in range(member.model.seeds if scratch else 1):
            make = _making(preset, work, member, seed, number)
            yield make
            yield from _measuring(work, member, seed, make)
    for part in preset.speed:
        name = "speed-cosformer" if part == "cosformer" else f"{part}-coca"
        yield Step("speed", f"speed {part}", results / f"{name}.json", partial(work.speed, part), order=(SPEED,))


def _making(preset: Preset, work: Work, member: Member, seed: int, number: int) -> Step:
    """Make the step that trains, converts or fine-tunes a model."""
    results, runs, name = work.folder / "results", frozenset(member.runs), member.name
    if not member.model.start:
        result, do = results / f"train-{name}-s{seed}.json", partial(work.train, name, seed)
        order = (MAKE, seed, 0, number)
        return Step("train", f"train {name} seed {seed}", result, do, work.text_steps, runs, order)
    result = results / f"model-{name}.json"
    if not member.stages:  # the longest calibration first
        order = (MAKE, 0, -2, -member.model.calibrate_tokens)
        return Step("convert", f"convert {name}", result, partial(work.convert, member), (), runs, order)
    before = "finetune" if preset.members[member.before].stages else "convert"
    needs, order = (*work.text_steps, f"{before} {member.before}"), (MAKE, 0, -1, number)
    return Step("finetune", f"finetune {name}", result, partial(work.finetune, member), needs, runs, order)


def _measuring(work: Work, member: Member, seed: int, make: Step) -> Iterator[Step]:
    """Make the steps that measure a model."""
    of, (_, _, subject) = member.measures, make.name.partition(" ")
    if of is None:
        return

    def step(kind: str, phase: int, scaling: str = "none", lengths: Sequence[int] = (), far: int = 0) -> Step:
        scaled = scaling if kind in ("ppl", "passkey", "retrieval", "positions") else ""
        name = " ".join(filter(None, (kind, subject, scaled, f"from {lengths[0]}" if far else "")))
        file = name.replace(" seed ", "-s").replace("/", "-").replace(" ", "-")
        needs = (make.name, *(work.text_steps if kind in ("ppl", "positions") else ()))
        do = partial(work.measure, kind, member, seed, scaling, lengths, far)
        order = (phase, seed, 1, int(not member.ends))
        return Step(kind, name, work.folder / "results" / f"{file}.json", do, needs, make.chosen_by, order)

    if of.window:
        yield from (step(kind, MAKE) for kind in (() if member.stages else ("cache",)))
        yield from (step(kind, MAKE) for kind in ("bits", "pairs"))
    asked = of.retrieval_lengths if of.retrieval_tasks else []
    for scaling in scalings_of(work.preset, member):
        for kind, every in (("ppl", of.perplexity_lengths), ("passkey", of.passkey_lengths), ("retrieval", asked)):
            for far, lengths in _split(of, every, scaling):
                yield step(kind, LONG + far if far else COSTLY if kind == "retrieval" else MAKE, scaling, lengths, far)
        if of.position_tokens:
            yield step("positions", MAKE, scaling)


def _split(measures: Evaluation, lengths: Iterable[int], scaling: str) -> Iterator[tuple[int, list[int]]]:
    """Yield the lengths between the limits of `long`, less those at which a scaling changes nothing."""
    repeated = scaling == "none+log" and "none" in measures.scalings
    same = measures.inside if scaling.startswith("dynamic_ntk") or repeated else 0
    for far in range(len(measures.long) + 1):
        part = [n for n in lengths if n > same and sum(n > limit for limit in measures.long) == far]
        if part:
            yield far, part


def scalings_of(preset: Preset, member: Member) -> list[str]:
    """Return the scalings that a model is measured under; ALiBi and linear layers take none."""
    assert member.measures is not None
    attention = preset.attention(member.name) if not member.model.start else "rope"
    fixed = not str(attention).startswith("hybrid") and AttentionSpec.parse(attention).kind in (
        "alibi",
        "cosformer",
        "linear-coca",
    )
    names = member.measures.scalings
    return [name for name in names if not fixed or name.startswith("none")] or ["none"]


def _task_steps(preset: Preset, work: Work, member: Member) -> Iterator[Step]:
    """Make the steps of a model trained for each task, with its test; tasks in the preset's order."""
    first = member.name == next(iter(preset.members))
    for number, task in enumerate(preset.tasks):
        if TASKS[task].needs_labelled and not preset.corpus.labelled:
            continue
        examples = f"examples {task}"
        needs, order = work.text_steps if TASKS[task].needs_text else (), (MAKE, number)
        if first:
            done, do = work.folder / "data" / f"{task}.json", partial(work.examples, task)
            yield Step("examples", examples, done, do, needs, frozenset({task}), (*order, -1))
        for seed in range(member.model.seeds):
            yield Step(
                "task",
                f"train {task} {member.name} seed {seed}",
                work.folder / "results" / f"task-{task}-{member.name}-s{seed}.json",
                partial(work.task, task, member.name, seed),
                (examples, *needs),
                frozenset({task, *member.runs}),
                (*order, seed),
            )
