"""What each step of a reproduction does."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from farspan.benchmark import cosformer, cosformer_gpu, decode, layer
from farspan.configuration_farspan import FarspanConfig
from farspan.data import Shards, TextTokenizer, load_tokenizer, prepare
from farspan.errors import require
from farspan.evaluation import as_trained, passkey, perplexity
from farspan.evaluation.laws import give_law
from farspan.evaluation.windows import truncation_control
from farspan.files import write_whole
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.reproduce.preset import Preset
from farspan.reproduce.step import Step
from farspan.results import write_result
from farspan.tasks import TASKS, Material, Task, attention_of, make_task
from farspan.training import Progress, TrainConfig, train

Say = Callable[[str, float], None]
"""Told, now and then, how far a step has come: in words, and as a share of it."""
Benchmark = tuple[int, Iterator[tuple[str, list[dict[str, Any]]]]]
"""How many parts it has, and each as it is done: in words, and its rows."""


class Work:
    """The steps of one reproduction in one folder."""

    def __init__(self, preset: Preset, folder: Path, say: Say) -> None:
        self.preset, self.folder, self.say = preset, folder, say
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def do(self, step: Step) -> None:
        """Do one step, unless its result is there."""
        getattr(self, f"_{step.kind}")(step)

    def _data(self, step: Step) -> None:
        if not step.tasks or any(TASKS[name].needs_text for name in step.tasks):
            self._prepare_corpus()
        for name in step.tasks:
            self._task(name).prepare(lambda what, part, name=name: self.say(f"{name}: {what}", part))  # type: ignore[misc]
        corpus = self.preset.corpus
        done = {"sources": list(corpus.train), "held_out": corpus.held_out, "tasks": step.tasks}
        write_whole(step.result, json.dumps(done))

    def _prepare_corpus(self) -> None:
        corpus, made = self.preset.corpus, self._vocabulary()
        for i, source in enumerate(corpus.train):
            share = 0.0 if corpus.held_out else 0.05
            prepare([source], self._tokens(i), tokenizer=made, valid_share=share, progress=self._tokenizing)
            made = load_tokenizer(self._tokens(0))  # the first source sets the vocabulary for all
        if corpus.held_out:
            held_out = self.folder / "data" / "held-out"
            prepare(corpus.held_out, held_out, tokenizer=made, valid_share=0.0, progress=self._tokenizing)

    def _vocabulary(self) -> int | str | TextTokenizer:
        """A tokenizer, its name, or the size of one to make."""
        tokenizer = self.preset.corpus.tokenizer
        return int(tokenizer) if tokenizer.isdigit() else tokenizer

    def _tokenizing(self, done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
        self.say(text, done / (total or 1))

    def _preparing(self, what: str, done: int, total: int) -> None:
        self.say(what, done / max(total, 1))

    def _tokens(self, i: int) -> Path:
        return self.folder / "data" / f"source-{i}"

    def _train(self, step: Step) -> None:
        if step.task:
            self._train_task(step)
            return
        config, last = self._train_config(step), list[Progress]()
        model_folder = train(config, self._run(step), report=self._telling(last))
        row = {
            "variant": step.variant,
            "seed": step.seed,
            "tokens": config.optimizer.steps * config.data.batch_size * config.data.length,
            "steps": config.optimizer.steps,
            "length": config.data.length,
            **training_facts(self._run(step), model_folder, last),
            "passkey_share": config.data.passkey_share,
        }
        write_result(step.result, [row], device=self.device, seed=step.seed)

    def _telling(self, last: list[Progress]) -> Callable[[Progress], None]:
        """A report for the training loop that shows each look and keeps it."""

        def report(progress: Progress) -> None:
            last.append(progress)
            self.say(
                f"step {progress.step}/{progress.steps}, loss {progress.loss:.3f}, "
                f"{progress.tokens_per_second:,.0f} tokens/s, {progress.mfu:.0%} of the matrix peak",
                progress.step / progress.steps,
            )

        return report

    def _train_task(self, step: Step) -> None:
        """Train for a task and answer its test."""
        task, settings, last = self._task(step.task), self.preset.task(step.task), list[Progress]()
        torch.compiler.reset()  # blocks of other shapes, compiled for other tasks, would make these shapes dynamic
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model_folder = task.train(step.variant, step.seed, self._run(step), self._telling(last))
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" and last else None
        facts = training_facts(self._run(step), model_folder, last)
        del facts["mfu"]  # it counts the products of softmax attention
        row = {
            "task": step.task,
            "variant": step.variant,
            "seed": step.seed,
            "tokens_trained": settings.steps * settings.batch_size * settings.length,
            "steps": settings.steps,
            "pretraining_steps": settings.pretraining_steps,
            "length": settings.length,
            **facts,
            "peak_bytes": peak,
            **task.score(model_folder, self.device, self.say),
        }
        write_result(step.result, [row], device=self.device, seed=step.seed)

    def _speed(self, step: Step) -> None:
        benchmarks = {"layer": self._layer_speed, "decode": self._decoding_speed, "": self._cosformer_speed}
        total, done = benchmarks[step.part]()
        rows: list[dict[str, Any]] = []
        for i, (what, new) in enumerate(done, 1):
            rows += new
            self.say(what, i / total)
        write_result(step.result, rows, device=self.device, seed=0)

    def _cosformer_speed(self) -> Benchmark:
        """Attention alone against length: the kernels and their peers on a GPU, else plain torch and softmax."""
        lengths, repeats = self.preset.speed.lengths, self.preset.speed.repeats
        if self.device == "cuda":
            done = cosformer_gpu.run(lengths, repeats=repeats, device="cuda", seed=0, quick=True)
            return cosformer_gpu.parts(lengths), done
        done = cosformer.run(lengths, lengths, min(lengths), repeats=repeats, device="cpu", seed=0)
        return cosformer.parts(lengths, lengths), done

    def _layer_speed(self) -> Benchmark:
        """One layer against length; on a CPU a toy, and the main contestants alone."""
        shapes = layer.shapes(self.preset.speed.lengths, [1], self.device)
        whom = None if self.device == "cuda" else layer.QUICK
        done = layer.run(shapes, repeats=self.preset.speed.repeats, only=whom, device=self.device)
        return layer.parts(shapes), done

    def _decoding_speed(self) -> Benchmark:
        """The whole model at inference; on a CPU, where it takes long and gains nothing, never compiled."""
        speed, compile = self.preset.speed, "one" if self.device == "cuda" else "none"
        done = decode.run(
            speed.model,
            contexts=speed.contexts,
            batches=speed.batches,
            prompts=speed.prompts,
            compile=compile,
            repeats=speed.repeats,
            device=self.device,
        )
        return decode.parts(speed.contexts, speed.batches, speed.prompts, compile), done

    def _task(self, name: str) -> Task:
        corpus = self.preset.corpus
        sources = {str(self._tokens(i)): weight for i, weight in enumerate(corpus.train.values())}
        material = Material(self.folder / "data", sources, self._texts, tuple(corpus.labelled))
        return make_task(name, self.preset.task(name), material)

    def _train_config(self, step: Step) -> TrainConfig:
        training = self.preset.training
        sources = {str(self._tokens(i)): weight for i, weight in enumerate(self.preset.corpus.train.values())}
        layers = FarspanConfig.preset(training.preset, **training.options).num_hidden_layers
        attention = attention_of(step.variant)
        named = attention if isinstance(attention, str) else [attention] * layers
        return TrainConfig.parse(
            {
                "model": {"preset": training.preset, "attention": named, "options": training.options},
                "data": {
                    "sources": sources,
                    "length": training.length,
                    "batch_size": training.batch_size,
                    "passkey_share": training.passkey_share,
                },
                "optimizer": {
                    "steps": training.steps,
                    "peak_lr": training.peak_lr,
                    "end_lr": training.end_lr,
                    "warmup_share": training.warmup_share,
                    "accumulation": training.accumulation,
                },
                "run": {
                    "seed": step.seed,
                    "compile": training.compile,
                    "checkpoint_every": max(50, training.steps // 5),
                },
            }
        )

    def _run(self, step: Step) -> Path:
        name = f"{step.variant}-s{step.seed}"
        return self.folder / "runs" / (f"{step.task}-{name}" if step.task else name)

    def _model(self, step: Step) -> FarspanForCausalLM:
        model = FarspanForCausalLM.from_pretrained(self._run(step) / "model").eval().to(self.device)
        give_law(model, step.scaling)
        return model

    def _texts(self) -> list[Tensor]:
        evaluation, held_out = self.preset.evaluation, self.folder / "data" / "held-out"
        shards = Shards(held_out) if held_out.is_dir() else Shards(self._tokens(0), split="valid")
        long = [i for i, n in enumerate(shards.document_lengths) if n >= evaluation.text_tokens][: evaluation.texts]
        require(
            len(long) > 0,
            f"no held-out document has {evaluation.text_tokens} tokens; pass longer texts with --held-out",
        )
        return [torch.from_numpy(shards.document(i)[: evaluation.text_tokens].astype(np.int64)) for i in long]

    def _subject(self, step: Step) -> dict[str, Any]:
        """What a row of a measurement begins with."""
        return {"variant": step.variant, "seed": step.seed, "scaling": step.scaling}

    def _windows(self, step: Step, model: FarspanForCausalLM) -> list[tuple[int, int, str]]:
        """Length, stride and mode of each perplexity."""
        evaluation, trained = self.preset.evaluation, self.preset.training.length
        windows = [(length, evaluation.stride, "sliding") for length in evaluation.perplexity_lengths]
        return windows + ([truncation_control(trained)] if step.scaling == "none" else [])

    def _prompts(self, step: Step) -> list[int]:
        """Lengths of the passkey prompts."""
        return self.preset.evaluation.passkey_lengths

    def _tokenizer(self, step: Step) -> TextTokenizer:
        return load_tokenizer(self._run(step) / "model")

    def _ppl(self, step: Step) -> None:
        evaluation, model, texts = self.preset.evaluation, self._model(step), self._texts()
        rows: list[dict[str, Any]] = []
        windows = self._windows(step, model)
        for done, (length, stride, mode) in enumerate(windows):
            with as_trained(self.device):
                row = perplexity(
                    model, texts, length=length, stride=stride, mode=mode, tokens_at_once=evaluation.tokens_at_once
                )
            rows.append({**self._subject(step), **row})
            self.say(f"{mode} {length}: {row['ppl']:.2f}", (done + 1) / len(windows))
        write_result(step.result, rows, device=self.device, seed=step.seed)

    def _passkey(self, step: Step) -> None:
        evaluation, model, tokenizer = self.preset.evaluation, self._model(step), self._tokenizer(step)
        rows: list[dict[str, Any]] = []
        prompts = self._prompts(step)
        for done, length in enumerate(prompts):
            with as_trained(self.device):
                row = passkey(
                    model,
                    tokenizer,
                    length=length,
                    cases=evaluation.cases,
                    new_tokens=evaluation.new_tokens,
                    tokens_at_once=evaluation.tokens_at_once,
                )
            rows.append({**self._subject(step), **row})
            self.say(f"passkey {length}: {row['accuracy']:.2f}", (done + 1) / len(prompts))
        write_result(step.result, rows, device=self.device, seed=step.seed)


def training_facts(run: Path, model: Path, looks: list[Progress]) -> dict[str, Any]:
    """What a finished run says about itself: size, loss and speed; the speed only where this call trained."""
    curve = [(row["step"], row["loss"]) for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    with safe_open(model / "model.safetensors", "pt") as file:  # what is tied is in it once
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return {
        "parameters": parameters,
        "final_loss": float(np.mean([loss for _, loss in curve[-20:]])),
        "seconds": json.loads((model / "trainer.json").read_text()).get("seconds"),
        "tokens_per_second": looks[-1].tokens_per_second if looks else None,
        "mfu": looks[-1].mfu if looks else None,
        "losses": [[i, loss] for i, loss in curve if i % max(1, len(curve) // 200) == 0],
    }
