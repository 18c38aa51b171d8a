"""How large a reproduction is: data, model, training and evaluation, as TOML."""

import re
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from farspan.configuration_farspan import PRESETS
from farspan.data.tokenizer import BYTES_VOCABULARY
from farspan.errors import require, require_choice
from farspan.reproduce.study import Study
from farspan.tasks import TASKS, VARIANTS, Material, TaskSettings, make_task
from farspan.training.config import parse_section, read_toml

NAMES = ("cpu", "cpu-log-length", "gpu", "cosformer-cpu", "cosformer-gpu", "dropin-cpu", "dropin")
SCALING = re.compile(r"(none|ntk-\d+(\.\d+)?(/per_query|/per_request)?|yarn-\d+(\.\d+)?)(\+log)?")
DEFAULT_TOKENIZER = "bytes"


def _require_counts(section: str, values: object, *names: str) -> None:
    """Refuse numbers, or numbers in lists, below one."""
    for name in names:
        value = getattr(values, name)
        least = min(value if isinstance(value, list) else [value], default=1)
        require(least >= 1, f"{section}.{name} must be whole numbers from 1 on, got {least}; leave it out")


@dataclass(frozen=True)
class Corpus:
    """``[corpus]``: training text by weight, held-out text, and the tokenizer."""

    train: dict[str, float] = field(default_factory=lambda: {"stdlib": 1.0})
    """Source → weight; several sources become one mixture (the paper: 75% text, 25% code)."""
    held_out: list[str] = field(default_factory=list)
    """Text for perplexity; empty = the documents kept back from `train`."""
    tokenizer: str = DEFAULT_TOKENIZER
    """A name or folder, or the size of a BPE to train on the training text. A study takes the checkpoint's own."""
    labelled: list[str] = field(default_factory=list)
    """Files of labelled texts for training, for choices and for the test; without them their tasks are left out."""
    checkpoint: str = ""
    """What a study converts: a folder or GGUF file."""
    pairs: list[str] = field(default_factory=list)
    """Minimal pairs that a study measures grammar with."""

    def __post_init__(self) -> None:
        size = int(self.tokenizer) if self.tokenizer.isdigit() else BYTES_VOCABULARY
        require(
            size >= BYTES_VOCABULARY,
            f"tokenizer must be a name, a folder or a size from {BYTES_VOCABULARY} on, got {size}; try 8192",
        )


@dataclass(frozen=True)
class Training:
    """``[training]``: what every variant shares."""

    preset: str = "tiny"
    length: int = 64
    batch_size: int = 64
    steps: int = 100
    peak_lr: float = 1e-4
    end_lr: float = 1e-5
    warmup_share: float = 0.01
    accumulation: int = 1
    passkey_share: float = 0.0
    compile: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("training.preset", self.preset, PRESETS)
        _require_counts("training", self, "length", "batch_size", "steps", "accumulation")
        require(self.peak_lr > 0, f"training.peak_lr must be above 0, got {self.peak_lr}; leave it out for 1e-4")


@dataclass(frozen=True)
class Evaluation:
    """``[evaluation]``: lengths and counts; an empty list of lengths leaves the task out."""

    scalings: list[str] = field(default_factory=lambda: ["none", "ntk-4"])
    perplexity_lengths: list[int] = field(default_factory=list)
    stride: int = 512
    texts: int = 20
    text_tokens: int = 32_768
    passkey_lengths: list[int] = field(default_factory=list)
    cases: int = 100
    new_tokens: int = 16
    tokens_at_once: int = 2**16

    def __post_init__(self) -> None:
        counts = ("stride", "texts", "text_tokens", "cases", "new_tokens", "tokens_at_once")
        _require_counts("evaluation", self, "perplexity_lengths", "passkey_lengths", *counts)


@dataclass(frozen=True)
class Speed:
    """``[speed]``: beside tasks, cosFormer alone against length; otherwise CoCA beside RoPE, on request.

    What has no lengths or contexts is left out.
    """

    lengths: list[int] = field(default_factory=list)
    """Tokens a text: of cosFormer alone, or of one layer of CoCA."""
    repeats: int = 5
    model: str = "tiny"
    """The model that is decoded, a preset of `FarspanConfig`."""
    contexts: list[int] = field(default_factory=list)
    """Tokens in the cache before decoding, each for each of `batches` texts."""
    batches: list[int] = field(default_factory=lambda: [1])
    prompts: list[int] = field(default_factory=list)
    """Lengths of prompts that the decoded model reads."""

    def __post_init__(self) -> None:
        require_choice("speed.model", self.model, PRESETS)
        _require_counts("speed", self, "lengths", "contexts", "batches", "prompts", "repeats")
        require(bool(self.batches), "speed.batches must name at least one, got none; leave it out for [1]")


@dataclass(frozen=True)
class Preset:
    """A whole reproduction: models measured past their training length (CoCA), a model for each task (cosFormer), or
    CoCA dropped into a checkpoint.

    >>> Preset.load("cpu").training.length, list(Preset.load("cpu").tasks)
    (64, [])
    >>> Preset.load("cosformer-cpu").task("listops").length
    64
    >>> list(Preset.load("dropin").study.conversions)
    ['original', 'copied', 'calibrated', 'local', 'rope-local']
    """

    corpus: Corpus = field(default_factory=Corpus)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    variants: list[str] = field(default_factory=lambda: ["rope", "coca-exact"])
    seeds: dict[str, int] = field(default_factory=dict)
    """Seeds a variant, where more than one."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """``[tasks.NAME]``: with tasks, these are trained and tested in this order, and nothing else is."""
    speed: Speed = field(default_factory=Speed)
    study: Study = field(default_factory=Study)
    """``[study]``: with conversions, the study of a checkpoint, and nothing else."""

    def __post_init__(self) -> None:
        for variant in [*self.variants, *self.seeds]:
            require_choice("variants", variant, VARIANTS)
        require(bool(self.variants), "variants must name at least one attention, got none; try ['rope', 'coca-exact']")
        for variant, seeds in self.seeds.items():
            require(seeds >= 1, f"seeds.{variant} must be at least 1, got {seeds}; leave it out of variants instead")
        self._check_corpus()
        require(
            not self.speed.contexts or not (self.tasks or self.study.conversions),
            f"speed.contexts must be left out beside tasks or a study, got {self.speed.contexts}; they are for CoCA",
        )
        for name in self.tasks:
            require_choice("tasks", name, TASKS)
            nowhere = Material(Path(), {"nowhere": 1.0}, lambda: [])
            make_task(name, self.task(name), nowhere).check(self.variants)  # refuses what cannot be meant
        laws = [law for member in self.study.members.values() for law in member.scalings]
        for scaling in [*self.evaluation.scalings, *laws]:
            require(
                SCALING.fullmatch(scaling) is not None,
                "evaluation.scalings must be 'none' or like 'ntk-4' (ntk-4/per_request) or 'yarn-4', each perhaps with "
                f"'+log', got {scaling!r}",
            )

    def _check_corpus(self) -> None:
        """Refuse texts that this kind of preset has no use for."""
        corpus, study = self.corpus, bool(self.study.conversions)
        require(
            not (study and self.tasks),
            f"tasks must be left out beside [study], got {list(self.tasks)}; choose one",
        )
        require(
            bool(self.tasks) or not corpus.labelled,
            f"labelled texts are for a preset with tasks, such as cosformer-cpu, got {corpus.labelled}; leave them out",
        )
        require(
            len(corpus.labelled) in (0, 3),
            f"labelled must name three files, for training, for choices and for the test, "
            f"got {len(corpus.labelled)}; repeat --labelled",
        )
        for option, value in (("checkpoint", corpus.checkpoint), ("pairs", corpus.pairs)):
            require(
                study or not value,
                f"--{option} is for a preset with a study, such as dropin, got {value!r}; leave it out",
            )
        require(
            not study or corpus.tokenizer == DEFAULT_TOKENIZER,
            f"--tokenizer must be left out where a checkpoint brings its own, got {corpus.tokenizer!r}",
        )

    def task(self, name: str) -> TaskSettings:
        """The settings of a task."""
        values = self.tasks[name]
        require(isinstance(values, dict), f"tasks.{name} must be a table, got {values!r}")
        return parse_section(TaskSettings, values, f"tasks.{name}.")

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Every (variant, seed), the first seeds of all variants first."""
        most = max([1, *self.seeds.values()])
        return [(v, s) for s in range(most) for v in self.variants if s < self.seeds.get(v, 1)]

    @classmethod
    def load(cls, name: str | Path) -> "Preset":
        """A shipped preset by name, or a TOML file of one's own."""
        path = Path(name)
        if path.suffix == ".toml":
            return parse_section(cls, read_toml(path, "preset"), "")
        require_choice("preset", str(name), NAMES)
        return parse_section(cls, tomllib.loads(files("farspan").joinpath("presets", f"{name}.toml").read_text()), "")
