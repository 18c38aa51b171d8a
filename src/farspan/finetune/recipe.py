"""A recipe: stages of fine-tuning as data, from TOML."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from farspan.errors import require, require_choice, unknown
from farspan.finetune.objectives import NEXT_TOKEN, OBJECTIVES
from farspan.training.config import OptimizerSection, parse_section, read_toml
from farspan.training.skipping import check_reach

NAMES = (
    "paper",
    "distill",
    "distill-long",
    "distill-skip",
    "distill-long-skip",
    "distill-local-long",
    "long-ntk",
    "long-skip",
    "long-pi",
    "long-yarn",
)
"""The recipes that come with the package."""
FEWEST_STEPS = 500
"""A budget below a recipe's own first takes rows from a step, and steps only when no more than these are left."""


@dataclass(frozen=True)
class Lora:
    """``lora``: train low-rank additions (PEFT) and merge them at the end of the stage; r = 0 trains the weights."""

    r: int = 0
    alpha: int = 16
    target_modules: tuple[str, ...] = ()
    """Names of linear layers; empty = all of them but the head."""


ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "mode"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""What each law takes beside its rope_type and rope_theta."""


def _check_rope(stage: str, rope: Mapping[str, Any]) -> None:
    """Refuse keys and values that would be left unread, or fail when the stage begins."""
    where = f"rope_parameters of stage {stage}"
    kind = rope.get("rope_type")
    require(kind is not None, f"{where} must have a rope_type, got {dict(rope)}; choose from {', '.join(ROPE_KEYS)}")
    require_choice(f"rope_type of stage {stage}", kind, ROPE_KEYS)
    for key, value in rope.items():
        require_choice(f"{where}: key", key, ("rope_type", "rope_theta", *ROPE_KEYS[str(kind)]))
        if key == "mode":
            require_choice(f"{where}: mode", value, ("per_query", "per_request"))
        elif key == "truncate":
            require(isinstance(value, bool), f"{where}: truncate must be true or false, got {value!r}")
        elif key != "rope_type":
            good = type(value) in (int, float) and 0 < value < math.inf
            require(good, f"{where}: {key} must be a number above 0, got {value!r}")
    follows = "factor" in rope or kind in ("default", "linear", "yarn")
    require(follows, f"{where} must have a factor for {kind!r}, got {dict(rope)}; try factor = 4.0")


@dataclass(frozen=True)
class Stage:
    """One stage: what moves, what it lowers, on rows of which length, and for how long."""

    name: str = ""
    train: tuple[str, ...] = ("*",)
    """Parameters that move, by shell patterns of their names, such as ``*.self_attn.t_*``; the others are frozen."""
    objective: dict[str, float] = field(default_factory=lambda: {NEXT_TOKEN: 1.0})
    """Objective → weight; see :data:`farspan.finetune.objectives.OBJECTIVES`."""
    length: int = 2048
    batch_size: int = 256
    reach: int = 1
    """Positions go up to so many times `length` (:mod:`farspan.training.skipping`); 1 = they count on."""
    passkey_share: float = 0.0
    train_length: int = 0
    """What the model's training length is from here on, which dynamic NTK and YaRN measure against; 0 = as it is, or
    `length` times `reach` where a linear law takes its factor from the lengths."""
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    """Another law for the angles from here on, as in transformers. A missing factor of linear and yarn is the one that
    takes the training length to `length` times `reach`: the one before the model's own law, if that is of the same
    kind. Where it is of another kind, these are refused."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lora: Lora = field(default_factory=Lora)

    def __post_init__(self) -> None:
        name = self.name
        require(
            bool(name) and all(c.isalnum() or c in "-_" for c in name),
            f"stages.name must be letters, digits, - and _, got {name!r}; it names the stage's folder",
        )
        for objective, weight in self.objective.items():
            if objective not in OBJECTIVES:
                raise unknown(f"objective of stage {name}", objective, OBJECTIVES)
            require(
                type(weight) in (int, float) and 0 < weight < math.inf,
                f"objective {objective} of stage {name} must have a weight > 0, got {weight!r}; leave it out instead",
            )
        require(
            self.needs_teacher or self.objective.get(NEXT_TOKEN, 1) == 1,
            f"objective next-token of stage {name} must have weight 1 where it stands alone, got "
            f"{self.objective.get(NEXT_TOKEN)}; change optimizer.peak_lr instead",
        )
        if self.rope_parameters:
            _check_rope(name, self.rope_parameters)
        require(bool(self.objective), f"objective of stage {name} is empty; choose from {', '.join(OBJECTIVES)}")
        require(bool(self.train), f"train of stage {name} is empty; ['*'] trains everything")
        for key, least in (("length", 2), ("batch_size", 1), ("train_length", 0)):
            value = getattr(self, key)
            require(value >= least, f"{key} of stage {name} must be at least {least}, got {value}")
        check_reach(self.reach, self.length, f"stage {name}")
        optimizer, lora = self.optimizer, self.lora
        require(optimizer.steps >= 1, f"optimizer.steps of stage {name} must be at least 1, got {optimizer.steps}")
        require(
            optimizer.accumulation >= 1 and self.batch_size % optimizer.accumulation == 0,
            f"batch_size of stage {name} must be a multiple of optimizer.accumulation = {optimizer.accumulation}, "
            f"got {self.batch_size}",
        )
        require(
            0 <= self.passkey_share <= 0.05,
            f"passkey_share of stage {name} must lie in 0 … 0.05, got {self.passkey_share}; more would train the test",
        )
        require(
            lora.r == 0 or self.train == ("*",),
            f"train of stage {name} must be left out where lora.r > 0, got {list(self.train)}; "
            "lora.target_modules says what moves",
        )
        require(lora.r >= 0 and lora.alpha > 0, f"lora of stage {name} must have r ≥ 0 and alpha > 0, got {lora}")

    @property
    def tokens(self) -> int:
        """Tokens the stage reads."""
        return self.optimizer.steps * self.batch_size * self.length

    @property
    def needs_teacher(self) -> bool:
        """Whether anything but the next token is asked for."""
        return set(self.objective) != {NEXT_TOKEN}


@dataclass(frozen=True)
class Recipe:
    """Stages, one after the other.

    >>> recipe = Recipe.load("paper")
    >>> [stage.name for stage in recipe.stages], f"{recipe.tokens / 1e9:.1f}B tokens"
    (['t', 'qkv', 'all'], '23.6B tokens')
    >>> [(s.batch_size, s.optimizer.steps) for s in recipe.scaled(100_000_000).stages]
    [(32, 509), (32, 509), (32, 509)]
    """

    description: str
    stages: tuple[Stage, ...]
    log_length: bool = False
    """Whether `log_length` is switched on in the finished model, after all stages: it says what to do with more keys
    than rows have, and up to the training length it changes nothing."""

    @classmethod
    def load(cls, name: str | Path) -> "Recipe":
        """A shipped recipe by name, or a TOML file of one's own."""
        if Path(name).suffix == ".toml":
            return cls.parse(read_toml(Path(name), "--recipe"))
        require_choice("--recipe", str(name), NAMES)
        return cls.parse(tomllib.loads(files("farspan").joinpath("recipes", f"{name}.toml").read_text()))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Recipe":
        """From nested mappings; an unknown key is refused with the nearest valid one.

        ``after`` names a shipped recipe whose stages come first, and whose `log_length` holds unless another is given.
        """
        for key in values:
            require_choice("recipe key", key, [*(f.name for f in fields(cls)), "after"])
        first = values.get("after")
        if first is not None:
            require_choice("after of a recipe", str(first), NAMES)
        raw = values.get("stages", [])
        require(
            isinstance(raw, list) and bool(raw) and all(isinstance(one, Mapping) for one in raw),
            "recipe must have at least one [[stages]] table, got none; see the shipped recipes",
        )
        before = cls.load(first) if first is not None else cls("", ())
        stages = before.stages
        stages += tuple(parse_section(Stage, one, f"stages[{i}].") for i, one in enumerate(raw))
        names = [stage.name for stage in stages]
        require(len(set(names)) == len(names), f"stages must have names of their own, got {names}; rename one")
        log_length = values.get("log_length", before.log_length)
        require(isinstance(log_length, bool), f"log_length of a recipe must be true or false, got {log_length!r}")
        return cls(str(values.get("description", "")), stages, log_length)

    @property
    def tokens(self) -> int:
        """Tokens of all stages."""
        return sum(stage.tokens for stage in self.stages)

    def capped(self, length: int) -> "Recipe":
        """The same with rows, and training lengths, of at most so many tokens."""
        return replace(
            self,
            stages=tuple(
                replace(s, length=min(s.length, length), train_length=min(s.train_length, length)) for s in self.stages
            ),
        )

    def scaled(self, tokens: int) -> "Recipe":
        """The same shares of another budget: longer, or with smaller batches (halved until a stage has
        :data:`FEWEST_STEPS`, or a row is left) and then fewer steps. Rows stay whole, so small budgets are exceeded.
        """
        share = tokens / self.tokens
        return replace(self, stages=tuple(_scaled(stage, share) for stage in self.stages))


def _scaled(stage: Stage, share: float) -> Stage:
    wanted, batch = share * stage.tokens / stage.length, stage.batch_size
    fewest = min(stage.optimizer.steps, FEWEST_STEPS)
    while batch > 1 and wanted / batch < fewest:
        batch = (batch + 1) // 2
    optimizer = replace(
        stage.optimizer,
        steps=max(1, round(wanted / batch)),
        accumulation=math.gcd(stage.optimizer.accumulation, batch),
    )
    return replace(stage, batch_size=batch, optimizer=optimizer)
