"""What each step of a drop-in study does."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from farspan.configuration_farspan import FarspanConfig
from farspan.convert import CalibrationConfig, convert_folder, from_pretrained
from farspan.convert.configuration import config_of
from farspan.convert.sources import open_source
from farspan.convert.text import text_tokenizer
from farspan.data import TextTokenizer, documents
from farspan.data.passkey import check_prompt, check_row
from farspan.data.sources import resolve
from farspan.errors import require
from farspan.evaluation import as_trained, bits_per_byte, minimal_pairs, read_pairs, start_token
from farspan.evaluation.bits import first_bytes
from farspan.evaluation.laws import give_law, law_of, scaling_name
from farspan.evaluation.windows import truncation_control
from farspan.finetune import open_origin, run_stage, stage_model, stage_row
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM
from farspan.reproduce.preset import Preset
from farspan.reproduce.step import Step
from farspan.reproduce.study import Study
from farspan.reproduce.work import Work
from farspan.results import write_result
from farspan.training import Progress
from farspan.training.config import RunSection


def check_study(preset: Preset, steps: Sequence[Step]) -> None:
    """Refuse what is missing, misspelt or too short before anything is made."""
    corpus = preset.corpus
    for option, value, example in (
        ("checkpoint", corpus.checkpoint, "SmolLM2.gguf"),
        ("pairs", corpus.pairs, "blimp.jsonl.xz"),
        ("held-out", corpus.held_out, "test.jsonl.xz"),
    ):
        require(bool(value), f"--{option} must be given for a preset with a study, got none; try --{option} {example}")
    law = config_of(open_source(Path(corpus.checkpoint))).rotary().scaling
    require(
        law is None,
        f"--checkpoint must have plain rotary angles for a study, got {scaling_name(law)}: 'none' would not be the "
        "original; use farspan convert, finetune and eval by themselves",
    )
    tokenizer = text_tokenizer(corpus.checkpoint)
    for source in [*corpus.train, *corpus.held_out]:
        resolve(source)
    for path in corpus.pairs:
        for _ in read_pairs(path):
            pass
    for step in steps:
        if not step.result.exists():
            _check_lengths(preset.study, step, tokenizer)


def _check_lengths(study: Study, step: Step, tokenizer: TextTokenizer) -> None:
    """Refuse passkey texts that the checkpoint's tokens make longer than a stage's rows, or than a prompt."""
    if step.kind == "finetune":
        stage = study.members[step.model].stages[-1]
        if stage.passkey_share:
            check_row(tokenizer, stage.length, f"length of stage {step.model}")
    elif step.kind == "passkey":
        member = study.members[step.model]
        for length in study.prompts(member, step.scaling):
            check_prompt(tokenizer, length, f"passkey length of study.measures.{member.measures}")


class StudyWork(Work):
    """The steps of one study in one folder: conversions in ``models``, trained stages in ``runs``."""

    def do(self, step: Step) -> None:
        """Do one step; several processes share a GPU, so that what it held is given back."""
        try:
            super().do(step)
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def _vocabulary(self) -> TextTokenizer:
        return text_tokenizer(self.preset.corpus.checkpoint)

    def _path(self, name: str) -> Path:
        """The folder of a model."""
        member = self.preset.study.members[name]
        if not member.stages:
            return self.folder / "models" / name
        return stage_model(self.folder / "runs" / name, member.stages[-1])

    def _convert(self, step: Step) -> None:
        corpus, settings, place = self.preset.corpus, self.preset.study.conversion(step.model), self._path(step.model)
        fitted, seconds = settings.calibrate_tokens > 0, None
        if not place.exists():
            began = time.perf_counter()
            convert_folder(
                corpus.checkpoint,
                place,
                settings.attention,
                text=list(corpus.train) if fitted else (),
                tokens=settings.calibrate_tokens,
                calibration_config=CalibrationConfig(steps=settings.calibrate_steps),
                window=settings.window or None,
                global_every=settings.global_every or None,
                device=self.device if fitted else "cpu",
                progress=lambda done, total, text="", **_: self._preparing(text, int(done), int(total or 0)),
            )
            seconds = time.perf_counter() - began
        spent = {"tokens": settings.calibrate_tokens, "seconds": seconds}
        self._write_model_row(step, spent, calibrated=fitted)

    def _finetune(self, step: Step) -> None:
        """Train one stage: its run is a folder of its own, so that other runs can begin where it ends."""
        study = self.preset.study
        member, place = study.members[step.model], self.folder / "runs" / step.model
        data = {str(self._tokens(i)): weight for i, weight in enumerate(self.preset.corpus.train.values())}
        recipes, stage = study.recipes_of(member), member.stages[-1]
        origin = open_origin(self._path(member.start), data, recipes[0], teacher=self.preset.corpus.checkpoint)
        if not place.exists():
            for recipe in recipes:  # whole, so that a later stage is refused before the first is trained
                origin.check(recipe)
        torch.compiler.reset()  # blocks of other shapes, compiled for other stages, would make these shapes dynamic
        seed = len(member.stages) - 1  # as `farspan finetune` counts
        run = RunSection(seed=seed, compile=study.compile, checkpoint_every=study.checkpoint_every)
        looks: list[Progress] = []
        run_stage(stage, self._path(member.before), origin, place, run, report=self._telling(looks))
        row = stage_row(place, stage, origin)
        before = _row(step.result.with_name(f"model-{member.before}.json"))
        spent = {
            "tokens": before["tokens"] + row["tokens"],
            "seconds": None if before["seconds"] is None else before["seconds"] + row["seconds"],
        }
        self._write_model_row(step, spent, stage=row)

    def _write_model_row(self, step: Step, spent: dict[str, Any], **more: Any) -> None:
        """A model of the study: what it is, and all that it and those before it took."""
        config = FarspanConfig.from_pretrained(self._path(step.model))
        member = self.preset.study.members[step.model]
        conversion = self.preset.study.conversion(member.start)
        row = {
            "model": step.model,
            "start": member.start,
            "attention": conversion.attention,
            "window": conversion.window,
            "global_every": conversion.global_every,
            "stages": len(member.stages),
            **spent,
            "train_length": config.train_length,
            "own_scaling": law_of(config),
            "passkey_share": max((stage.passkey_share for stage in member.stages), default=0.0),
            **more,
        }
        write_result(step.result, [row], device=self.device, seed=step.seed)

    def _subject(self, step: Step) -> dict[str, Any]:
        return {"variant": step.model, "seed": step.seed, "scaling": step.scaling}

    def _model(self, step: Step) -> FarspanForCausalLM:
        """The model under the step's law; a law of its own is dropped for "none"."""
        model = from_pretrained(self._path(step.model), attention=None, dtype=torch.float32, device=self.device)
        give_law(model, step.scaling)
        return model

    def _tokenizer(self, step: Step) -> TextTokenizer:
        return text_tokenizer(self._path(step.model))

    def _windows(self, step: Step, model: FarspanForCausalLM) -> list[tuple[int, int, str]]:
        """Near windows come with the control: the context cut to the model's own training length."""
        measures = self.preset.study.measured(self.preset.study.members[step.model].measures)
        if step.part == "far":
            return [(length, measures.far_stride, "sliding") for length in measures.far]
        trained = model.config.train_length
        control = [truncation_control(trained)]
        windows = [(length, measures.near_stride, "sliding") for length in measures.near]
        return windows + (control if trained <= self.preset.evaluation.text_tokens else [])

    def _prompts(self, step: Step) -> list[int]:
        return self.preset.study.prompts(self.preset.study.members[step.model], step.scaling)

    def _bits(self, step: Step) -> None:
        found = (document.text for source in self.preset.corpus.held_out for document in documents(source))
        size, count = self.preset.study.text_bytes, self.preset.evaluation.texts
        texts = [first_bytes(text, size) for text in islice(found, count)]
        model, tokenizer = self._model(step), self._tokenizer(step)
        start, total = start_token(model, tokenizer.end), sum(len(text.encode()) for text in texts)
        with as_trained(self.device):
            row = bits_per_byte(
                model,
                texts,
                tokenizer.encode,
                start=start,
                length=self.preset.study.window,
                progress=self._counter("bits a byte", total),
            )
        write_result(step.result, [{**self._subject(step), **row}], device=self.device, seed=step.seed)

    def _pairs(self, step: Step) -> None:
        most = self.preset.study.pairs or None
        pairs = [pair for path in self.preset.corpus.pairs for pair in islice(read_pairs(path), most)]
        model, tokenizer = self._model(step), self._tokenizer(step)
        start, tell = start_token(model, tokenizer.end), self._counter("pairs", 2 * len(pairs))
        with as_trained(self.device):
            rows = minimal_pairs(model, pairs, tokenizer.encode, start=start, progress=tell)
        rows = [{**self._subject(step), **row} for row in rows]
        write_result(step.result, rows, device=self.device, seed=step.seed)

    @torch.no_grad()
    def _cache(self, step: Step) -> None:
        """The bytes that reading a window leaves in memory."""
        model, window = self._model(step), self.preset.study.window
        cache = FarspanCache(model.config)
        ids = torch.zeros(1, window, dtype=torch.long, device=self.device)
        model.model(ids, past_key_values=cache)
        row = {**self._subject(step), "length": window, "bytes": cache.nbytes, "dtype": "float32"}
        write_result(step.result, [row], device=self.device, seed=step.seed)

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        """Turns "so many more" into how far the step is."""
        done = 0

        def more(count: int) -> None:
            nonlocal done
            done += count
            self.say(what, done / max(total, 1))

        return more


def _row(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(path.read_text())["rows"][0]
    return row
