"""What a training run is, as a small frozen value read from TOML."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from farspan.errors import require, require_choice, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class ModelSection:
    """``[model]``: a preset of :class:`farspan.FarspanConfig` and the fields to replace in it."""

    preset: str = "350m"
    attention: str | list[Any] = "coca-exact"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSection:
    """``[data]``: token folders by weight, and how a batch is cut from them."""

    sources: dict[str, float] = field(default_factory=dict)
    length: int = 512
    batch_size: int = 256
    passkey_share: float = 0.0
    retrieval_share: float = 0.0
    """Share of rows that show retrieval tasks with answers (:mod:`farspan.data.retrieval`)."""


@dataclass(frozen=True)
class OptimizerSection:
    """``[optimizer]``: the paper's AdamW and schedule (Sec. 3.3) by default; weight decay is not given there."""

    steps: int = 1000
    peak_lr: float = 1e-4
    start_lr: float = 1e-7
    end_lr: float = 1e-5
    warmup_share: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulation: int = 2

    def __post_init__(self) -> None:
        require(
            len(self.betas) == 2 and all(type(b) in (int, float) and 0 <= b < 1 for b in self.betas),
            f"optimizer.betas must be two numbers in 0 … 1, got {list(self.betas)}; the paper uses [0.9, 0.95]",
        )
        require(self.clip > 0, f"optimizer.clip must be above 0, got {self.clip}; the paper uses 1.0")
        require(self.weight_decay >= 0, f"optimizer.weight_decay must be at least 0, got {self.weight_decay}")
        require(
            0 <= self.warmup_share <= 1,
            f"optimizer.warmup_share must lie in 0 … 1, got {self.warmup_share}; the paper uses 0.01",
        )


@dataclass(frozen=True)
class RunSection:
    """``[run]``: how, not what; changing it changes no result beyond rounding."""

    seed: int = 0
    precision: str = "auto"
    """"auto" (bf16 on a GPU, fp32 on a CPU), "bf16" or "fp32"."""
    compile: bool = False
    gradient_checkpointing: bool = False
    checkpoint_every: int = 500
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class TrainConfig:
    """A whole run.

    >>> TrainConfig.parse({"data": {"sources": {"tokens": 1.0}}, "optimizer": {"steps": 5}}).optimizer.steps
    5
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        data, optimizer, run = self.data, self.optimizer, self.run
        require(bool(data.sources), 'data.sources is empty; name token folders, e.g. sources = { "runs/books" = 1.0 }')
        weights = data.sources.values()
        require(
            all(isinstance(w, int | float) and w > 0 for w in weights),
            f"data.sources need weights > 0, got {data.sources}",
        )
        require(run.checkpoint_every >= 1, f"run.checkpoint_every must be at least 1, got {run.checkpoint_every}")
        require(run.keep_checkpoints >= 1, f"run.keep_checkpoints must be at least 1, got {run.keep_checkpoints}")
        require(data.length >= 2, f"data.length must be at least 2, got {data.length}")
        require(optimizer.steps >= 1, f"optimizer.steps must be at least 1, got {optimizer.steps}")
        require(optimizer.accumulation >= 1, f"optimizer.accumulation must be at least 1, got {optimizer.accumulation}")
        require(
            data.batch_size % optimizer.accumulation == 0,
            f"data.batch_size must be a multiple of optimizer.accumulation = {optimizer.accumulation}, "
            f"got {data.batch_size}",
        )
        require(
            0 <= data.passkey_share <= 0.05,
            f"data.passkey_share must lie in 0 … 0.05, got {data.passkey_share}; more would train the test",
        )
        require(
            0 <= data.retrieval_share <= 0.2 and not (data.retrieval_share and data.passkey_share),
            f"data.retrieval_share must lie in 0 … 0.2, without passkey_share, got {data.retrieval_share}; "
            "its rows hold passkeys too",
        )
        require_choice("run.precision", run.precision, ("auto", "bf16", "fp32"))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """From nested mappings; an unknown key is refused with the nearest valid one."""
        return parse_section(cls, values, "")

    @classmethod
    def load(cls, path: str | Path) -> "TrainConfig":
        """From a TOML file."""
        return cls.parse(read_toml(Path(path), "config"))


def read_toml(path: Path, argument: str) -> dict[str, Any]:
    """The values of a TOML file the user named."""
    require(path.is_file(), f"{argument} must be a TOML file, got {str(path)!r}, which does not exist; check the path")
    try:
        return tomllib.loads(path.read_text())
    except ValueError as error:  # also what is not UTF-8
        raise ValueError(f"{argument} {str(path)!r} is not valid TOML: {error}; correct it") from error


def parse_section(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
    """A dataclass from a mapping, its sections from mappings within; unknown keys and wrong kinds are refused."""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise unknown(f"configuration key {prefix}{key}", key, known)
        factory = known[key].default_factory
        if is_dataclass(factory):
            require(isinstance(value, Mapping), f"{prefix}{key} must be a table, got {value!r}")
            made[key] = parse_section(factory, value, f"{prefix}{key}.")
        else:
            made[key] = _coerce(f"{prefix}{key}", value, known[key])
    return cls(**made)


def _coerce(name: str, value: Any, known: Any) -> Any:
    """Refuse a value of another kind than the field's, outside or inside; whole numbers may stand for decimals."""
    default = known.default_factory() if callable(known.default_factory) else known.default
    if known.name == "attention" and isinstance(value, str | list):
        return value
    if isinstance(default, tuple) and isinstance(value, list):
        value = tuple(value)
    if not isinstance(default, tuple | list | dict):
        return _plain(name, value, type(default))
    require(type(value) is type(default), f"{name} must be {type(default).__name__}, got {value!r}")
    of = [kind for kind in get_args(known.type) if kind is not Ellipsis]  # dict[str, float]: keys of TOML are texts
    if not of or of[-1] not in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {key: _plain(f"{name}.{key}", one, of[-1]) for key, one in value.items()}
    return type(value)(_plain(f"{name}[{i}]", one, of[-1]) for i, one in enumerate(value))


def _plain(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    require(type(value) is kind, f"{name} must be {kind.__name__}, got {value!r}")
    return value
