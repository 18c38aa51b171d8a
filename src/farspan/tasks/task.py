"""What a task is: examples to make, a model to train on them, and questions to count."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.evaluation import as_trained
from farspan.tasks.settings import TaskSettings, attention_of
from farspan.training import Job, Progress, run
from farspan.training.config import OptimizerSection, RunSection

Say = Callable[[str, float], None]
"""Told, now and then, what is being done and how far it has come."""
Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Material:
    """What tasks are made from and where they keep it."""

    folder: Path
    """For tables, one folder a task."""
    sources: dict[str, float]
    """Token folders by weight, for tasks on running text."""
    held_out: Callable[[], list[Tensor]]
    """Token sequences for perplexity."""
    labelled: tuple[str, ...] = ()
    """Files of labelled texts: for training, for choices, and for the test."""


class Task:
    """One task at one size. A subclass says what is asked; all share how it is trained and reported."""

    name: str
    encoder = False
    """Whether its model looks both ways, and so may have learned positions."""
    needs_text = False
    """Whether it uses running text."""
    needs_labelled = False
    """Whether it uses labelled texts."""

    def __init__(self, settings: TaskSettings, material: Material) -> None:
        self.settings, self.material = settings, material
        self.folder = material.folder / self.name

    def check(self, variants: Iterable[str]) -> None:
        """Refuse settings that could not be made or trained, before anything is."""
        wanted = f"0 or at least the length {self.settings.length}" if self.encoder else "0 for a causal model"
        for variant in variants:
            learned = self.config(variant).learned_positions
            require(
                learned == 0 or (self.encoder and learned >= self.settings.length),
                f"tasks.{self.name}.options.learned_positions must be {wanted}, got {learned}; leave it out for none",
            )
            self.sections(variant, 0)

    def prepare(self, say: Say) -> None:
        """Make the examples; what is there already is left alone."""

    def train(self, variant: str, seed: int, out: Path, report: Report | None = None) -> Path:
        """Train a variant, or go on where an earlier call stopped; return the folder of the model."""
        return run(self.job(variant, seed), out, report=report)

    def job(self, variant: str, seed: int) -> Job:
        """The training of a variant."""
        raise NotImplementedError

    def score(self, model: Path, device: str, say: Say) -> dict[str, Any]:
        """What the trained model gets right on the test set, and on the validation set under ``valid``."""
        raise NotImplementedError

    def config(self, variant: str, **fields: Any) -> FarspanConfig:
        """The model of a variant; all variants differ in their attention alone."""
        settings = self.settings
        values = {"train_length": settings.length, **fields, **settings.options}
        return FarspanConfig.preset(settings.preset, attention=attention_of(variant), **values)

    def sections(self, variant: str, seed: int) -> tuple[dict[str, Any], OptimizerSection, RunSection]:
        """What a run of this task belongs to, and its optimizer and run sections."""
        settings = self.settings
        optimizer = OptimizerSection(
            steps=settings.steps,
            peak_lr=settings.peak_lr,
            end_lr=settings.end_lr,
            warmup_share=settings.warmup_share,
            weight_decay=settings.weight_decay,
            accumulation=settings.accumulation,
        )
        section = RunSection(seed=seed, compile=settings.compile, checkpoint_every=max(50, settings.steps // 4))
        size = {key: value for key, value in asdict(settings).items() if key != "compile"}
        named = {"task": {"name": self.name, "variant": variant, **size}, "run": asdict(section)}
        return named, optimizer, section


def ready(model: PreTrainedModel, device: str) -> Any:
    """A model for evaluation."""
    return model.eval().to(device)


def counted(
    ask: Callable[[Tensor, Callable[[float], None]], dict[str, Any]], splits: dict[str, Tensor], device: str, say: Say
) -> dict[str, Any]:
    """The counts of the test split, with those of the validation split under ``valid``."""
    found = {}
    for name, rows in splits.items():
        with as_trained(device), torch.no_grad():
            found[name] = ask(rows, lambda part, name=name: say(f"{name} set", part))  # type: ignore[misc]
    return {**found["test"], "valid": found["valid"]}
