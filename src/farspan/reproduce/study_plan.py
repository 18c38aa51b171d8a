"""The steps of a drop-in study: models first, those that others wait for before the rest, then what is measured."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from farspan.reproduce.preset import Preset
from farspan.reproduce.step import Step
from farspan.reproduce.study import Member, Study


def study_steps(preset: Preset, folder: Path, only: list[str] | None, *, ends: bool) -> list[Step]:
    """Conversions, the longest first, text, trainings, and then measurements, in the order of ``[study.measures]``,
    of the models that the chosen runs end with before those on the way there, or of these alone.

    A process takes the first step that is ready, so that a measurement is made only where no training could begin.
    """
    study, results = preset.study, folder / "results"
    wanted, made = study.chosen(only, ends=ends)
    data = Step("data", folder / "data" / "done.json")
    makes = {m.name: _making(study, m, data, results) for m in made}
    starts = [m.name for m in made if not m.stages]
    starts.sort(key=lambda name: -study.conversion(name).calibrate_tokens)
    steps = [makes[name] for name in starts]
    steps += [data, *(makes[m.name] for m in made if m.stages)]
    for group in study.measures:
        for member in wanted:
            if member.measures == group:
                steps += _measuring(preset, member, results)
    return steps


def _making(study: Study, member: Member, data: Step, results: Path) -> Step:
    path = results / f"model-{member.name}.json"
    if not member.stages:
        like = "calibrated" if study.conversion(member.name).calibrate_tokens else "copied"
        return Step("convert", path, model=member.name, like=like)
    needs = (data.name, f"{'convert' if member.before == member.start else 'finetune'} {member.before}")
    return Step("finetune", path, model=member.name, like=member.stages[-1].name, needs=needs)


def _measuring(preset: Preset, member: Member, results: Path) -> Iterator[Step]:
    """What is measured of a model: what takes seconds first."""
    name, measures = member.name, preset.study.measured(member.measures)
    model = f"{'finetune' if member.stages else 'convert'} {name}"
    text = (model, "data")
    if not member.stages:
        yield Step("cache", results / f"cache-{name}.json", model=name, needs=(model,))
    yield Step("bits", results / f"bits-{name}.json", model=name, needs=(model,))
    yield Step("pairs", results / f"pairs-{name}.json", model=name, needs=(model,))
    for law in member.scalings or preset.evaluation.scalings:
        under = partial(Step, scaling=law, model=name, like=member.measures)
        file = f"{name}-{law.replace('/', '-')}.json"
        inside = law == "none" or law.startswith("yarn-")  # the others change nothing up to the training length
        if measures.near and inside:
            yield under("ppl", results / f"ppl-near-{file}", part="near", needs=text)
        if measures.far:
            yield under("ppl", results / f"ppl-far-{file}", part="far", needs=text)
        if preset.study.prompts(member, law):
            yield under("passkey", results / f"passkey-{file}", needs=(model,))
