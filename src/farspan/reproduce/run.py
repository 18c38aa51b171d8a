"""Run the steps that are not done yet, remember how each ended, write the page."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from farspan.data import load_tokenizer
from farspan.data.sources import resolve
from farspan.errors import require
from farspan.reproduce.plan import Step, plan
from farspan.reproduce.preset import Corpus, Preset
from farspan.reproduce.work import Work


@dataclass(frozen=True)
class Standing:
    """How far a reproduction is, for a progress display."""

    share: float
    """Of the whole work, by the weights of its steps."""
    step: str
    detail: str = ""


def reproduce(
    preset: Preset,
    out: str | os.PathLike[str],
    *,
    only: list[str] | None = None,
    report: Callable[[Standing], None] | None = None,
) -> Path:
    """Do what is missing in `out` and return the path of its page. Call again after an interruption.

    A step that fails is recorded in ``status.json`` with its message; steps that need it are left pending.
    """
    require(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        f"reproduce runs in one process, got WORLD_SIZE {os.environ.get('WORLD_SIZE')}; use farspan train for several",
    )
    folder = Path(out).resolve()
    steps = plan(preset, folder, only)
    if not steps[0].result.exists():
        _check_corpus(preset.corpus)
    folder.mkdir(parents=True, exist_ok=True)
    _keep_preset(preset, folder)
    states: dict[str, dict[str, str]] = {s.name: {"state": "pending", "message": ""} for s in steps}
    say = report or (lambda _: None)
    total, done = sum(step.weight for step in steps), 0
    for step in steps:
        standing = Standing(done / total, step.name)
        say(standing)
        work = Work(preset, folder, partial(_say_detail, say, standing, step.weight / total))
        states[step.name] = _attempt(work, step, states)
        _write_status(folder, states)
        done += step.weight
    from farspan.report import write_report

    say(Standing(1.0, "report"))
    return write_report(folder)


def _check_corpus(corpus: Corpus) -> None:
    """Refuse what the user misspelt before anything is made."""
    for source in [*corpus.train, *corpus.held_out]:
        resolve(source)
    if not corpus.tokenizer.isdigit():
        load_tokenizer(corpus.tokenizer)


def _say_detail(say: Callable[[Standing], None], standing: Standing, weight: float, detail: str, part: float) -> None:
    say(replace(standing, detail=detail, share=standing.share + weight * part))


def _attempt(work: Work, step: Step, states: dict[str, dict[str, str]]) -> dict[str, str]:
    if step.result.exists():
        return {"state": "done", "message": "from an earlier call"}
    needed = {"data": None, "train": "data"}.get(step.kind, f"train {step.variant} seed {step.seed}")
    if needed is not None and states[needed]["state"] != "done":
        return {"state": "pending", "message": f"needs {needed}"}
    try:
        work.do(step)
    except Exception as error:  # whatever it is: name it, and let the other steps go on
        return {"state": "failed", "message": " ".join(f"{type(error).__name__}: {error}".split())}
    return {"state": "done", "message": ""}


def _keep_preset(preset: Preset, folder: Path) -> None:
    """A folder belongs to one preset: results made under another must not be mixed in."""
    path, text = folder / "preset.txt", repr(preset)
    if not path.exists():
        (folder / "preset.txt.part").write_text(text)
        os.replace(folder / "preset.txt.part", path)
    require(path.read_text() == text, f"{folder} holds a reproduction with other settings; choose another --out")


def _write_status(folder: Path, states: dict[str, dict[str, str]]) -> None:
    rows = [{"step": name, **state} for name, state in states.items()]
    temporary = folder / "status.json.part"
    temporary.write_text(json.dumps(rows, indent=1))
    os.replace(temporary, folder / "status.json")
