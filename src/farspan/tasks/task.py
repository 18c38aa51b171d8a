"""The tasks of the cosFormer paper's evaluation at our scale, and associative recall."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.configuration_farspan import FarspanConfig
from farspan.data import Shards, TextTokenizer, load_tokenizer
from farspan.data.synthetic import LEVELS, MQAR, TOKENS, ListOps, Pathfinder
from farspan.errors import require, require_choice
from farspan.evaluation import as_trained, perplexity
from farspan.layers import HYBRIDS, NAMES
from farspan.modeling_farspan import FarspanForCausalLM, FarspanForMaskedLM, FarspanForSequenceClassification
from farspan.ops.device import product_dtype
from farspan.tasks.examples import PIECE, SPLITS, MaskedRows, TableRows, Tables, chosen_texts, generate, make_tables
from farspan.training import Job, TrainConfig, pretraining_job, run
from farspan.training.config import Count, Length, OptimizerSection, RunSection
from farspan.training.loop import METRICS
from farspan.training.loss import linear_cross_entropy
from farspan.utils import Progress, check_folder, in_phase, parse, share, silent

PLAIN = "cosformer-plain"
"""cosFormer without its re-weighting: the paper's ablation."""
VARIANTS = (*NAMES, *HYBRIDS, PLAIN)
OPTIMIZER: dict[str, Any] = {"end_lr": 1e-5, "warmup_share": 0.1, "weight_decay": 0.1, "accumulation": 1}
PRETRAINING_LR = 1e-3
TOKENS_AT_ONCE = 2**16
"""Tokens of rows in one batch of a test."""


def attention_of(variant: str) -> str | dict[str, Any]:
    """Return what :class:`farspan.FarspanConfig` calls a variant.

    >>> attention_of("rope"), attention_of("cosformer-plain")
    ('rope', {'kind': 'cosformer', 'rotary': False})
    """
    require_choice("variant", variant, VARIANTS)
    return {"kind": "cosformer", "rotary": False} if variant == PLAIN else variant


@dataclass(frozen=True)
class TaskSettings:
    """``[tasks.NAME]``: model, training and examples of one task, the same for every variant and seed."""

    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's preset "tiny" to replace."""
    length: Length = 128
    """Tokens per row; shorter examples are padded, longer texts cut."""
    batch_size: Count = 32
    steps: Count = 100
    peak_lr: Annotated[float, Field(gt=0, le=10)] = 1e-3
    compile: bool = False
    train: Count = 1000
    valid: Count = 200
    test: Count = 500
    """Examples of each split; of files no more than they have."""
    generator: dict[str, Any] = field(default_factory=dict)
    """Fields of the task's generator to replace; without it the task is as published."""
    pretraining_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Steps of masked-language-model training before fine-tuning, where the task has it."""
    pretraining_batch_size: Count = 32

    @property
    def examples(self) -> dict[str, int]:
        """Examples wanted, by split."""
        return {split: getattr(self, split) for split in SPLITS}


@dataclass(frozen=True)
class Material:
    """What tasks are made from and where they keep it."""

    folder: Path
    """For tables, one folder per task."""
    sources: dict[str, float]
    """Token folders by weight, for tasks on running text."""
    held_out: Callable[[], list[Tensor]]
    """Token sequences for perplexity."""
    labelled: tuple[str, ...] = ()
    """Files of labelled texts: for training, for choices, and for the test."""


class RowLabel(nn.Module):
    """Rows (b, n+1) with the label last: mean cross-entropy, and which labels are right."""

    def __init__(self, model: FarspanForSequenceClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self.model(rows[:, :-1]).logits.float(), rows[:, -1])

    def right(self, rows: Tensor) -> Tensor:
        return self.model(rows[:, :-1]).logits.argmax(-1) == rows[:, -1]


class AskedTokens(nn.Module):
    """Rows (b, 2n), tokens and then answers, 0 = nothing asked: mean cross-entropy over all that is asked, and which
    of it is answered right.
    """

    def __init__(self, model: FarspanForMaskedLM | FarspanForCausalLM) -> None:
        super().__init__()
        self.model = model

    def asked(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states where something is asked, and the answers."""
        tokens, answers = rows.chunk(2, dim=1)
        asked = answers > 0
        return self.model.model(tokens, use_cache=False).last_hidden_state[asked], answers[asked]

    def forward(self, rows: Tensor) -> Tensor:
        hidden, answers = self.asked(rows)
        return linear_cross_entropy(hidden.to(product_dtype(hidden)), self.model.lm_head.weight, answers)

    def right(self, rows: Tensor) -> Tensor:
        hidden, answers = self.asked(rows)
        return self.model.lm_head(hidden).argmax(-1) == answers


@torch.no_grad()
def count_right(objective: RowLabel | AskedTokens, rows: Tensor, progress: Progress = silent) -> dict[str, Any]:
    """Count right answers: rows of a table → ``cases, correct, accuracy, ci95``."""
    cases = correct = done = 0
    for part in rows.split(max(1, TOKENS_AT_ONCE // rows.shape[1])):
        found = objective.right(part.to(objective.model.device))
        cases, correct, done = cases + found.numel(), correct + int(found.sum()), done + len(part)
        progress(done, len(rows))
    return share(correct, cases)


class Task:
    """One task at one size: classify rows with a bidirectional encoder, unless a subclass says otherwise."""

    name: ClassVar[str]
    encoder: ClassVar[bool] = True
    """Whether its model is bidirectional, and so may have learned positions."""
    needs_text: ClassVar[bool] = False
    """Whether it uses running text."""
    needs_labelled: ClassVar[bool] = False
    """Whether it uses labelled texts."""
    generator: ClassVar[type[Any] | None] = None
    """What makes its examples, if they are not texts."""
    model: ClassVar[type[PreTrainedModel]] = FarspanForSequenceClassification
    objective: ClassVar[type[RowLabel | AskedTokens]] = RowLabel

    def __init__(self, settings: TaskSettings, material: Material) -> None:
        self.settings, self.material = settings, material
        self.folder = material.folder / self.name

    @cached_property
    def source(self) -> Any:
        """The generator with the fields of `settings.generator`."""
        assert self.generator is not None
        return parse(self.generator, self.settings.generator, f"tasks.{self.name}.generator.")

    def source_length(self) -> int:
        """Return the tokens of the generator's examples."""
        return int(self.source.length)

    def piece(self, split: int, number: int) -> NDArray[np.int64]:
        """Make PIECE rows with the generator, the same for the same numbers."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """Return what the model's configuration has because of the examples."""
        return {}

    def check(self, variants: Iterable[str]) -> None:
        """Raise for settings that could not be made or trained, before anything is."""
        length = self.settings.length
        wanted = f"0 or at least the length {length}" if self.encoder else "0 for a causal model"
        for variant in variants:
            learned = self.config(variant).learned_positions
            require(
                learned == 0 or (self.encoder and learned >= length),
                f"tasks.{self.name}.options.learned_positions must be {wanted}, got {learned}; leave it out for none",
            )
            self.job(variant, 0)  # raises for what a training could not be
        if self.generator is not None:
            made = self.source_length()
            require(length == made, f"tasks.{self.name}.length must be {made} with this generator, got {length}")

    def prepare(self, progress: Progress = silent) -> None:
        """Make the examples, unless they are there."""
        self.check(())
        make_tables(self.folder, lambda: self.tables(progress))

    def tables(self, progress: Progress) -> Tables:
        """Make the rows of each split."""
        return generate(self.piece, self.settings.examples, progress)

    def train(self, variant: str, seed: int, out: Path, progress: Progress = silent) -> Path:
        """Train a variant, or go on where an earlier call stopped; return the folder of the model."""
        return run(self.job(variant, seed), out, progress=progress)

    def job(self, variant: str, seed: int) -> Job:
        """Make the training job of a variant."""
        settings, section = self.settings, self.run_section(seed)
        named = {"name": self.name, "variant": variant, **asdict(settings)}
        del named["compile"]
        return Job(
            settings={"task": named, "run": asdict(section)},
            optimizer=self.optimizer,
            run=section,
            batch_size=settings.batch_size,
            tokens_per_row=settings.length,
            start=lambda: self.start(variant),
            load=self.model.from_pretrained,
            batches=lambda: TableRows(self.folder / "train.npy", settings.batch_size, seed),
            objective=self.objective,
            write_beside=self.write_beside,
        )

    def start(self, variant: str) -> PreTrainedModel:
        """Make the untrained model."""
        return self.model(self.config(variant, **self.fields()))

    def write_beside(self, folder: Path) -> None:
        """Write a tokenizer, where there is one: generated tasks have none."""

    def score(self, model: Path, device: str, progress: Progress = silent) -> dict[str, Any]:
        """Count what the trained model gets right on the test set, and on the validation set under ``valid``."""
        trained, found = self.objective(self.model.from_pretrained(model).eval().to(device)), {}
        for split in ("valid", "test"):
            rows = torch.from_numpy(np.load(self.folder / f"{split}.npy").astype(np.int64))
            with as_trained(device):
                found[split] = count_right(trained, rows, in_phase(progress, f"{split} set"))
        return {**found["test"], "valid": found["valid"]}

    def config(self, variant: str, **fields: Any) -> FarspanConfig:
        """Make the configuration of a variant; all variants differ in their attention alone."""
        settings = self.settings
        values = {"train_length": settings.length, **fields, **settings.options}
        return FarspanConfig.preset("tiny", attention=attention_of(variant), **values)

    @property
    def optimizer(self) -> OptimizerSection:
        return OptimizerSection(steps=self.settings.steps, peak_lr=self.settings.peak_lr, **OPTIMIZER)

    def run_section(self, seed: int) -> RunSection:
        every = max(50, self.settings.steps // 4)
        return RunSection(seed=seed, compile=self.settings.compile, checkpoint_every=every)


class ListOpsTask(Task):
    """Long Range Arena ListOps: expressions, zeros up to the length, value."""

    name = "listops"
    generator = ListOps

    def source_length(self) -> int:
        return int(self.source.max_length)

    def piece(self, split: int, number: int) -> NDArray[np.int64]:
        stream = self.source.stream(seed=split * 10**9 + number)
        rows = np.zeros((PIECE, self.settings.length + 1), np.int64)
        for row in rows:
            expression = next(stream)
            row[: len(expression.tokens)] = expression.tokens
            row[-1] = expression.value
        return rows

    def fields(self) -> dict[str, Any]:
        return {"vocab_size": len(TOKENS), "num_labels": 10, "pad_token_id": 0}


class PathfinderTask(Task):
    """Long Range Arena Pathfinder: pixels line by line, label."""

    name = "pathfinder"
    generator = Pathfinder

    def source_length(self) -> int:
        return int(self.source.size**2)

    def piece(self, split: int, number: int) -> NDArray[np.int64]:
        images = [self.source.draw(split, index) for index in range(number * PIECE, (number + 1) * PIECE)]
        return np.stack([np.append(pixels.ravel().astype(np.int64), label) for pixels, label in images])

    def fields(self) -> dict[str, Any]:
        return {"vocab_size": LEVELS, "num_labels": 2, "pad_token_id": None}


class RecallTask(Task):
    """Multi-query associative recall by a causal model: tokens, answers."""

    name = "mqar"
    encoder = False
    generator = MQAR
    model, objective = FarspanForCausalLM, AskedTokens

    def piece(self, split: int, number: int) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = self.source.draw(PIECE, seed=split * 10**9 + number)
        return rows

    def fields(self) -> dict[str, Any]:
        return {"vocab_size": self.source.vocabulary}


class TextTask(Task):
    """Labelled texts byte by byte: Long Range Arena Text when they are film reviews."""

    name = "text"
    needs_labelled = True

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer("bytes")

    def ends(self) -> dict[str, Any]:
        """Return the vocabulary and the token of padding."""
        return {"vocab_size": self.tokenizer.vocab_size, "pad_token_id": 0}

    def fields(self) -> dict[str, Any]:
        return {**self.ends(), "num_labels": self.labels()}

    def labels(self) -> int:
        """Count the labels of the training set."""
        return int(np.load(self.folder / "train.npy", mmap_mode="r")[:, -1].max()) + 1

    def tables(self, progress: Progress) -> Tables:
        """Make the rows of each split: texts cut to the length and padded on the right, label."""
        pad, length = self.ends()["pad_token_id"], self.settings.length
        for split, chosen in chosen_texts(self.material.labelled, self.settings.examples).items():
            rows, told = np.full((len(chosen), length + 1), pad), in_phase(progress, f"encoding {split} texts")
            for i, (text, label) in enumerate(chosen):
                ids = self.tokenizer.encode(text)[:length]
                rows[i, : len(ids)], rows[i, -1] = ids, label
                told(i, len(chosen))
            yield split, rows

    def write_beside(self, folder: Path) -> None:
        self.tokenizer.save(folder)


class FinetuningTask(TextTask):
    """The same texts in the tokens of a masked language model that was trained on running text and is fine-tuned."""

    name = "finetuning"
    needs_text = True

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer(next(iter(self.material.sources)))

    def ends(self) -> dict[str, Any]:
        """Return the vocabulary, where the mask comes after the tokenizer's, and after it the padding."""
        return {"vocab_size": self.tokenizer.vocab_size + 2, "pad_token_id": self.tokenizer.vocab_size + 1}

    def check(self, variants: Iterable[str]) -> None:
        super().check(variants)
        steps = self.settings.pretraining_steps
        need = f"tasks.{self.name}.pretraining_steps must be at least 1, got {steps}"
        require(steps >= 1, f"{need}; without pre-training it is the task 'text'")

    def train(self, variant: str, seed: int, out: Path, progress: Progress = silent) -> Path:
        check_folder(out, METRICS, what="of a training run")
        out.mkdir(parents=True, exist_ok=True)
        (out / METRICS).touch()
        first, second = in_phase(progress, "pre-training"), in_phase(progress, "fine-tuning")
        pretrained = run(self.pretraining(variant, seed), out / "pretraining", progress=first)
        job = replace(self.job(variant, seed), start=lambda: self.continued(pretrained))
        return run(job, out, progress=second)

    def continued(self, pretrained: Path) -> FarspanForSequenceClassification:
        """Load the encoder of the masked language model with a new head."""
        return FarspanForSequenceClassification.from_pretrained(pretrained, num_labels=self.labels())

    def pretraining(self, variant: str, seed: int) -> Job:
        """Make the job of masked-language-model training on running text."""
        settings, mask, job = self.settings, self.tokenizer.vocab_size, self.job(variant, seed)
        rows, sources = settings.pretraining_batch_size, self.material.sources.items()
        return replace(
            job,
            optimizer=replace(job.optimizer, steps=settings.pretraining_steps, peak_lr=PRETRAINING_LR),
            batch_size=rows,
            start=lambda: FarspanForMaskedLM(self.config(variant, **self.ends())),
            load=FarspanForMaskedLM.from_pretrained,
            batches=lambda: MaskedRows(
                [(Shards(path, verify=True), weight) for path, weight in sources], settings.length, rows, seed, mask
            ),
            objective=AskedTokens,
        )


class LanguageModelTask(Task):
    """Causal language modelling: perplexity of held-out text in windows of the training length."""

    name = "lm"
    encoder = False
    needs_text = True

    def prepare(self, progress: Progress = silent) -> None:
        """Do nothing: it trains on running text as it is."""

    def job(self, variant: str, seed: int) -> Job:
        settings, named = self.settings, attention_of(variant)
        attention = named if variant in HYBRIDS else [named] * self.config(variant).num_hidden_layers
        data = {"sources": self.material.sources, "length": settings.length, "batch_size": settings.batch_size}
        model = {"preset": "tiny", "attention": attention, "options": settings.options}
        how = {"optimizer": asdict(self.optimizer), "run": asdict(self.run_section(seed))}
        return pretraining_job(TrainConfig.parse({"model": model, "data": data, **how}))

    def score(self, model: Path, device: str, progress: Progress = silent) -> dict[str, Any]:
        trained = FarspanForCausalLM.from_pretrained(model).eval().to(device)
        length, texts = self.settings.length, self.material.held_out()
        with as_trained(device):
            row = perplexity(trained, texts, length=length, stride=max(1, length // 2))
        return {key: row[key] for key in ("nll", "tokens", "texts", "ppl", "stride")}


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (ListOpsTask, LanguageModelTask, TextTask, FinetuningTask, RecallTask, PathfinderTask)
}


def make_task(name: str, settings: TaskSettings, material: Material) -> Task:
    """Make a task by its name in :data:`TASKS`."""
    return TASKS[name](settings, material)
