"""Run the steps that are not done yet, remember how each ended, write the page."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from farspan.data import load_tokenizer
from farspan.data.sources import resolve
from farspan.errors import require
from farspan.files import claim, write_whole
from farspan.reproduce.pace import Ahead, Left, Pace
from farspan.reproduce.plan import plan
from farspan.reproduce.preset import Corpus, Preset
from farspan.reproduce.step import Step
from farspan.reproduce.study_work import StudyWork, check_study
from farspan.reproduce.work import Work

POLL_SECONDS = 2.0
"""Between looks at steps that another process has taken."""

ENDED = ("done", "failed")
DONE_HERE = {"state": "done", "message": ""}
"""A step that this call has done, and no other."""


@dataclass(frozen=True)
class Standing:
    """How far a reproduction is, for a progress display."""

    share: float
    """Of the whole work, by the weights of its steps."""
    step: str
    detail: str = ""
    left: Left | None = None
    """The time until all is done, were no other process at it; None before anything is known."""
    failed: tuple[str, ...] = ()
    """At the end: the steps that failed in this call, not in another process, with their messages."""


def reproduce(
    preset: Preset,
    out: str | os.PathLike[str],
    *,
    only: list[str] | None = None,
    ends: bool = False,
    report: Callable[[Standing], None] | None = None,
) -> Path:
    """Do what is missing in `out` and return the path of its page. Call again after an interruption.

    Several processes may be given one folder, on one GPU or on several: each takes the first step of the plan that is
    ready and that no other has taken. A step that fails is recorded in ``status.json`` with its message; steps that
    need it are left pending.

    Args:
        only: names of tables, figures, tasks or runs; None = all.
        ends: of a study, measure only the models that these runs end with. A second process then waits for them,
            where it would measure others beside a training on the same device.
    """
    require(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        f"reproduce runs in one process, got WORLD_SIZE {os.environ.get('WORLD_SIZE')}; use farspan train for several",
    )
    folder = Path(out).resolve()
    steps = plan(preset, folder, only, ends=ends)
    study = bool(preset.study.conversions)
    if not all(step.result.exists() for step in (steps if study else steps[:1])):
        if study:
            check_study(preset, steps)
        else:
            _check_corpus(preset.corpus)
    folder.mkdir(parents=True, exist_ok=True)
    _keep_preset(preset, folder)
    say = report or (lambda _: None)
    states = _run_steps(steps, preset, folder, say)
    from farspan.report import write_report

    failed = tuple(f"{name}: {state['message']}" for name, state in states.items() if state["state"] == "failed")
    say(Standing(1.0, "report", failed=failed))
    with claim(folder / "locks" / "report", wait=True):
        return write_report(folder)


def _run_steps(
    steps: list[Step], preset: Preset, folder: Path, say: Callable[[Standing], None]
) -> dict[str, dict[str, str]]:
    """Do what is ready, wait for what others do, and return how each step ended."""
    worker = StudyWork if preset.study.conversions else Work
    states: dict[str, dict[str, str]] = {s.name: {"state": "pending", "message": ""} for s in steps}
    _write_status(folder, states)
    total, left, pace = sum(step.weight for step in steps), steps, Pace()
    while left:
        for step in left:
            done = total - sum(s.weight for s in steps if states[s.name]["state"] in ("pending", "busy"))
            ahead = pace.begin(step, (other for other in left if other is not step and not other.result.exists()))
            standing = Standing(done / total, step.name, left=ahead.left())
            say(standing)
            work = worker(preset, folder, partial(_say_detail, say, standing, step.weight / total, ahead))
            state = _attempt(work, step, states)
            if state == DONE_HERE:
                pace.add(step, ahead.takes)
            if state != states[step.name]:
                states[step.name] = state
                _write_status(folder, {step.name: state})
            if state["state"] != "busy":
                left = [other for other in left if other is not step]
            if state["state"] in ENDED:
                break  # back to the top: what comes first in the plan may be ready by now
        else:
            if left:
                time.sleep(POLL_SECONDS)
    return states


def _check_corpus(corpus: Corpus) -> None:
    """Refuse what the user misspelt before anything is made."""
    for source in [*corpus.train, *corpus.held_out]:
        resolve(source)
    if not corpus.tokenizer.isdigit():
        load_tokenizer(corpus.tokenizer)


def _say_detail(
    say: Callable[[Standing], None], standing: Standing, weight: float, ahead: Ahead, detail: str, part: float
) -> None:
    share = standing.share + weight * part
    say(replace(standing, detail=detail, share=share, left=ahead.left(part)))


def _attempt(work: Work, step: Step, states: dict[str, dict[str, str]]) -> dict[str, str]:
    """Do a step unless it is done; "busy" where another process does it, or what it needs."""
    if step.result.exists():
        return {"state": "done", "message": "from an earlier call"}
    for needed in step.needs:
        if states[needed]["state"] != "done":
            state = "busy" if states[needed]["state"] == "busy" else "pending"
            return {"state": state, "message": f"needs {needed}"}
    with claim(work.folder / "locks" / step.lock) as mine:
        if not mine:
            return {"state": "busy", "message": "another process is at it"}
        if step.result.exists():  # since we looked
            return {"state": "done", "message": "by another process"}
        try:
            work.do(step)
        except Exception as error:  # whatever it is: name it, and let the other steps go on
            return {"state": "failed", "message": " ".join(f"{type(error).__name__}: {error}".split())}
    return DONE_HERE


def _keep_preset(preset: Preset, folder: Path) -> None:
    """A folder belongs to one preset: results made under another must not be mixed in."""
    stages = [(m.name, m.stages) for m in preset.study.members.values()]  # a recipe's name does not say what it is
    path, text = folder / "preset.txt", repr((preset, stages) if stages else preset)
    with claim(folder / "locks" / "preset", wait=True):
        if not path.exists():
            write_whole(path, text)
    require(path.read_text() == text, f"{folder} holds a reproduction with other settings; choose another --out")


def _write_status(folder: Path, states: dict[str, dict[str, str]]) -> None:
    """Put these steps into ``status.json``, which several processes write; all other steps stay as they are there.

    How a step ended is always put down. That it is pending or busy is only this process's view of it, which does not
    replace how it ended for another.
    """
    path = folder / "status.json"
    with claim(folder / "locks" / "status", wait=True):
        rows = json.loads(path.read_text()) if path.exists() else []
        known: dict[str, dict[str, str]] = {row["step"]: row for row in rows}
        for name, state in states.items():
            if state["state"] in ENDED or known.get(name, {}).get("state") not in ENDED:
                known[name] = {"step": name, **state}
        write_whole(path, json.dumps(list(known.values()), indent=1))
