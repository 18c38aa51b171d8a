"""Do the steps that have no result yet, and write the page."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from farspan.data import documents, load_tokenizer
from farspan.data.passkey import check_prompt, check_row
from farspan.data.sources import resolve
from farspan.errors import require
from farspan.evaluation import read_pairs
from farspan.reproduce.plan import Step, plan
from farspan.reproduce.preset import Preset
from farspan.reproduce.work import Work
from farspan.utils import Progress, check_folder, check_same, lock, silent, write_json

POLL_SECONDS = 2.0
"""Between looks at steps that another process has taken."""
SETTINGS = "settings.json"


class Outcome(NamedTuple):
    """What a reproduction ends with."""

    page: Path
    failed: list[str]
    """Steps that failed in this call, with their messages."""


def reproduce(
    preset: Preset, out: str | os.PathLike[str], *, only: list[str] | None = None, progress: Progress = silent
) -> Outcome:
    """Do what is missing in `out` and draw the page. Call again with the same settings after an interruption.

    Several processes may work in one folder: each takes the first step that is ready and that no other has taken. A
    step that fails leaves the others running; steps that need it are skipped.

    Args:
        only: names of tables, figures, kinds of step, models or tasks (:func:`farspan.reproduce.plan.plan`).
    """
    world = os.environ.get("WORLD_SIZE", "1")
    require(world == "1", f"reproduce runs in one process, got WORLD_SIZE {world}; use farspan train for several")
    folder = Path(out).resolve()
    check_folder(folder, SETTINGS, what="begun by farspan reproduce")
    steps = plan(preset, folder, only)
    _check_inputs(preset, folder, [step for step in steps if not step.result.exists()])
    stages = {name: [asdict(stage) for stage in member.stages] for name, member in preset.members.items()}
    with lock(folder, wait=True):
        check_same(folder / SETTINGS, {**asdict(preset), "stages": stages}, "reproduction")
    failed = _run(steps, folder, progress)
    with lock(folder / "locks", wait=True, name="page.lock"):
        _write_status(folder / "status.json", steps, failed)
        from farspan.report import write_report

        return Outcome(write_report(folder), [f"{name}: {message}" for name, message in failed.items()])


def main_table(folder: str | os.PathLike[str]) -> list[list[str]]:
    """Return the main numbers of a run as text: perplexity by length, or the result of each task, over all seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    heading = "task"
    for path in sorted(Path(folder, "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for row in result["rows"]:
            name, measured = row.get("variant"), result.get("kind")
            if measured == "perplexity" and row["mode"] == "sliding":
                heading = "perplexity at"
                name += "" if row["scaling"] == "none" else f" + {row['scaling']}"
                found.setdefault(name, {}).setdefault(f"{row['length']:,}", []).append(row["ppl"])
            elif measured == "task":
                found.setdefault(name, {}).setdefault(row["task"], []).append(row.get("ppl", row.get("accuracy")))
    columns = sorted({column for row in found.values() for column in row}, key=lambda column: (len(column), column))
    body = [[name, *(_mean(row.get(column, [])) for column in columns)] for name, row in sorted(found.items())]
    return [[heading, *columns], *body] if found else []


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else "–"


def _write_status(path: Path, steps: list[Step], failed: dict[str, str]) -> None:
    """Write how each step stands, for the page; how a step failed for another process stays until it is done."""
    known = {row["step"]: row for row in json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else {}
    for step in steps:
        state = "done" if step.result.exists() else "failed" if step.name in failed else "pending"
        if state != "pending" or known.get(step.name, {}).get("state") != "failed":
            known[step.name] = {"step": step.name, "state": state, "message": failed.get(step.name, "")}
    write_json(path, list(known.values()))


def _run(steps: list[Step], folder: Path, progress: Progress) -> dict[str, str]:
    """Do what is ready, wait for what other processes do, and return the steps that failed with their messages."""
    failed: dict[str, str] = {}
    names = {step.name: step for step in steps}
    while True:
        left = [step for step in steps if not step.result.exists() and step.name not in failed]
        hopeless = [step for step in left if _lacks(step, names, failed)]
        ready = [
            step for step in left if all(names[name].result.exists() for name in step.needs) and step not in hopeless
        ]
        if len(left) == len(hopeless):
            return failed
        for step in ready:
            with _taken(folder, step) as mine:
                if not mine:
                    continue
                if not step.result.exists():  # another process may have done it since
                    message = _attempt(step, steps, progress)
                    failed |= {step.name: message} if message else {}
            break  # back to the top: what comes first in the plan may be ready by now
        else:
            time.sleep(POLL_SECONDS)


def _lacks(step: Step, names: dict[str, Step], failed: dict[str, str]) -> bool:
    """Return whether a step needs one that failed."""
    return any(name in failed or _lacks(names[name], names, failed) for name in step.needs)


@contextmanager
def _taken(folder: Path, step: Step) -> Iterator[bool]:
    """Yield whether this process alone has the step."""
    with ExitStack() as held:
        try:
            held.enter_context(lock(folder / "locks", name=step.name.replace("/", "-") + ".lock"))
        except ValueError:
            yield False
        else:
            yield True


def _attempt(step: Step, steps: list[Step], progress: Progress) -> str:
    """Do a step and return why it failed, or nothing."""
    before = sum(one.weight for one in steps if one.result.exists())
    everything, furthest = sum(one.weight for one in steps), 0.0

    def part(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
        nonlocal furthest
        furthest = max(furthest, done / total if total else 0.0)
        progress(before + furthest * step.weight, everything, f"{step.name}: {text or phase}".removesuffix(": "))

    part(0, None)
    torch.compiler.reset()  # blocks that were compiled for other shapes would make these shapes dynamic
    try:
        step.do(step.result, part)
    except Exception as error:  # whatever it is: name it, and let the other steps go on
        return " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        if torch.cuda.is_available():  # other processes may share the GPU
            torch.cuda.empty_cache()
    return ""


# What is checked before any work


def _check_inputs(preset: Preset, folder: Path, steps: list[Step]) -> None:
    """Raise for what is missing, misspelt or too short, before anything is tokenized."""
    corpus, work = preset.corpus, Work(preset, folder)
    if not steps:
        return
    for option, value, example in (
        ("checkpoint", corpus.checkpoint, "SmolLM2.gguf"),
        ("pairs", corpus.pairs, "blimp.jsonl.xz"),
        ("held-out", corpus.held_out, "test.jsonl.xz"),
    ):
        need = f"--{option} must be given for a preset that converts, got none; try --{option} {example}"
        require(bool(value) or not preset.converts, need)
    if preset.converts:
        _check_checkpoint(corpus.checkpoint)
    vocabulary = work.vocabulary
    tokenizer = load_tokenizer(vocabulary) if isinstance(vocabulary, str) else vocabulary
    for source in [*corpus.train, *corpus.held_out]:
        resolve(source)
    for path in corpus.labelled:
        require(Path(path).is_file(), f"--labelled must name a JSON-lines file, got {path!r}, which does not exist")
    for path in corpus.pairs:
        for _ in read_pairs(path):
            pass
    kinds = {step.kind for step in steps}
    if kinds & {"ppl", "positions", "tokens"}:
        _check_long_texts(preset, kinds)
    if not isinstance(tokenizer, int):
        _check_prompts(preset, tokenizer, {name for step in steps for name in step.chosen_by}, kinds)


def _check_checkpoint(path: str) -> None:
    from farspan.evaluation import scaling_name
    from farspan.evaluation.evaluate import configuration

    scaling = configuration(path).rotary().scaling
    require(
        scaling is None,
        f"--checkpoint must have plain rotary angles, got {scaling_name(scaling)}: 'none' would not be the original; "
        "use farspan convert, finetune and eval by themselves",
    )


def _check_long_texts(preset: Preset, kinds: set[str]) -> None:
    """Raise unless some document may have the tokens that are measured: a token has at least one byte."""
    groups = [member.measures for member in preset.members.values() if member.measures]
    wanted = [one.text_tokens for one in groups if one.perplexity_lengths] if "ppl" in kinds else []
    wanted += [one.position_tokens for one in groups] if "positions" in kinds else []
    needed = max(wanted, default=0)
    sources = preset.corpus.held_out or list(preset.corpus.train)
    found = (len(document.text.encode()) >= needed for source in sources for document in documents(source))
    require(
        not needed or any(found),
        f"--held-out must have a document of at least {needed} tokens, got none in {', '.join(sources)}; "
        "use longer texts",
    )


def _check_prompts(preset: Preset, tokenizer: object, chosen: set[str], kinds: set[str]) -> None:
    """Raise for rows and prompts that a passkey does not fit into."""
    for name, member in preset.members.items():
        if name not in chosen:
            continue
        if member.stages and member.stages[-1].passkey_share:
            check_row(tokenizer, member.stages[-1].length, f"length of stage {name}")  # type: ignore[arg-type]
        training = preset.training
        if not member.model.start and not preset.tasks and training.passkey_share:
            check_row(tokenizer, member.model.length or training.length, "training.length")  # type: ignore[arg-type]
        if member.measures and member.measures.passkey_lengths and "passkey" in kinds:
            shortest = min(member.measures.passkey_lengths)
            check_prompt(tokenizer, shortest, f"passkey length of {name}")  # type: ignore[arg-type]
