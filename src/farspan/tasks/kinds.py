"""The tasks of the cosFormer paper's evaluation at our scale, and associative recall."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.data import Shards, TextTokenizer, load_tokenizer
from farspan.data.listops import LABELS as DIGITS
from farspan.data.listops import TOKENS, ListOps
from farspan.data.mqar import MQAR
from farspan.data.pathfinder import LABELS as LINKED
from farspan.data.pathfinder import LEVELS, Pathfinder
from farspan.errors import require, unknown
from farspan.evaluation import as_trained, perplexity
from farspan.evaluation.answers import asked_tokens, row_labels
from farspan.modeling_farspan import FarspanForCausalLM, FarspanForMaskedLM, FarspanForSequenceClassification
from farspan.tasks.datasets import Piece, generate, listops_piece, pathfinder_piece, recall_piece, text_tables
from farspan.tasks.masking import MaskedRows
from farspan.tasks.objectives import AskedTokens, RowLabel
from farspan.tasks.settings import TaskSettings, attention_of
from farspan.tasks.tables import TableRows, whole_table
from farspan.tasks.task import Material, Report, Say, Task, counted, ready
from farspan.training import Job, TrainConfig, pretraining_job, run
from farspan.training.config import parse_section


class _Tabled(Task):
    """Examples are tables; a subclass says what model learns from their rows, and how it is asked."""

    model: ClassVar[type[PreTrainedModel]]
    objective: ClassVar[type[nn.Module]]

    def start(self, variant: str) -> PreTrainedModel:
        """The untrained model."""
        raise NotImplementedError

    def ask(self, model: Any, rows: Tensor, tell: Callable[[float], None]) -> dict[str, Any]:
        """What a trained model gets right of rows of examples."""
        raise NotImplementedError

    def write_beside(self, folder: Path) -> None:
        """A tokenizer, where there is one: generated tasks have none."""

    def job(self, variant: str, seed: int) -> Job:
        named, optimizer, section = self.sections(variant, seed)
        settings = self.settings
        return Job(
            settings=named,
            optimizer=optimizer,
            run=section,
            batch_size=settings.batch_size,
            tokens_per_row=settings.length,
            start=lambda: self.start(variant),
            load=self.model.from_pretrained,
            batches=lambda: TableRows(self.folder / "train.npy", settings.batch_size, seed),
            objective=self.objective,
            write_beside=self.write_beside,
        )

    def score(self, model: Path, device: str, say: Say) -> dict[str, Any]:
        trained = ready(self.model.from_pretrained(model), device)
        splits = {split: whole_table(self.folder / f"{split}.npy") for split in ("valid", "test")}
        return counted(partial(self.ask, trained), splits, device, say)


class Classification(_Tabled):
    """A label for each row, by a bidirectional encoder trained from scratch."""

    encoder = True
    model = FarspanForSequenceClassification
    objective = RowLabel
    vocabulary: int
    labels: int
    pad: int | None

    def start(self, variant: str) -> FarspanForSequenceClassification:
        ends = {"vocab_size": self.vocabulary, "num_labels": self.labels, "pad_token_id": self.pad}
        return FarspanForSequenceClassification(self.config(variant, **ends))

    def ask(self, model: Any, rows: Tensor, tell: Callable[[float], None]) -> dict[str, Any]:
        return row_labels(model, rows, tell)


class _Generated(Task):
    """Examples come from a generator; `settings.generator` may replace its fields."""

    generator: ClassVar[type[Any]]

    def pieces(self) -> tuple[Piece, int]:
        """What makes a piece of a table, and the tokens of the generator's examples."""
        raise NotImplementedError

    @cached_property
    def source(self) -> Any:
        """The generator."""
        return parse_section(self.generator, self.settings.generator, f"tasks.{self.name}.generator.")

    def check(self, variants: Iterable[str]) -> None:
        super().check(variants)
        _, length = self.pieces()
        require(
            self.settings.length == length,
            f"tasks.{self.name}.length must be {length} with this generator, got {self.settings.length}",
        )

    def prepare(self, say: Say) -> None:
        self.check(())
        (piece, length), settings = self.pieces(), self.settings
        generate(self.folder, piece, self.source, length, settings.examples, say)


class ListOpsTask(_Generated, Classification):
    """Long Range Arena ListOps."""

    name = "listops"
    vocabulary, labels, pad = len(TOKENS), DIGITS, 0
    generator = ListOps

    def pieces(self) -> tuple[Piece, int]:
        return listops_piece, self.source.max_length


class PathfinderTask(_Generated, Classification):
    """Long Range Arena Pathfinder, pixel by pixel."""

    name = "pathfinder"
    vocabulary, labels, pad = LEVELS, LINKED, None
    generator = Pathfinder

    def pieces(self) -> tuple[Piece, int]:
        return pathfinder_piece, self.source.size**2


class RecallTask(_Generated, _Tabled):
    """Multi-query associative recall by a causal model."""

    name = "mqar"
    model = FarspanForCausalLM
    objective = AskedTokens
    generator = MQAR

    def pieces(self) -> tuple[Piece, int]:
        return recall_piece, self.source.length

    def start(self, variant: str) -> FarspanForCausalLM:
        return FarspanForCausalLM(self.config(variant, vocab_size=self.source.vocabulary))

    def ask(self, model: Any, rows: Tensor, tell: Callable[[float], None]) -> dict[str, Any]:
        return asked_tokens(model, rows, tell)


class TextTask(Classification):
    """Labelled texts byte by byte: Long Range Arena Text when they are film reviews."""

    name = "text"
    needs_labelled = True
    pad = 0

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer("bytes")

    @property
    def labels(self) -> int:  # type: ignore[override]
        return int(np.load(self.folder / "train.npy", mmap_mode="r")[:, -1].max()) + 1

    @property
    def vocabulary(self) -> int:  # type: ignore[override]
        return self.tokenizer.vocab_size

    def prepare(self, say: Say) -> None:
        labelled, settings = self.material.labelled, self.settings
        assert self.pad is not None
        text_tables(self.folder, labelled, self.tokenizer.encode, self.pad, settings.length, settings.examples, say)

    def write_beside(self, folder: Path) -> None:
        self.tokenizer.save(folder)


class FinetuningTask(TextTask):
    """The same texts in the tokens of a masked language model that was trained on running text and is fine-tuned."""

    name = "finetuning"
    needs_text = True

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer(next(iter(self.material.sources)))

    @property
    def mask(self) -> int:
        """The token that hides others; after it comes the padding."""
        return self.tokenizer.vocab_size

    @property
    def pad(self) -> int:  # type: ignore[override]
        return self.mask + 1

    @property
    def vocabulary(self) -> int:  # type: ignore[override]
        return self.mask + 2

    def check(self, variants: Iterable[str]) -> None:
        super().check(variants)
        settings = self.settings
        require(
            settings.pretraining_steps >= 1,
            f"tasks.{self.name}.pretraining_steps must be at least 1, got {settings.pretraining_steps}; "
            "without pre-training it is the task 'text'",
        )
        require(
            settings.pretraining_batch_size >= 1 and settings.pretraining_batch_size % settings.accumulation == 0,
            f"tasks.{self.name}.pretraining_batch_size must be a multiple of accumulation = {settings.accumulation}, "
            f"got {settings.pretraining_batch_size}",
        )

    def train(self, variant: str, seed: int, out: Path, report: Report | None = None) -> Path:
        pretrained = run(self.pretraining(variant, seed), out / "pretraining", report=report)
        job = replace(self.job(variant, seed), start=lambda: self.continued(pretrained))
        return run(job, out, report=report)

    def continued(self, pretrained: Path) -> FarspanForSequenceClassification:
        """The encoder of the masked language model with a new head."""
        return FarspanForSequenceClassification.from_pretrained(pretrained, num_labels=self.labels)

    def pretraining(self, variant: str, seed: int) -> Job:
        """Masked-language-model training on running text."""
        named, optimizer, section = self.sections(variant, seed)
        settings, sources = self.settings, self.material.sources
        ends = {"vocab_size": self.vocabulary, "pad_token_id": self.pad}
        return Job(
            settings=named,
            optimizer=replace(optimizer, steps=settings.pretraining_steps, peak_lr=settings.pretraining_lr),
            run=section,
            batch_size=settings.pretraining_batch_size,
            tokens_per_row=settings.length,
            start=lambda: FarspanForMaskedLM(self.config(variant, **ends)),
            load=FarspanForMaskedLM.from_pretrained,
            batches=lambda: MaskedRows(
                [(Shards(path), weight) for path, weight in sources.items()],
                settings.length,
                settings.pretraining_batch_size,
                seed,
                self.mask,
            ),
            objective=AskedTokens,
            write_beside=self.write_beside,
        )


class LanguageModelTask(Task):
    """Causal language modelling: perplexity of held-out text in windows of the training length."""

    name = "lm"
    needs_text = True

    def check(self, variants: Iterable[str]) -> None:
        variants = list(variants)
        super().check(variants)
        for variant in variants:
            self.job(variant, 0)  # refuses what a pre-training could not be

    def job(self, variant: str, seed: int) -> Job:
        _, optimizer, section = self.sections(variant, seed)
        settings = self.settings
        layers = self.config(variant).num_hidden_layers
        config = TrainConfig.parse(
            {
                "model": {
                    "preset": settings.preset,
                    "attention": [attention_of(variant)] * layers,
                    "options": settings.options,
                },
                "data": {
                    "sources": self.material.sources,
                    "length": settings.length,
                    "batch_size": settings.batch_size,
                },
                "optimizer": asdict(optimizer),
                "run": asdict(section),
            }
        )
        return pretraining_job(config)

    def score(self, model: Path, device: str, say: Say) -> dict[str, Any]:
        trained = ready(FarspanForCausalLM.from_pretrained(model), device)
        length, texts = self.settings.length, self.material.held_out()
        with as_trained(device):
            row = perplexity(trained, texts, length=length, stride=max(1, length // 2))
        return {key: row[key] for key in ("nll", "tokens", "texts", "ppl", "stride")}


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (ListOpsTask, LanguageModelTask, TextTask, FinetuningTask, RecallTask, PathfinderTask)
}


def make_task(name: str, settings: TaskSettings, material: Material) -> Task:
    """A task by its name."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name](settings, material)
