"""How large a reproduction is: data, model, training and evaluation, as TOML."""

import re
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from farspan.errors import require, require_choice
from farspan.layers.spec import NAMES as ATTENTIONS
from farspan.training.config import parse_section, read_toml

NAMES = ("cpu", "gpu")
SCALING = re.compile(r"none|ntk-\d+(\.\d+)?(/per_query|/per_request)?")


@dataclass(frozen=True)
class Corpus:
    """``[corpus]``: training text by weight, held-out text, and the tokenizer."""

    train: dict[str, float] = field(default_factory=lambda: {"stdlib": 1.0})
    """Source → weight; several sources become one mixture (the paper: 75% text, 25% code)."""
    held_out: list[str] = field(default_factory=list)
    """Text for perplexity; empty = the documents kept back from `train`."""
    tokenizer: str = "bytes"
    """A name or folder, or the size of a BPE to train on the training text."""


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


@dataclass(frozen=True)
class Preset:
    """A whole reproduction.

    >>> Preset.load("cpu").training.length
    64
    """

    corpus: Corpus = field(default_factory=Corpus)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    variants: list[str] = field(default_factory=lambda: ["rope", "coca-exact"])
    seeds: dict[str, int] = field(default_factory=dict)
    """Seeds a variant, where more than one."""

    def __post_init__(self) -> None:
        for variant in [*self.variants, *self.seeds]:
            require_choice("variants", variant, ATTENTIONS)
        for scaling in self.evaluation.scalings:
            require(
                SCALING.fullmatch(scaling) is not None,
                f"evaluation.scalings must be 'none' or like 'ntk-4' or 'ntk-4/per_request', got {scaling!r}",
            )

    @classmethod
    def load(cls, name: str | Path) -> "Preset":
        """A shipped preset by name, or a TOML file of one's own."""
        path = Path(name)
        if path.suffix == ".toml":
            return parse_section(cls, read_toml(path, "preset"), "")
        require_choice("preset", str(name), NAMES)
        return parse_section(cls, tomllib.loads(files("farspan").joinpath("presets", f"{name}.toml").read_text()), "")
