"""What each kind of step does: one call of a public function, and a row of results where that writes none."""

import json
import math
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from farspan.checkpoints import CalibrationConfig, convert_folder, text_tokenizer
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
from farspan.evaluation.evaluate import open_model
from farspan.finetune import Recipe, finetune
from farspan.modeling_farspan import FarspanCache
from farspan.reproduce.preset import Member, Preset
from farspan.results import write_result
from farspan.tasks import Material, Task, make_task
from farspan.training import train
from farspan.training.config import RunSection
from farspan.utils import Progress, write_json


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

    def path(self, member: Member, seed: int = 0) -> Path:
        """Return the folder of a model."""
        if not member.model.start:
            return self.folder / "runs" / f"{member.name}-s{seed}" / "model"
        return self.folder / "runs" / member.name / "model" if member.stages else self.folder / "models" / member.name

    def train(self, name: str, seed: int, result: Path, progress: Progress) -> None:
        """Train a model from nothing."""
        config = self.preset.train_config(name, seed, self.sources)
        run = self.folder / "runs" / f"{name}-s{seed}"
        model = train(config, run, progress=progress)
        steps, data = config.optimizer.steps, config.data
        row = {
            "variant": name,
            "seed": seed,
            "tokens": steps * data.batch_size * data.length,
            "steps": steps,
            "length": self.preset.training.length,  # what the page measures lengths by, also those of other models
            "train_length": data.length,
            **training_facts(run, model),
            "passkey_share": data.passkey_share,
            "retrieval_share": data.retrieval_share,
        }
        write_result(result, [row], device=self.device, seed=seed, kind="training")

    def convert(self, member: Member, result: Path, progress: Progress) -> None:
        """Convert the checkpoint."""
        corpus, model, out, began = self.preset.corpus, member.model, self.path(member), time.perf_counter()
        made = not out.exists()  # else the call before this one was stopped in between
        if made:
            convert_folder(
                corpus.checkpoint,
                out,
                model.attention or member.name,
                text=list(corpus.train) if model.calibrate_tokens else (),
                tokens=model.calibrate_tokens,
                calibration_config=CalibrationConfig(steps=model.calibrate_steps),
                window=model.window or None,
                global_every=model.global_every or None,
                device=self.device if model.calibrate_tokens else "cpu",
                progress=progress,
            )
        seconds = time.perf_counter() - began if made else None
        self._write_model(member, result, model.calibrate_tokens, seconds, calibrated=model.calibrate_tokens > 0)

    def finetune(self, member: Member, result: Path, progress: Progress) -> None:
        """Train one stage, in a folder of its own, so that other runs can begin where it ends."""
        training, stage = self.preset.training, member.stages[-1]
        out = self.folder / "runs" / member.name
        finetune(
            self.path(self.preset.members[member.before]),
            self.sources,
            Recipe("", (stage,)),
            out,
            teacher=self.preset.corpus.checkpoint if stage.needs_teacher else None,
            run=RunSection(
                seed=len(member.stages) - 1,  # as `farspan finetune` counts
                compile=training.compile,
                checkpoint_every=training.checkpoint_every or 500,
            ),
            progress=progress,
        )
        row, before = _first_row(out / "recipe.json"), _first_row(result.with_name(f"model-{member.before}.json"))
        seconds = None if before["seconds"] is None else before["seconds"] + row["seconds"]
        self._write_model(member, result, before["tokens"] + row["tokens"], seconds, stage=row)

    def _write_model(self, member: Member, result: Path, tokens: int, seconds: float | None, **more: Any) -> None:
        """Write what a model is, and the tokens and seconds that it and those before it took."""
        config = FarspanConfig.from_pretrained(self.path(member))
        start = self.preset.members[member.model.start] if member.stages else member
        row = {
            "model": member.name,
            "start": start.name,
            "attention": start.model.attention or start.name,
            "window": start.model.window,
            "global_every": start.model.global_every,
            "stages": len(member.stages),
            "tokens": tokens,
            "seconds": seconds,
            "train_length": config.train_length,
            "own_scaling": scaling_of(config),
            "passkey_share": max((stage.passkey_share for stage in member.stages), default=0.0),
            **more,
        }
        write_result(result, [row], device=self.device, seed=0, kind="model")

    # Tasks

    def _task(self, name: str) -> Task:
        corpus, tokens = self.preset.corpus, self.preset.evaluation.text_tokens
        material = Material(self.folder / "data", self.sources, lambda: self.held_out(tokens), tuple(corpus.labelled))
        return make_task(name, self.preset.tasks[name], material)

    def examples(self, name: str, result: Path, progress: Progress) -> None:
        """Make the examples of a task."""
        self._task(name).prepare(progress)
        write_json(result, {"task": name})

    def task(self, name: str, variant: str, seed: int, result: Path, progress: Progress) -> None:
        """Train for a task and answer its test."""
        task, settings = self._task(name), self.preset.tasks[name]
        run = self.folder / "runs" / f"{name}-{variant}-s{seed}"
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model = task.train(variant, seed, run, progress)
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
        member: Member,
        seed: int,
        scaling: str,
        lengths: Sequence[int],
        far: int,
        result: Path,
        progress: Progress,
    ) -> None:
        """Measure a model under a scaling, at lengths beyond `far` of the limits of ``evaluation.long``."""
        of, model, corpus = member.measures, self.path(member, seed), self.preset.corpus
        assert of is not None
        common: Any = {"scalings": [scaling], "label": {"variant": member.name, "seed": seed}, "progress": progress}
        asked: Any = {"lengths": lengths, "cases": of.cases_of(far), "tokens_at_once": of.tokens_at_once, **common}
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
        model = open_model(path, self.device)
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


def _first_row(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(path.read_text())["rows"][0]
    return row


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
