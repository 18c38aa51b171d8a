"""What each kind of step does: one call of a public function, and a row of results where that writes none."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from farspan.checkpoints import CalibrationConfig, convert_folder, from_pretrained, text_tokenizer
from farspan.configuration_farspan import FarspanConfig
from farspan.data import Shards, TextTokenizer, load_tokenizer, prepare
from farspan.errors import require
from farspan.evaluation import (
    evaluate_bits,
    evaluate_pairs,
    evaluate_passkey,
    evaluate_perplexity,
    evaluate_positions,
    evaluate_retrieval,
    scaling_of,
)
from farspan.finetune import finetune
from farspan.modeling_farspan import FarspanCache
from farspan.reproduce.preset import CHECKPOINT, Preset
from farspan.results import write_result
from farspan.tasks import Material, Task, TaskSettings, make_task
from farspan.training import train
from farspan.utils import Progress, remove, write_json


class Work:
    """The steps of one preset in one folder: tokens in ``data``, models in ``runs`` and ``models``."""

    def __init__(self, preset: Preset, folder: Path) -> None:
        self.preset, self.folder = preset, folder
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.token_folders = [f"source-{i}" for i in range(len(preset.corpus.train))]
        self.token_folders += ["held-out"] if preset.corpus.held_out else []
        self.text_steps = tuple(f"tokens {name}" for name in self.token_folders)

    # Texts

    @cached_property
    def vocabulary(self) -> int | str | TextTokenizer:
        """The tokenizer, its name, or the size of one to train."""
        corpus = self.preset.corpus
        if self.preset.converts:
            return text_tokenizer(corpus.checkpoint)
        return int(corpus.tokenizer) if corpus.tokenizer.isdigit() else corpus.tokenizer

    @property
    def sources(self) -> dict[str, float]:
        """Token folders of the training text by weight."""
        return {str(self._data(i)): weight for i, weight in enumerate(self.preset.corpus.train.values())}

    def _data(self, number: int) -> Path:
        return self.folder / "data" / self.token_folders[number]

    def tokens(self, number: int, result: Path, progress: Progress) -> None:
        """Tokenize a source of the training text, or the held-out text."""
        corpus = self.preset.corpus
        source = [*([name] for name in corpus.train), corpus.held_out][number]
        prepare(
            source,
            self._data(number),
            tokenizer=load_tokenizer(self._data(0)) if number else self.vocabulary,
            valid_share=0.0 if corpus.held_out else 0.05,
            progress=progress,
        )

    def held_out(self, tokens: int) -> list[Tensor]:
        """Return held-out documents of at least so many tokens, cut to them."""
        held_out = bool(self.preset.corpus.held_out)
        shards = Shards(self._data(-1)) if held_out else Shards(self._data(0), split="valid")
        long = [i for i, n in enumerate(shards.document_lengths) if n >= tokens][: self.preset.evaluation.texts]
        require(bool(long), f"no held-out document has {tokens} tokens; pass longer texts with --held-out")
        return [torch.from_numpy(shards.document(i)[:tokens].astype(np.int64)) for i in long]

    # Models

    def path(self, name: str, seed: int = 0) -> Path:
        """Return the folder of a model."""
        start = self.preset.models[name].start
        if start == CHECKPOINT:
            return self.folder / "models" / name
        return self.folder / "runs" / (name if start else f"{name}-s{seed}") / "model"

    def made(self, name: str, seed: int = 0) -> Path:
        """Return the result that says what making a model took."""
        converted = self.preset.models[self.preset.origin(name)].start
        return self.folder / "results" / (f"model-{name}.json" if converted else f"train-{name}-s{seed}.json")

    def train(self, name: str, seed: int, result: Path, progress: Progress) -> None:
        """Train a model from nothing."""
        config = self.preset.train_config(name, seed, self.sources)
        run = self.folder / "runs" / f"{name}-s{seed}"
        train(config, run, progress=progress)
        steps, data = config.optimizer.steps, config.data
        tokens = steps * data.batch_size * data.length
        self._write_training(result, run, name, seed, steps=steps, tokens=tokens, **_shares(asdict(data)))

    def convert(self, name: str, result: Path, progress: Progress) -> None:
        """Convert the checkpoint."""
        corpus, model, out, began = self.preset.corpus, self.preset.models[name], self.path(name), time.perf_counter()
        tokens = model.calibrate_tokens
        remove(out)  # of a call that was stopped before it wrote its result
        convert_folder(
            corpus.checkpoint,
            out,
            model.attention or name,
            text=list(corpus.train) if tokens else (),
            tokens=tokens,
            calibration_config=CalibrationConfig(steps=model.calibrate_steps),
            window=model.window or None,
            global_every=model.global_every or None,
            device=self.device if tokens else "cpu",
            progress=progress,
        )
        took = {"tokens": tokens, "seconds": time.perf_counter() - began, "calibrated": tokens > 0}
        self._write_model(result, name, stages=0, **took, **_shares())

    def finetune(self, name: str, result: Path, progress: Progress) -> None:
        """Fine-tune a model with its recipe."""
        preset, recipe, out = self.preset, self.preset.recipe(name), self.folder / "runs" / name
        before, stages, last = preset.models[name].start, recipe.stages, recipe.stages[-1]
        teacher = preset.corpus.checkpoint if any(stage.needs_teacher for stage in stages) else ""
        finetune(
            self.path(before),
            self.sources,
            recipe,
            out,
            teacher=teacher or None,
            run=preset.base_config.run,
            progress=progress,
        )
        known = _rows(self.made(before))[0]
        took = [known, *_rows(out / "recipe.json")]
        tokens, seconds = (sum(one[what] for one in took) for what in ("tokens", "seconds"))
        shares = _shares(*took)
        if preset.models[preset.origin(name)].start:
            number = known["stages"] + len(stages)
            self._write_model(result, name, stages=number, tokens=tokens, seconds=seconds, **shares)
        else:
            steps = known["steps"] + sum(stage.optimizer.steps for stage in stages)
            run = out / f"stage-{len(stages)}-{last.name}"
            self._write_training(result, run, name, 0, steps=steps, tokens=tokens, **shares)

    def _write_training(self, result: Path, run: Path, name: str, seed: int, **more: Any) -> None:
        row = {
            "variant": name,
            "seed": seed,
            "length": self.preset.base_config.data.length,  # what the page measures lengths by, also of other models
            "train_length": FarspanConfig.from_pretrained(run / "model").train_length,
            **training_facts(run, run / "model"),
            **more,
        }
        write_result(result, [row], device=self.device, seed=seed, kind="training")

    def _write_model(self, result: Path, name: str, **more: Any) -> None:
        config, origin = FarspanConfig.from_pretrained(self.path(name)), self.preset.origin(name)
        first = self.preset.models[origin]
        row = {
            "model": name,
            "start": origin,
            "attention": first.attention or origin,
            "window": first.window,
            "global_every": first.global_every,
            "train_length": config.train_length,
            "own_scaling": scaling_of(config),
            **more,
        }
        write_result(result, [row], device=self.device, seed=0, kind="model")

    # Tasks

    def _task(self, name: str, settings: TaskSettings) -> Task:
        corpus, tokens = self.preset.corpus, self.preset.evaluation.text_tokens
        material = Material(self.folder / "data", self.sources, lambda: self.held_out(tokens), tuple(corpus.labelled))
        return make_task(name, settings, material)

    def examples(self, name: str, result: Path, progress: Progress) -> None:
        """Make the examples of a task."""
        self._task(name, self.preset.tasks[name]).prepare(progress)
        write_json(result, {"task": name})

    def task(self, name: str, variant: str, seed: int, result: Path, progress: Progress) -> None:
        """Train for a task and answer its test."""
        attention, settings = self.preset.task_settings(variant, name)
        task, run = self._task(name, settings), self.folder / "runs" / f"{name}-{variant}-s{seed}"
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model = task.train(attention, seed, run, progress)
        facts = training_facts(run, model)
        del facts["mfu"]  # it counts the products of softmax attention
        row = {
            "task": name,
            "variant": variant,
            "seed": seed,
            "tokens_trained": settings.steps * settings.batch_size * settings.length,
            "steps": settings.steps,
            "pretraining_steps": settings.pretraining_steps,
            "length": settings.length,
            **facts,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device == "cuda" else None,
            **task.score(model, self.device, progress),
        }
        write_result(result, [row], device=self.device, seed=seed, kind="task")

    # Measures

    def measure(
        self,
        kind: str,
        name: str,
        seed: int,
        scaling: str,
        lengths: Sequence[int],
        far: int,
        result: Path,
        progress: Progress,
    ) -> None:
        """Measure a model under a scaling, at lengths beyond `far` of the limits of ``evaluation.long``."""
        of, model, corpus = self.preset.measured(name), self.path(name, seed), self.preset.corpus
        common: Any = {"scalings": [scaling], "label": {"variant": name, "seed": seed}, "progress": progress}
        cases = of.long_cases[far - 1] if far and of.long_cases else of.cases
        asked: Any = {"lengths": lengths, "cases": cases, "tokens_at_once": of.tokens_at_once, **common}
        if kind == "ppl":
            evaluate_perplexity(
                model,
                self.held_out(of.text_tokens),
                result,
                lengths=lengths,
                stride=of.long_stride if far else of.stride,
                text_tokens=of.text_tokens,
                control=not far and scaling == next((n for n in of.scalings if n.startswith("none")), of.scalings[0]),
                tokens_at_once=of.tokens_at_once,
                **common,
            )
        elif kind == "passkey":
            evaluate_passkey(model, result, new_tokens=of.new_tokens, **asked)
        elif kind == "retrieval":
            evaluate_retrieval(model, result, tasks=of.retrieval_tasks, **asked)
        elif kind == "positions":
            texts = self.held_out(of.position_tokens)
            evaluate_positions(model, texts, result, text_tokens=of.position_tokens, **common)
        elif kind == "bits":
            sizes: Any = {"length": of.window, "texts": of.texts, "text_bytes": of.text_bytes}
            evaluate_bits(model, corpus.held_out, result, **sizes, **common)
        elif kind == "pairs":
            evaluate_pairs(model, corpus.pairs, result, most=of.pairs or None, **common)
        else:
            self._cache(model, of.window, common["label"], result)

    @torch.no_grad()
    def _cache(self, path: Path, window: int, label: dict[str, Any], result: Path) -> None:
        """Measure the bytes that reading a window leaves in the cache."""
        model = from_pretrained(path, attention=None, dtype=torch.float32, device=self.device)
        cache = FarspanCache(model.config)
        model.model(torch.zeros(1, window, dtype=torch.long, device=self.device), past_key_values=cache)
        row = {**label, "scaling": "none", "length": window, "bytes": cache.nbytes, "dtype": "float32"}
        write_result(result, [row], device=self.device, seed=0, kind="cache")

    def speed(self, part: str, result: Path, progress: Progress) -> None:
        """Time attention alone ("cosformer"), one layer of CoCA beside RoPE, or its decoding."""
        from farspan.bench import cosformer, decode, layer, run

        options, cuda = dict(self.preset.speed[part]), self.device == "cuda"
        if part == "decode":
            steps = decode.steps(options.pop("model"), device=self.device, **options)
        elif part == "layer":
            shapes = layer.shapes(options.pop("lengths"), [1], self.device)
            steps = layer.steps(shapes, only=None if cuda else layer.QUICK, device=self.device, **options)
        elif cuda:
            steps = cosformer.kernel_steps(cosformer.shapes(options.pop("lengths")), device="cuda", seed=0, **options)
        else:
            lengths = options.pop("lengths")
            steps = cosformer.steps(lengths, min(lengths), device="cpu", seed=0, **options)
        run(steps, kind=f"bench-{part}", device=self.device, seed=0, out=result, force=True, progress=progress)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _shares(*trainings: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest shares of rows that showed passkeys, and retrieval tasks, in any of these trainings."""
    names = ("passkey_share", "retrieval_share")
    return {name: max((training.get(name, 0.0) for training in trainings), default=0.0) for name in names}


def training_facts(run: Path, model: Path) -> dict[str, Any]:
    """Return size, loss and speed of a finished run."""
    curve = [(row["step"], row["loss"]) for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    with safe_open(model / "model.safetensors", "pt") as file:  # what is tied is in it once
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    trainer = json.loads((model / "trainer.json").read_text())
    return {
        "parameters": parameters,
        "final_loss": float(np.mean([loss for _, loss in curve[-20:]])),
        **{name: trainer.get(name) for name in ("seconds", "tokens_per_second", "mfu")},
        "losses": [[i, loss] for i, loss in curve if i % max(1, len(curve) // 200) == 0],
    }
