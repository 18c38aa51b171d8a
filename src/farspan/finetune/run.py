"""A recipe, stage by stage, through the training loop: what moves in a stage, and from which model it starts."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import torch
from torch import nn

from farspan.checkpoints import config_of, load, open_source, read_note, text_tokenizer, write_note
from farspan.configuration_farspan import FarspanConfig
from farspan.data import Batches, Shards, TextTokenizer
from farspan.errors import require
from farspan.evaluation import scaling_name
from farspan.finetune.objectives import ATTENTION_OUTPUT, Distillation, check_teacher, new_layers
from farspan.finetune.recipe import Recipe, Stage
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import Linear
from farspan.results import write_result
from farspan.training import Job
from farspan.training import run as run_job
from farspan.training.config import DataSection, RunSection
from farspan.training.loop import on_main, working_in
from farspan.training.pretraining import NextToken, text_batches
from farspan.utils import Progress, atomic_path, check_same, parse, silent

SETTINGS = "finetune.json"
"""Which recipe a folder belongs to; the first file there."""


class Origin:
    """What a recipe is applied to: the model, its teacher and data. Raise for one that is not there or does not fit."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        data: Mapping[str, float],
        recipe: Recipe,
        teacher: str | os.PathLike[str] | None = None,
    ) -> None:
        needing = next((stage.name for stage in recipe.stages if stage.needs_teacher), None)
        require(
            teacher is None or needing is not None,
            f"--teacher must be left out for a recipe that learns from tokens alone, got {str(teacher)!r}; "
            "leave it out, or choose a distilling recipe",
        )
        require(
            os.environ.get("ACCELERATE_USE_FSDP") != "true"
            or all(ATTENTION_OUTPUT not in stage.objective for stage in recipe.stages),
            "objective 'attention-output' needs unsharded weights, got FSDP; launch with one-node.yaml instead",
        )
        require(bool(data), "data must name at least one token folder, got none; make one with farspan data")
        sources = {str(Path(path)): weight for path, weight in data.items()}
        self.model, self.data = Path(model), parse(DataSection, {"sources": sources}, "data.").sources
        self.teacher = Path(teacher) if teacher is not None else read_note(self.model)
        self.source = open_source(self.model)
        config_of(self.source)  # raises for what is no model before anything is said about its teacher
        if needing is None:
            return
        require(
            self.teacher is not None,
            f"--teacher is needed by stage {needing}, got none, and {str(model)!r} does not say what it was converted "
            "from; name the original checkpoint",
        )
        assert self.teacher is not None
        require(self.teacher.exists(), f"--teacher must exist, got {str(self.teacher)!r}; name the original checkpoint")
        self.teacher_source = open_source(self.teacher)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer. Raise if data was made with another."""
        tokenizer = text_tokenizer(self.model)
        for path in self.data:
            require(
                Shards(path).tokenizer_fingerprint == tokenizer.fingerprint,
                f"--data must be made with the model's tokenizer, got another in {path!r}; "
                f"run farspan data TEXT --tokenizer {self.model} --out DIR",
            )
        return tokenizer

    def batches(self, stage: Stage, seed: int) -> Batches:
        """Return the rows of a stage."""
        section = DataSection(self.data, stage.length, stage.batch_size, stage.passkey_share, stage.retrieval_share)
        return text_batches(section, self.tokenizer, seed, name=f"length of stage {stage.name}")

    def teacher_of(self, stage: Stage) -> FarspanConfig | None:
        """Return the configuration of the stage's teacher, if it has one."""
        return config_of(self.teacher_source) if stage.needs_teacher else None

    def check(self, recipe: Recipe) -> list[dict[str, int]]:
        """Raise for a stage that cannot begin, before the first is trained; count the parameters of each.

        Go through the stages with a model that has shapes but no weights, and open the data at each stage's length.
        """
        config, counts = config_of(self.source), []
        for stage in recipe.stages:
            config = lengthened(config, stage)  # the next stage begins with it
            with torch.device("meta"):
                student = FarspanForCausalLM(config)
            theirs = self.teacher_of(stage)
            if theirs is not None:
                check_teacher(student.config, theirs, stage.objective)
            trained = freeze(student, stage, theirs).num_parameters(only_trainable=True)
            counts.append({"parameters": student.num_parameters(), "trained_parameters": trained})
            self.batches(stage, 0)  # raises for rows that are too short
        if recipe.log_length:
            student.set_log_length(True)
        return counts

    def write_beside(self, folder: Path) -> None:
        """Write tokenizer and generation settings as they came, and where the model is from."""
        self.source.carry(folder)
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
    progress: Progress = silent,
) -> Path:
    """Apply a recipe, or go on where an earlier call stopped; return the folder of the finished model.

    Args:
        model: a farspan folder with its tokenizer, or anything `farspan convert` reads.
        data: token folders (`farspan data --tokenizer MODEL`) with their weights.
        out: gets ``stage-1-…`` and so on, each a folder of a training run with its ``model``; at the end ``model`` and
            ``recipe.json``, what was done and what it took.
        teacher: what a distilling stage learns from; an error where no stage distils. Default: what the model was
            converted from, if it says.
        begin: called once, when everything was checked and before anything is trained.
        progress: called every few steps with the tokens of all stages.
    """
    recipe = Recipe.parse(asdict(recipe))  # one that was made in Python may hold anything
    folder, run = Path(out), parse(RunSection, asdict(run or RunSection()), "run.")
    origin = Origin(model, data, recipe, teacher)
    folders = [folder / f"stage-{i}-{stage.name}" for i, stage in enumerate(recipe.stages, 1)]
    final, path, done = folder / "model", origin.model, 0
    with working_in(folder, SETTINGS, "of a fine-tuning"):
        counts = [] if final.exists() else origin.check(recipe)
        settings = {"stages": [one.name for one in folders], "log_length": recipe.log_length}
        on_main(partial(check_same, folder / SETTINGS, settings, "fine-tuning"))
        if begin is not None:
            begin()
        for index, (own, stage) in enumerate(zip(folders, recipe.stages, strict=True)):
            job = stage_job(stage, path, origin, replace(run, seed=run.seed + index))
            path = run_job(job, own, progress=_in_tokens(progress, stage, done, recipe.tokens))
            done += stage.tokens
        if counts:
            on_main(partial(_finish, folders, recipe, counts, final, run.seed))
    return final


def _in_tokens(progress: Progress, stage: Stage, before: int, tokens: int) -> Progress:
    """Report the steps of a stage as tokens of the recipe."""

    def report(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
        progress(before + done * stage.batch_size * stage.length, tokens, f"{stage.name}: {text}", phase=phase)

    return report


def _finish(folders: list[Path], recipe: Recipe, counts: list[dict[str, int]], final: Path, seed: int) -> None:
    """Write what was done, and the last stage's model as the result."""
    rows = []
    for folder, stage, count in zip(folders, recipe.stages, counts, strict=True):
        losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        few = max(1, min(10, len(losses) // 2))
        row = {"kind": "stage", **asdict(stage), "folder": folder.name, "tokens": stage.tokens}
        row["seconds"] = json.loads((folder / "model" / "trainer.json").read_text())["seconds"]
        rows.append({**row, **count, "first_loss": sum(losses[:few]) / few, "last_loss": sum(losses[-few:]) / few})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_result(final.with_name("recipe.json"), rows, device=device, seed=seed, kind="finetune")
    with atomic_path(final) as part:
        copytree(folders[-1] / "model", part, ignore=ignore_patterns("trainer.json"))
        if recipe.log_length:
            config = FarspanConfig.from_pretrained(part)
            config.log_length = True
            config.save_pretrained(part)


def stage_job(stage: Stage, path: Path, origin: Origin, run: RunSection) -> Job:
    """Make the job of a stage that begins with the model at `path`."""
    theirs = origin.teacher_of(stage)

    def objective(model: FarspanForCausalLM) -> nn.Module:
        if not stage.needs_teacher:
            return NextToken(model, reach=stage.reach)
        teacher = load(origin.teacher_source, dtype=torch.float32)
        return Distillation(model, teacher, stage.objective, compile=run.compile, reach=stage.reach)

    return Job(
        settings={
            "stage": asdict(stage),
            "origin": {"model": str(origin.model), "teacher": str(origin.teacher), "data": origin.data},
            "run": asdict(run),
        },
        optimizer=stage.optimizer,
        run=run,
        batch_size=stage.batch_size,
        tokens_per_row=stage.length,
        start=partial(begun, path, stage, theirs),
        load=lambda saved: freeze(load(open_source(saved), dtype=torch.float32), stage, theirs),
        batches=partial(origin.batches, stage, run.seed),
        objective=objective,
        write_beside=origin.write_beside,
    )


# What a stage begins with


def begun(path: Path, stage: Stage, teacher: FarspanConfig | None = None) -> FarspanForCausalLM:
    """Load the model of a folder or GGUF file as a stage begins with it, in float32."""
    source = open_source(path)
    model = load(source, dtype=torch.float32, config=lengthened(config_of(source), stage))
    return freeze(model, stage, teacher)


def lengthened(config: FarspanConfig, stage: Stage) -> FarspanConfig:
    """Return a model's configuration with the training length and angles of a stage, which the model keeps.

    A scaling replaces the model's own, which must be of the same kind, as the weights have learnt it; so interpolating
    32 → 64 → 128 ends with factor 4.
    """
    rope, longest = stage.rope_parameters, stage.length * stage.reach
    # Skipped positions would take a window across the gap, let log_length count absent keys, and leave a linear
    # layer's table.
    steady = not config.log_length and all(not spec.linear and spec.window is None for spec in config.attention_specs)
    require(
        stage.reach == 1 or steady,
        f"reach of stage {stage.name} must be 1 for a model with windows, linear attention or log_length, "
        f"got {stage.reach}; train it in longer rows",
    )
    changed: dict[str, Any] = {
        "train_length": stage.train_length or config.train_length,
        "max_position_embeddings": max(config.max_position_embeddings, longest),
    }
    if rope is not None:
        before, own, factor = config.rope_parameters or {}, config.rotary().scaling, rope.factor
        require(
            before.get("rope_type", "default") in ("default", rope.rope_type),
            f"rope_parameters of stage {stage.name} must keep to the model's own scaling, {scaling_name(own)}, "
            f"got {rope.rope_type!r}; leave them out",
        )
        if rope.rope_type == "linear":
            original = config.train_length / (own.factor if isinstance(own, Linear) else 1)
            factor = longest / original
            require(
                factor > 1,
                f"rope_parameters of stage {stage.name} need a factor > 1, got {factor:g} for length "
                f"{longest} and a model trained at {original:g}; lengthen the rows or leave them out",
            )
            # Interpolated positions go as far as these rows, and the next scaling starts there.
            changed["train_length"] = stage.train_length or longest
        base = before.get("rope_theta", 10_000.0)
        changed["rope_parameters"] = {"rope_theta": base, "rope_type": rope.rope_type, "factor": factor}
    return FarspanConfig.from_dict({**config.to_dict(), **changed})


def freeze(model: FarspanForCausalLM, stage: Stage, teacher: FarspanConfig | None = None) -> FarspanForCausalLM:
    """Let only the stage's parameters move, and of these only those its objective can teach.

    Given the teacher's configuration, layers that are the teacher's own learn nothing from "attention-output".
    """
    names = [name for name, _ in model.named_parameters()]
    moving = set[str]()
    for pattern in stage.train:
        found = {name for name in names if fnmatchcase(name, pattern)}
        require(
            bool(found),
            f"train of stage {stage.name} must name parameters, got {pattern!r}, which fits none; "
            f"they are like {names[1]!r}",
        )
        moving |= found
    if ATTENTION_OUTPUT in stage.objective:
        parts = ("self_attn", "input_layernorm")
        own = [f"model.layers.{i}.{part}." for i in new_layers(model.config, teacher) for part in parts]
        moving = {name for name in moving if name.startswith(tuple(own))}
    require(
        bool(moving),
        f"stage {stage.name} has nothing to train: its objective reaches none of {list(stage.train)}; "
        "convert the model first, or choose another objective",
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in moving)
    return model
