"""Do the steps that have no result yet, and write the page."""

import json
import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from farspan.data import documents, load_tokenizer
from farspan.data.passkey import check_prompt, check_row
from farspan.data.sources import resolve
from farspan.errors import require
from farspan.evaluation import read_pairs, scaling_name
from farspan.evaluation.evaluate import check_retrieval, configuration
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.report.results import collect
from farspan.reproduce.preset import Preset
from farspan.reproduce.steps import Step, Work, plan
from farspan.tasks.examples import labelled_texts
from farspan.training.pretraining import check_rows, model_config
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
        only: names of tables, figures, kinds of step, models or tasks (:func:`farspan.reproduce.steps.plan`).
    """
    world = os.environ.get("WORLD_SIZE", "1")
    require(world == "1", f"reproduce runs in one process, got WORLD_SIZE {world}; use farspan train for several")
    folder = Path(out).resolve()
    check_folder(folder, SETTINGS, what="begun by farspan reproduce")
    steps = plan(preset, folder, only)
    todo = [step for step in steps if not step.result.exists()]
    if todo:
        check_inputs(preset, Work(preset, folder), todo)
    recipes = {name: asdict(preset.recipe(name)) for name in preset.models if preset.origin(name) != name}
    with lock(folder, wait=True):
        check_same(folder / SETTINGS, {**asdict(preset), "recipes": recipes}, "reproduction")
    failed = _run(steps, folder, progress)
    with lock(folder / "locks", wait=True, name="page.lock"):
        _write_status(folder / "status.json", steps, failed)
        from farspan.report import write_report

        return Outcome(write_report(folder), [f"{name}: {message}" for name, message in failed.items()])


def _run(steps: list[Step], folder: Path, progress: Progress) -> dict[str, str]:
    """Do what is ready, wait for what other processes do, and return the steps that failed with their messages."""
    failed: dict[str, str] = {}
    while True:
        done, blocked = {step.name for step in steps if step.result.exists()}, set(failed)
        for step in steps:  # what a step needs comes before it
            blocked |= {step.name} if blocked.intersection(step.needs) else set()
        left = [step for step in steps if step.name not in done | blocked]
        if not left:
            return failed
        ready = (step for step in left if done.issuperset(step.needs))
        # After each step back to the top: what comes first in the plan may be ready by now.
        if not any(_take(step, folder, failed, len(done), len(steps), progress) for step in ready):
            time.sleep(POLL_SECONDS)


def _take(step: Step, folder: Path, failed: dict[str, str], before: int, steps: int, progress: Progress) -> bool:
    """Do a step, and note in `failed` why it failed; return False if another process works on it."""
    with ExitStack() as held:
        try:
            held.enter_context(lock(folder / "locks", name=step.name.replace("/", "-") + ".lock"))
        except ValueError:
            return False
        if not step.result.exists():  # it may have been done since
            message = _attempt(step, before, steps, progress)
            failed |= {step.name: message} if message else {}
        return True


def _attempt(step: Step, before: int, steps: int, progress: Progress) -> str:
    """Do a step and return why it failed, or nothing."""
    furthest = 0.0

    def part(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
        nonlocal furthest
        furthest = max(furthest, done / total if total else 0.0)
        progress(before + furthest, steps, f"{step.name}: {text or phase}".removesuffix(": "))

    part(0, None)
    torch.compiler.reset()  # blocks that were compiled for other shapes would make these shapes dynamic
    try:
        step.do(out=step.result, progress=part)
    except Exception as error:  # whatever it is: name it, and let the other steps go on
        return " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        if torch.cuda.is_available():  # other processes may share the GPU
            torch.cuda.empty_cache()
    return ""


def _write_status(path: Path, steps: list[Step], failed: dict[str, str]) -> None:
    """Write how each step stands, for the page; how a step failed for another process stays until it is done."""
    known = {row["step"]: row for row in json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else {}
    for step in steps:
        state = "done" if step.result.exists() else "failed" if step.name in failed else "pending"
        if state != "pending" or known.get(step.name, {}).get("state") != "failed":
            known[step.name] = {"step": step.name, "state": state, "message": failed.get(step.name, "")}
    write_json(path, list(known.values()))


def main_table(folder: str | os.PathLike[str]) -> list[list[str]]:
    """Return the main numbers of a run as text: perplexity by length, or the result of each task, over all seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    run = collect(Path(folder))
    for row in run.of("perplexity", mode="sliding"):
        name = row.variant + ("" if row.scaling == "none" else f" + {row.scaling}")
        found.setdefault(name, {}).setdefault(f"{row.length:,}", []).append(row.ppl)
    for row in run.of("task"):
        result = row.correct / row.cases if row.ppl is None else row.ppl
        found.setdefault(row.variant, {}).setdefault(row.task, []).append(result)
    columns = sorted({column for row in found.values() for column in row}, key=lambda column: (len(column), column))
    body = []
    for name, of in sorted(found.items()):
        body.append([name, *(f"{sum(of[c]) / len(of[c]):.4g}" if c in of else "–" for c in columns)])
    return [["perplexity at" if run.of("perplexity") else "task", *columns], *body] if found else []


# What is checked before any work


def check_inputs(preset: Preset, work: Work, steps: list[Step]) -> None:
    """Raise for what is missing, misspelt or too short, before anything is tokenized."""
    corpus, kinds, chosen = preset.corpus, {s.kind for s in steps}, set[str]().union(*(s.chosen_by for s in steps))
    if preset.converts:
        for option, value, example in (
            ("checkpoint", corpus.checkpoint, "SmolLM2.gguf"),
            ("pairs", corpus.pairs, "blimp.jsonl.xz"),
            ("held-out", corpus.held_out, "test.jsonl.xz"),
        ):
            need = f"--{option} must be given for a preset that converts, got none; try --{option} {example}"
            require(bool(value), need)
        scaling = scaling_name(configuration(corpus.checkpoint).rotary().scaling)
        require(
            scaling == "none",
            f"--checkpoint must have plain rotary angles, got {scaling}: 'none' would not be the original; "
            "use farspan convert, finetune and eval by themselves",
        )
    vocabulary = work.vocabulary
    tokenizer: Any = load_tokenizer(vocabulary) if isinstance(vocabulary, str) else vocabulary
    for source in [*corpus.train, *corpus.held_out]:
        resolve(source)
    for path in corpus.labelled:
        list(labelled_texts(path))
    for path in corpus.pairs:
        list(read_pairs(path))
    measured = {name: preset.measured(name) for name in preset.models if name in chosen}
    wanted = [of.text_tokens for of in measured.values() if of.perplexity_lengths and "ppl" in kinds]
    wanted += [of.position_tokens for of in measured.values() if "positions" in kinds]
    needed, sources = max(wanted, default=0), corpus.held_out or list(corpus.train)
    # A token has at least one byte.
    found = (len(document.text.encode()) >= needed for document in documents(sources))
    need = f"--held-out must have a document of at least {needed} tokens, got none in {', '.join(sources)}; "
    require(not needed or any(found), need + "use longer texts")
    known = None if isinstance(tokenizer, int) else tokenizer  # an int is the size of one to be trained
    size, end = (tokenizer, None) if known is None else (known.vocab_size, known.end)
    for name, of in measured.items():
        if work.how(name) == "train" and not preset.tasks_of(name):
            config = preset.train_config(name, 0, {"tokens": 1.0})
            with torch.device("meta"):
                FarspanForCausalLM(model_config(config, size, end))
            if known is not None:
                check_rows(config.data, known, f"training length of {name}")
        if known is None:
            continue
        for stage in preset.recipe(name).stages if work.how(name) == "finetune" else ():
            if stage.passkey_share:
                check_row(known, stage.length, f"length of stage {stage.name} of {name}")
        if of.passkey_lengths and "passkey" in kinds:
            check_prompt(known, min(of.passkey_lengths), f"passkey length of {name}")
        if of.retrieval_tasks and of.retrieval_lengths and "retrieval" in kinds:
            check_retrieval(known, of.retrieval_tasks, of.retrieval_lengths)
