"""Settings of a training run: small frozen dataclasses, read from TOML."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from farspan.errors import require
from farspan.utils import parse, read_settings

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Length = Annotated[int, Field(ge=2, le=2**31 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
PasskeyShare = Annotated[float, Field(ge=0, le=0.05)]
"""More passkey rows would train the test."""
RetrievalShare = Annotated[float, Field(ge=0, le=0.2)]
Weight = Annotated[float, Field(gt=0, le=1e9)]
LearningRate = Annotated[float, Field(ge=0, le=10)]


@dataclass(frozen=True)
class ModelSection:
    """``[model]``: a preset of :class:`farspan.FarspanConfig` and the fields to replace in it."""

    preset: str = "350m"
    attention: str | list[Any] | dict[str, Any] = "coca-exact"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require("attention" not in self.options, "options must not hold attention, which has a key of its own")


@dataclass(frozen=True)
class DataSection:
    """``[data]``: token folders by weight, and how a batch is cut from them."""

    sources: dict[str, Weight] = field(default_factory=dict)
    length: Length = 512
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 256
    passkey_share: PasskeyShare = 0.0
    retrieval_share: RetrievalShare = 0.0

    def __post_init__(self) -> None:
        require(
            not (self.retrieval_share and self.passkey_share),
            f"data.passkey_share must be 0 with retrieval_share, got {self.passkey_share}; its rows hold passkeys too",
        )


@dataclass(frozen=True)
class OptimizerSection:
    """``[optimizer]``: the paper's AdamW and schedule (Sec. 3.3) by default; weight decay is not given there."""

    steps: Count = 1000
    peak_lr: Annotated[float, Field(gt=0, le=10)] = 1e-4
    start_lr: LearningRate = 1e-7
    end_lr: LearningRate = 1e-5
    warmup_share: Share = 0.01
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    clip: Annotated[float, Field(gt=0)] = 1.0
    accumulation: Count = 2


@dataclass(frozen=True)
class RunSection:
    """``[run]``: everything but the seed may change when a run continues."""

    seed: Annotated[int, Field(ge=0)] = 0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """"auto" is bf16 on a GPU and fp32 on a CPU."""
    compile: bool = False
    gradient_checkpointing: bool = False
    checkpoint_every: Count = 500


@dataclass(frozen=True)
class TrainConfig:
    """Everything that defines a pre-training run."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        data = self.data
        require(bool(data.sources), 'data.sources is empty; name token folders, e.g. sources = { "runs/books" = 1.0 }')
        check_pieces(data.batch_size, self.optimizer.accumulation, "data.batch_size")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Make a configuration from nested mappings. Raise one line for the first wrong key or value."""
        return parse(cls, values)

    @classmethod
    def load(cls, path: str | Path) -> "TrainConfig":
        """Read a TOML file."""
        return cls.parse(read_settings(path))


def check_pieces(batch_size: int, accumulation: int, name: str) -> None:
    """Raise unless a batch can be divided evenly for gradient accumulation."""
    require(
        batch_size % accumulation == 0,
        f"{name} must be a multiple of optimizer.accumulation = {accumulation}, got {batch_size}",
    )
