"""A recipe: stages of fine-tuning as data, from TOML."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from farspan.errors import require, require_choice
from farspan.finetune.objectives import NEXT_TOKEN, check_objective
from farspan.ops.masking import LIMIT
from farspan.training.config import Count, Length, OptimizerSection, PasskeyShare, RetrievalShare, Weight, check_pieces
from farspan.utils import parse, read_settings

RECIPES = files("farspan").joinpath("recipes")
NAMES = tuple(sorted(file.name.removesuffix(".toml") for file in RECIPES.iterdir()))
"""The recipes that come with the package."""
FEWEST_STEPS = 500
"""Steps that a smaller budget leaves each stage while its batches can still be halved."""


@dataclass(frozen=True)
class StageScaling:
    """``rope_parameters``: position interpolation, whose factor follows from the lengths, or dynamic NTK."""

    rope_type: Literal["linear", "dynamic"]
    factor: Annotated[float, Field(ge=1, lt=1e6)] | None = None

    def __post_init__(self) -> None:
        require(
            (self.factor is None) == (self.rope_type == "linear"),
            f"rope_parameters must have a factor for 'dynamic', such as 4.0, and none for 'linear', got {self.factor} "
            f"for {self.rope_type!r}",
        )


@dataclass(frozen=True)
class Stage:
    """One stage: what moves, what it lowers, on rows of which length, and for how long."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = ""
    """Names the stage's folder."""
    train: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Parameters that move, by shell patterns of their names, such as ``*.self_attn.t_*``; the others are frozen."""
    objective: Annotated[dict[str, Weight], Field(min_length=1)] = field(default_factory=lambda: {NEXT_TOKEN: 1.0})
    """Objective → weight; see :mod:`farspan.finetune.objectives`."""
    length: Length = 2048
    batch_size: Count = 256
    reach: Count = 1
    """Positions go up to so many times `length` (:func:`farspan.training.pretraining.skipped_positions`)."""
    passkey_share: PasskeyShare = 0.0
    retrieval_share: RetrievalShare = 0.0
    """Share of rows that show retrieval tasks with answers (:mod:`farspan.data.retrieval`), passkeys among them."""
    train_length: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """The model's training length from here on, which dynamic NTK measures against; 0 = as it is, or `length` times
    `reach` under linear scaling."""
    rope_parameters: StageScaling | None = None
    """Another scaling of the angles from here on; see :func:`farspan.finetune.run.lengthened`."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)

    def __post_init__(self) -> None:
        check_objective(self.objective, f"objective of stage {self.name}")
        require(
            not (self.passkey_share and self.retrieval_share),
            f"passkey_share of stage {self.name} must be 0 with retrieval_share, got {self.passkey_share}; its rows "
            "hold passkeys too",
        )
        halved = self.reach == 1 or self.length % 2 == 0
        require(
            self.reach.bit_count() == 1 and halved and self.length * self.reach <= LIMIT,
            f"reach of stage {self.name} must be a power of two, with rows of even length and positions up to {LIMIT}, "
            f"got {self.reach} times {self.length}; try 16",
        )
        check_pieces(self.batch_size, self.optimizer.accumulation, f"batch_size of stage {self.name}")

    @property
    def tokens(self) -> int:
        """Tokens the stage reads."""
        return self.optimizer.steps * self.batch_size * self.length

    @property
    def needs_teacher(self) -> bool:
        """Whether the stage has any objective but the next token."""
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

    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    description: str = ""
    log_length: bool = False
    """Whether `log_length` is switched on in the finished model, after all stages: it says what to do with more keys
    than rows have, and up to the training length it changes nothing."""

    @classmethod
    def load(cls, name: str | Path) -> "Recipe":
        """Read a shipped recipe by name, or a TOML file of one's own."""
        if Path(name).suffix == ".toml":
            return cls.parse(read_settings(name, "--recipe"))
        require_choice("--recipe", str(name), NAMES)
        with as_file(RECIPES.joinpath(f"{name}.toml")) as path:
            return cls.parse(read_settings(path, "--recipe"))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Recipe":
        """Make a recipe from nested mappings. Raise one line for the first wrong key or value."""
        recipe = parse(cls, values)
        names = [stage.name for stage in recipe.stages]
        require(all(names) and len(set(names)) == len(names), f"stages must have names of their own, got {names}")
        return recipe

    @property
    def tokens(self) -> int:
        """Tokens of all stages."""
        return sum(stage.tokens for stage in self.stages)

    def capped(self, length: int) -> "Recipe":
        """Limit rows and training lengths to so many tokens."""

        def cap(stage: Stage) -> Stage:
            return replace(stage, length=min(stage.length, length), train_length=min(stage.train_length, length))

        return replace(self, stages=tuple(map(cap, self.stages)))

    def scaled(self, tokens: int) -> "Recipe":
        """Give each stage its share of another budget: more steps, or smaller batches (halved until a stage has
        :data:`FEWEST_STEPS`, or a row is left) and then fewer steps. Small budgets are exceeded: rows stay complete.
        """

        def scale(stage: Stage) -> Stage:
            rows, batch = tokens / self.tokens * stage.tokens / stage.length, stage.batch_size
            while batch > 1 and rows / batch < min(stage.optimizer.steps, FEWEST_STEPS):
                batch = (batch + 1) // 2
            accumulation = math.gcd(stage.optimizer.accumulation, batch)
            optimizer = replace(stage.optimizer, steps=max(1, round(rows / batch)), accumulation=accumulation)
            return replace(stage, batch_size=batch, optimizer=optimizer)

        return replace(self, stages=tuple(map(scale, self.stages)))
