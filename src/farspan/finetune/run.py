"""A recipe, stage by stage, through the training loop."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from farspan.configuration_farspan import FarspanConfig
from farspan.convert.configuration import config_of
from farspan.convert.folder import save
from farspan.convert.load import load
from farspan.convert.note import read_note, write_note
from farspan.convert.sources import open_source
from farspan.convert.text import text_tokenizer
from farspan.data import Shards, TextTokenizer
from farspan.errors import require
from farspan.finetune.check import check
from farspan.finetune.objectives import Distillation
from farspan.finetune.recipe import Recipe, Stage
from farspan.finetune.weights import begun, merge_lora, prepared, resumed
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.results import write_result
from farspan.training import Job, Progress
from farspan.training import run as run_job
from farspan.training.config import DataSection, RunSection
from farspan.training.pretraining import NextToken, text_batches


@dataclass(frozen=True)
class Standing:
    """How far a recipe is."""

    stage: str
    done: int
    """Tokens of all stages so far."""
    total: int
    now: Progress


@dataclass(frozen=True)
class Origin:
    """What a recipe is applied to."""

    model: Path
    teacher: Path | None
    data: dict[str, float]
    tokenizer: Callable[[], TextTokenizer]

    def check(self, recipe: Recipe) -> None:
        """Refuse what can be refused of a recipe before its first stage is trained."""
        check(recipe, self.model, self.teacher, self.data, self.tokenizer)

    def teacher_of(self, stage: Stage) -> FarspanConfig | None:
        """What the stage's teacher is, if it has one."""
        if not stage.needs_teacher or self.teacher is None:
            return None
        return config_of(open_source(self.teacher))

    def write_beside(self, folder: Path) -> None:
        """Tokenizer and generation settings as they came, and where the model is from."""
        open_source(self.model).carry(folder)
        if self.teacher is not None:
            write_note(folder, self.teacher)


def finetune(
    model: str | os.PathLike[str],
    data: Mapping[str, float],
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    teacher: str | os.PathLike[str] | None = None,
    run: RunSection | None = None,
    begin: Callable[[], None] | None = None,
    report: Callable[[Standing], None] | None = None,
) -> Path:
    """Apply a recipe, or go on where an earlier call stopped; return the folder of the finished model.

    Args:
        model: a farspan folder with its tokenizer, or anything `farspan convert` reads.
        data: token folders (`farspan data --tokenizer MODEL`) with their weights.
        out: gets ``stage-1-…`` and so on, each a folder of a training run with its ``model`` (``merged`` is
            the plain one after LoRA); at the end ``model`` and ``recipe.json``, what was done and what it took.
        teacher: what a distilling stage learns from, refused where there is none; default: what the model was
            converted from, if it says.
        begin: called once, when nothing was refused and before anything is trained.
        report: called every few steps.
    """
    folder, run = Path(out), run or RunSection()
    require(
        teacher is None or any(stage.needs_teacher for stage in recipe.stages),
        f"--teacher must be left out for a recipe that learns from text alone, got {str(teacher)!r}; "
        "leave it out, or choose a distilling recipe",
    )
    origin = open_origin(model, data, recipe, teacher=teacher)
    final, path, done = folder / "model", origin.model, 0
    places = [folder / f"stage-{i + 1}-{stage.name}" for i, stage in enumerate(recipe.stages)]
    if final.exists():
        log_length = recipe.log_length or bool(config_of(open_source(origin.model)).log_length)
        _refuse_other_recipe(folder, [place.name for place in places], log_length=log_length)
    else:
        origin.check(recipe)
    if begin is not None:
        begin()
    for index, (place, stage) in enumerate(zip(places, recipe.stages, strict=True)):
        relay = _relay(report, place.name, done, recipe.tokens, stage)
        path = run_stage(stage, path, origin, place, replace(run, seed=run.seed + index), report=relay)
        done += stage.tokens
    if _is_main() and not final.exists():
        rows = [stage_row(place, stage, origin) for place, stage in zip(places, recipe.stages, strict=True)]
        write_result(folder / "recipe.json", rows, device=_device(), seed=run.seed)
        finished = load(open_source(path))
        if recipe.log_length:
            finished.set_log_length(True)
        save(finished, final, origin.write_beside)
    _wait()
    return final


def open_origin(
    model: str | os.PathLike[str],
    data: Mapping[str, float],
    recipe: Recipe,
    *,
    teacher: str | os.PathLike[str] | None = None,
) -> Origin:
    """What a recipe is applied to; refuses a model, text or teacher that is not there."""
    source, sources = Path(model), {str(Path(path)): weight for path, weight in data.items()}
    require(bool(sources), "--data must name at least one token folder, got none; make it with farspan data")
    config_of(open_source(source))  # refuses what is no model before anything else is said about it
    return Origin(source, _teacher(source, teacher, recipe), sources, cache(partial(_tokenizer, source, sources)))


def run_stage(
    stage: Stage,
    path: Path,
    origin: Origin,
    place: Path,
    run: RunSection,
    *,
    report: Callable[[Progress], None] | None = None,
) -> Path:
    """Train one stage in `place`, beginning with the model at `path`, or go on with it; its plain model's folder."""
    run_job(stage_job(stage, path, origin, run), place, report=report)
    final = stage_model(place, stage)
    if stage.lora.r and _is_main() and not final.exists():
        save(merge_lora(resumed(place / "model", stage, origin.teacher_of(stage))), final, origin.write_beside)
    _wait()
    return final


def stage_model(place: Path, stage: Stage) -> Path:
    """Where a finished stage has its plain model: with its low-rank additions, if there were any, merged."""
    return place / ("merged" if stage.lora.r else "model")


def stage_job(stage: Stage, path: Path, origin: Origin, run: RunSection) -> Job:
    """A stage that begins with the model at `path`, for :func:`farspan.training.run`."""
    data = DataSection(origin.data, stage.length, stage.batch_size, stage.passkey_share)

    def objective(model: FarspanForCausalLM) -> nn.Module:
        if not stage.needs_teacher:
            return NextToken(model, reach=stage.reach)
        assert origin.teacher is not None  # refused before the first stage
        teacher = load(open_source(origin.teacher), dtype=torch.float32)
        return Distillation(model, teacher, stage.objective, compile=run.compile, reach=stage.reach)

    return Job(
        settings={
            "stage": {k: v for k, v in asdict(stage).items() if (k, v) != ("reach", 1)},  # older runs go on
            "origin": {"model": str(origin.model), "teacher": str(origin.teacher), "data": origin.data},
            "run": asdict(run),
        },
        optimizer=stage.optimizer,
        run=run,
        batch_size=stage.batch_size,
        tokens_per_row=stage.length,
        start=partial(begun, path, stage, origin.teacher_of(stage)),
        load=partial(resumed, stage=stage, teacher=origin.teacher_of(stage)),
        batches=lambda: text_batches(data, origin.tokenizer(), run.seed),
        objective=objective,
        write_beside=origin.write_beside,
    )


def _tokenizer(model: Path, data: Mapping[str, float]) -> TextTokenizer:
    """The model's tokenizer; data made with another are refused."""
    tokenizer = text_tokenizer(model)
    for path in data:
        require(
            Shards(path).tokenizer_fingerprint == tokenizer.fingerprint,
            f"--data must be made with the model's tokenizer, got another in {path!r}; "
            f"run farspan data TEXT --tokenizer {model} --out DIR",
        )
    return tokenizer


def _teacher(model: Path, given: str | os.PathLike[str] | None, recipe: Recipe) -> Path | None:
    """The teacher's path where it is known; refuses its absence where it was named or a stage needs it."""
    found = Path(given) if given is not None else read_note(model)
    needing = next((stage.name for stage in recipe.stages if stage.needs_teacher), None)
    require(
        needing is None or found is not None,
        f"--teacher is needed by stage {needing}, got none, and {str(model)!r} does not say what it was converted "
        "from; name the original checkpoint",
    )
    require(
        (needing is None and given is None) or (found is not None and found.exists()),
        f"--teacher must exist, got {str(found)!r}; name the original checkpoint",
    )
    return found


def _refuse_other_recipe(folder: Path, stages: list[str], *, log_length: bool) -> None:
    """A finished model is the last stage's of the recipe that made it, and of no shorter or longer one."""
    made = [row["folder"] for row in json.loads((folder / "recipe.json").read_text())["rows"]]
    require(
        made == stages,
        f"--out {str(folder)!r} holds a finished model of another recipe, of {', '.join(made)} and not "
        f"{', '.join(stages)}; choose another",
    )
    made_with = FarspanConfig.from_pretrained(folder / "model").log_length
    require(
        made_with == log_length,
        f"--out {str(folder)!r} holds a finished model with log_length {made_with} and not {log_length}, as the recipe "
        "has it; choose another",
    )


def _relay(
    report: Callable[[Standing], None] | None, name: str, before: int, total: int, stage: Stage
) -> Callable[[Progress], None] | None:
    if report is None:
        return None
    return lambda now: report(Standing(name, before + now.step * stage.batch_size * stage.length, total, now))


def stage_row(place: Path, stage: Stage, origin: Origin) -> dict[str, Any]:
    """What a finished stage was and took: a row of recipe.json."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    few = max(1, min(10, len(losses) // 2))
    with torch.device("meta"):
        model = FarspanForCausalLM(FarspanConfig.from_pretrained(place / "model"))
        whole = sum(p.numel() for p in model.parameters())
        frozen = prepared(model, stage, origin.teacher_of(stage))
        moved = sum(p.numel() for p in frozen.parameters() if p.requires_grad)
    return {
        "kind": "stage",
        **asdict(stage),
        "folder": place.name,
        "tokens": stage.tokens,
        "seconds": json.loads((place / "model" / "trainer.json").read_text())["seconds"],
        "parameters": whole,
        "trained_parameters": moved,
        "first_loss": sum(losses[:few]) / few,
        "last_loss": sum(losses[-few:]) / few,
    }


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_main() -> bool:
    return PartialState(cpu=not torch.cuda.is_available()).is_main_process


def _wait() -> None:
    PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()
