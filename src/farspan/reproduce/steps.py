"""The steps of a reproduction: each is one call of a public function, done when its result exists."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
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
from farspan.experiments import load_all
from farspan.finetune import finetune
from farspan.layers import AttentionSpec
from farspan.modeling_farspan import FarspanCache
from farspan.reproduce.preset import CHECKPOINT, Evaluation, Preset
from farspan.results import write_result
from farspan.tasks import TASKS, Material, Task, TaskSettings, make_task
from farspan.training import train
from farspan.utils import Progress, remove, write_json

ANSWERS = {"perplexity": "ppl", "passkey": "passkey"}
"""The kind of step that gives a kind of table or figure its numbers."""
MODELS, FOR_TASKS, LAST = range(3)
"""Phases: seed by seed, models with all their measures; tasks; measures beyond the last limit."""


@dataclass(frozen=True)
class Step:
    """A piece of work, done when its result exists."""

    kind: str
    name: str
    result: Path
    do: Callable[..., object]
    """Called with `out`, the result, and `progress`."""
    needs: tuple[str, ...] = ()
    """Names of the steps that must be done before."""
    chosen_by: frozenset[str] = frozenset()
    """Names of models and tasks that choose it with ``--only``."""
    order: tuple[int, ...] = ()
    """Phase, seed, and what is made before what is measured, quick measures first."""


def plan(preset: Preset, folder: Path, only: list[str] | None = None) -> list[Step]:
    """Return the steps that `only` chooses, with all that they need, in the order of work.

    Args:
        only: names of tables and figures, kinds of step, models and tasks. Kinds, models and tasks narrow each other:
            "ppl" and "rope" choose the perplexity of rope. None = all steps.
    """
    steps = sorted(Work(preset, folder).steps(), key=lambda step: step.order)
    kinds, names = {step.kind for step in steps}, set[str]().union(*(step.chosen_by for step in steps))
    tasks, papers = set(preset.tasks), {name: what & (kinds | names) for name, what in tables().items()}
    known = [*(name for name, what in papers.items() if what), *sorted(kinds), *preset.models, *preset.tasks]
    chosen = set[str]()
    for name in only or []:
        require(name in known, f"--only must name some of {', '.join(known)}, got {name!r}; separate them by commas")
        missing = f"--only {name} needs labelled texts, got none; name three files with --labelled"
        require(name not in tasks - names, missing)
        chosen |= papers.get(name) or {name}
    by_kind = chosen & kinds or kinds
    by_name = [some for some in (chosen & tasks, chosen - kinds - tasks) if some]
    wanted = [s for s in steps if s.kind in by_kind and all(some & s.chosen_by for some in by_name)]
    require(bool(wanted), f"--only must choose at least one step, got {','.join(only or [])}; leave it out for all")
    needed = {step.name for step in wanted}
    for step in reversed(steps):  # what a step needs comes before it
        needed |= set(step.needs) if step.name in needed else set()
    return [step for step in steps if step.name in needed]


def tables() -> dict[str, set[str]]:
    """Return each table and figure of the papers with the kinds of step, or the tasks, that give its numbers."""
    found = {}
    for table in load_all():
        kinds = {table.kind, *(row.kind for row in table.rows)} & ANSWERS.keys()
        found[table.name] = {ANSWERS[kind] for kind in kinds} or set(table.columns) & TASKS.keys()
    return dict(sorted(found.items(), key=lambda table: (not table[0].startswith("table"), table)))


def file_name(title: str) -> str:
    """Return the name of the files of a step or a model.

    >>> file_name("ppl rope seed 0 dynamic_ntk-4/per_request from 64")
    'ppl-rope-s0-dynamic_ntk-4-per_request-from-64'
    """
    return title.replace(" seed ", "-s").replace("/", "-").replace(" ", "-")


class Work:
    """The steps of one preset in one folder: tokens in ``data``, models in ``runs`` and ``models``."""

    def __init__(self, preset: Preset, folder: Path) -> None:
        self.preset, self.folder, self.results = preset, folder, folder / "results"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.texts = {f"source-{i}": [name] for i, name in enumerate(preset.corpus.train)}
        self.texts |= {"held-out": preset.corpus.held_out} if preset.corpus.held_out else {}
        self.token_steps = tuple(f"tokens {name}" for name in self.texts)

    def steps(self) -> Iterator[Step]:
        """Yield every step, to be sorted by `order`."""
        preset = self.preset
        for i, name in enumerate(self.texts):  # the first sets the vocabulary for all
            result, needs = self.folder / "data" / name / "manifest.json", self.token_steps[: min(i, 1)]
            yield Step("tokens", f"tokens {name}", result, partial(self.tokens, name), needs, order=(MODELS, -1, i))
        for number, name in enumerate(preset.models):
            for seed in range(0 if preset.tasks_of(name) else preset.seeds(name)):
                make = self.making(name, seed, number)
                yield make
                yield from self.measuring(name, seed, make)
        for number, task in enumerate(preset.tasks):
            if preset.corpus.labelled or not TASKS[task].needs_labelled:
                yield from self.task_steps(task, (FOR_TASKS, number))

    def result(self, title: str) -> Path:
        """Return the result file of a step."""
        return self.results / f"{file_name(title)}.json"

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
        weights = self.preset.corpus.train.values()
        return {str(self.folder / "data" / f"source-{i}"): weight for i, weight in enumerate(weights)}

    def tokens(self, name: str, out: Path, progress: Progress) -> None:
        """Tokenize a source of the training text, or the held-out text."""
        first = out.parent.with_name("source-0")
        vocabulary = self.vocabulary if out.parent == first else load_tokenizer(first)
        share = 0.0 if self.preset.corpus.held_out else 0.05
        prepare(self.texts[name], out.parent, tokenizer=vocabulary, valid_share=share, progress=progress)

    def held_out(self, tokens: int) -> list[Tensor]:
        """Return held-out documents of at least so many tokens, cut to them."""
        name, split = ("held-out", "train") if self.preset.corpus.held_out else ("source-0", "valid")
        shards = Shards(self.folder / "data" / name, split=split)
        long = [i for i, n in enumerate(shards.document_lengths) if n >= tokens][: self.preset.evaluation.texts]
        require(bool(long), f"no held-out document has {tokens} tokens; pass longer texts with --held-out")
        return [torch.from_numpy(shards.document(i)[:tokens].astype(np.int64)) for i in long]

    # Models

    def how(self, name: str) -> str:
        """Return the kind of step that makes a model."""
        return {"": "train", CHECKPOINT: "convert"}.get(self.preset.models[name].start, "finetune")

    def making(self, name: str, seed: int, number: int) -> Step:
        """Make the step that trains, converts or fine-tunes a model."""
        model, kind = self.preset.models[name], self.how(name)
        do = {"train": self.train, "convert": self.convert, "finetune": self.finetune}[kind]
        needs = () if kind == "convert" else self.token_steps
        needs += (f"{self.how(model.start)} {self.titled(model.start, seed)}",) if kind == "finetune" else ()
        order = MODELS, seed, int(kind == "finetune"), -model.calibrate_tokens, number  # the longest calibration first
        title, result = f"{kind} {self.titled(name, seed)}", self.made(name, seed)
        return Step(kind, title, result, partial(do, name, seed), needs, frozenset({name}), order)

    def titled(self, name: str, seed: int) -> str:
        """Return a model's name, with its seed where it has one: what is made from a checkpoint has none."""
        return name if self.preset.models[self.preset.origin(name)].start else f"{name} seed {seed}"

    def path(self, name: str, seed: int = 0) -> Path:
        """Return the folder of a model."""
        if self.how(name) == "convert":
            return self.folder / "models" / name
        return self.folder / "runs" / file_name(self.titled(name, seed)) / "model"

    def made(self, name: str, seed: int = 0) -> Path:
        """Return the result that says what making a model took."""
        title = self.titled(name, seed)
        return self.result(f"model {name}" if title == name else f"train {title}")

    def train(self, name: str, seed: int, out: Path, progress: Progress) -> None:
        """Train a model from nothing."""
        config, run = self.preset.train_config(name, seed, self.sources), self.path(name, seed).parent
        train(config, run, progress=progress)
        steps, data = config.optimizer.steps, config.data
        tokens = steps * data.batch_size * data.length
        self._write_training(out, run, name, seed, steps=steps, tokens=tokens, **_shares(asdict(data)))

    def convert(self, name: str, seed: int, out: Path, progress: Progress) -> None:
        """Convert the checkpoint."""
        corpus, model, began = self.preset.corpus, self.preset.models[name], time.perf_counter()
        folder, tokens = self.path(name, seed), model.calibrate_tokens
        remove(folder)  # of a call that was stopped before it wrote its result
        convert_folder(
            corpus.checkpoint,
            folder,
            **asdict(self.preset.target(name)),
            text=list(corpus.train) if tokens else (),
            tokens=tokens,
            calibration_config=CalibrationConfig(steps=model.calibrate_steps),
            device=self.device if tokens else "cpu",
            progress=progress,
        )
        took = {"tokens": tokens, "seconds": time.perf_counter() - began, "calibrated": tokens > 0}
        self._write_model(out, name, stages=0, **took, **_shares())

    def finetune(self, name: str, seed: int, out: Path, progress: Progress) -> None:
        """Fine-tune a model with its recipe."""
        preset, recipe, folder = self.preset, self.preset.recipe(name), self.path(name, seed).parent
        before, stages = preset.models[name].start, recipe.stages
        teacher = preset.corpus.checkpoint if any(stage.needs_teacher for stage in stages) else None
        settings: Any = {"teacher": teacher, "run": replace(preset.base_config.run, seed=seed), "progress": progress}
        finetune(self.path(before, seed), self.sources, recipe, folder, **settings)
        known = _rows(self.made(before, seed))[0]
        took = [known, *_rows(folder / "recipe.json")]
        totals = {what: sum(one[what] for one in took) for what in ("tokens", "seconds")} | _shares(*took)
        if preset.models[preset.origin(name)].start:
            self._write_model(out, name, stages=known["stages"] + len(stages), **totals)
        else:
            run, steps = folder / f"stage-{len(stages)}-{stages[-1].name}", sum(x.optimizer.steps for x in stages)
            self._write_training(out, run, name, seed, steps=known["steps"] + steps, **totals)

    def _write_training(self, out: Path, run: Path, name: str, seed: int, **more: Any) -> None:
        row = {
            "variant": name,
            "seed": seed,
            "length": self.preset.base_config.data.length,  # what the page measures lengths by, also of other models
            "train_length": FarspanConfig.from_pretrained(run / "model").train_length,
            **training_facts(run, run / "model"),
            **more,
        }
        write_result(out, [row], device=self.device, seed=seed, kind="training")

    def _write_model(self, out: Path, name: str, **more: Any) -> None:
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
        write_result(out, [row], device=self.device, seed=0, kind="model")

    # Measures

    def measuring(self, name: str, seed: int, make: Step) -> Iterator[Step]:
        """Make the steps that measure a model."""
        of, subject = self.preset.measured(name), self.titled(name, seed)

        def step(kind: str, scaling: str = "", far: int = 0, **lengths: list[int]) -> Step:
            start = f"from {lengths['lengths'][0]}" if far else ""
            title = " ".join(filter(None, (kind, subject, scaling, start)))
            how = {"label": {"variant": name, "seed": seed}, "scalings": [scaling or "none"], **lengths}
            do = partial(self.measures(of, self.path(name, seed), scaling, far)[kind], **how)
            needs = (make.name, *(self.token_steps if kind in ("ppl", "positions") else ()))
            order = LAST if far and far == len(of.long) else MODELS, seed, 2 + (kind == "retrieval") + far
            return Step(kind, title, self.result(title), do, needs, make.chosen_by, order)

        if of.window:
            yield from (step(kind) for kind in ["cache"] * (make.kind == "convert") + ["bits", "pairs"])
        asked = of.retrieval_lengths if of.retrieval_tasks else []
        for scaling in self.scalings(name):
            # Inside the training length dynamic NTK changes nothing, and log length nothing that "none" does not show.
            same = scaling.startswith("dynamic_ntk") or (scaling == "none+log" and "none" in of.scalings)
            for kind, every in (("ppl", of.perplexity_lengths), ("passkey", of.passkey_lengths), ("retrieval", asked)):
                for far in range(len(of.long) + 1):
                    beyond = [n for n in every if sum(n > limit for limit in of.long) == far]
                    lengths = [n for n in beyond if n > of.inside or not same]
                    if lengths:
                        yield step(kind, scaling, far, lengths=lengths)
            if of.position_tokens:
                yield step("positions", scaling)

    def scalings(self, name: str) -> list[str]:
        """Return the scalings that a model is measured under; ALiBi and linear layers take none."""
        found, attention = self.preset.measured(name).scalings, self.preset.attention(name)
        hybrid = str(attention).startswith("hybrid")
        if hybrid or AttentionSpec.parse(attention).kind not in ("alibi", "cosformer", "linear-coca"):
            return found
        return [scaling for scaling in found if scaling.startswith(("none", "own"))] or ["none"]

    def measures(self, of: Evaluation, model: Path, scaling: str, far: int) -> dict[str, Callable[..., object]]:
        """Return what each kind of step calls to measure a model, beyond `far` limits of ``evaluation.long``."""
        corpus = self.preset.corpus
        plain = next((n for n in of.scalings if n.startswith("none")), of.scalings[0])
        cases = of.long_cases[far - 1] if far and of.long_cases else of.cases
        stride = of.long_stride if far else of.stride
        ppl: Any = {"stride": stride, "control": not far and scaling == plain, "tokens_at_once": of.tokens_at_once}
        asked: Any = {"cases": cases, "tokens_at_once": of.tokens_at_once}
        bits: Any = {"length": of.window, "texts": of.texts, "text_bytes": of.text_bytes}
        return {
            "ppl": partial(self.on_text, evaluate_perplexity, model, of.text_tokens, **ppl),
            "positions": partial(self.on_text, evaluate_positions, model, of.position_tokens),
            "passkey": partial(evaluate_passkey, model, new_tokens=of.new_tokens, **asked),
            "retrieval": partial(evaluate_retrieval, model, tasks=of.retrieval_tasks, **asked),
            "bits": partial(evaluate_bits, model, corpus.held_out, **bits),
            "pairs": partial(evaluate_pairs, model, corpus.pairs, most=of.pairs or None),
            "cache": partial(self.cache, model, of.window),
        }

    def on_text(self, evaluate: Callable[..., object], model: Path, tokens: int, **how: Any) -> None:
        """Evaluate a model on held-out documents of so many tokens."""
        evaluate(model, self.held_out(tokens), text_tokens=tokens, **how)

    @torch.no_grad()
    def cache(self, path: Path, tokens: int, out: Path, label: dict[str, Any], **_: Any) -> None:
        """Measure the bytes of a model's cache after so many tokens."""
        model = from_pretrained(path, attention=None, dtype=torch.float32, device=self.device)
        cache = FarspanCache(model.config)
        model.model(torch.zeros(1, tokens, dtype=torch.long, device=self.device), past_key_values=cache)
        row = {**label, "scaling": "none", "length": tokens, "bytes": cache.nbytes, "dtype": "float32"}
        write_result(out, [row], device=self.device, seed=0, kind="cache")

    # Tasks

    def task_steps(self, task: str, order: tuple[int, int]) -> Iterator[Step]:
        """Make the examples of a task, and the steps that train each model for it and test it."""
        preset, examples = self.preset, f"examples {task}"
        needs = self.token_steps if TASKS[task].needs_text else ()
        result, do = self.folder / "data" / f"{task}.json", partial(self.examples, task)
        yield Step("examples", examples, result, do, needs, frozenset({task}), (*order, -1))
        for name in preset.models:
            for seed in range(preset.seeds(name) if task in preset.tasks_of(name) else 0):
                run, do = f"{task} {name} seed {seed}", partial(self.task, task, name, seed)
                chosen_by, at = frozenset({task, name}), (*order, seed)
                yield Step("task", f"train {run}", self.result(f"task {run}"), do, (examples, *needs), chosen_by, at)

    def _task(self, name: str, settings: TaskSettings) -> Task:
        corpus, tokens = self.preset.corpus, self.preset.evaluation.text_tokens
        material = Material(self.folder / "data", self.sources, lambda: self.held_out(tokens), tuple(corpus.labelled))
        return make_task(name, settings, material)

    def examples(self, name: str, out: Path, progress: Progress) -> None:
        """Make the examples of a task."""
        self._task(name, self.preset.tasks[name]).prepare(progress)
        write_json(out, {"task": name})

    def task(self, name: str, variant: str, seed: int, out: Path, progress: Progress) -> None:
        """Train for a task and answer its test."""
        attention, settings = self.preset.task_settings(variant, name)
        task, run = self._task(name, settings), self.folder / "runs" / file_name(f"{name} {variant} seed {seed}")
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
        write_result(out, [row], device=self.device, seed=seed, kind="task")


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
