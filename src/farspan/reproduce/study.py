"""A drop-in study as data: conversions of one checkpoint, recipes applied to them, and what is measured of each."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from farspan.errors import require, require_choice
from farspan.finetune import Recipe, Stage
from farspan.layers import AttentionSpec
from farspan.training.config import parse_section

T = TypeVar("T")


@dataclass(frozen=True)
class Conversion:
    """``[study.conversions.NAME]``: the checkpoint as it is ("rope"), or with another attention in its place."""

    attention: str = "coca-exact"
    calibrate_tokens: int = 0
    """Tokens of the training text that the new layers are fitted on; 0 = they start from copied weights."""
    calibrate_steps: int = 100
    window: int = 0
    """What each layer sees; 0 = as the checkpoint has it."""
    global_every: int = 0
    """Of so many layers the last one sees everything, without positions; 0 = none does."""
    measures: str = ""
    scalings: list[str] = field(default_factory=list)
    """In place of ``evaluation.scalings``."""

    def __post_init__(self) -> None:
        AttentionSpec.parse(self.attention)  # refuses an unknown one before anything is made
        _require_least(self, calibrate_tokens=0, calibrate_steps=0, window=0, global_every=0)
        require(
            self.window > 0 or self.global_every == 0,
            f"global_every of a study needs window, got {self.global_every} without; add for example window = 512",
        )


@dataclass(frozen=True)
class Tuning:
    """``[study.runs.NAME]``: a recipe applied to a conversion.

    Stages that are equal, from the first one on, to those of a run above are not trained again.
    """

    start: str = ""
    """Name of a conversion."""
    recipe: str = "paper"
    tokens: int = 0
    """Budget of all stages together; 0 = the recipe's."""
    length: int = 0
    """Rows of at most so many tokens; 0 = the recipe's."""
    measures: str = ""
    """Of the last stage's model."""
    middle: str = ""
    """Of the models of the stages before."""
    scalings: list[str] = field(default_factory=list)
    """In place of ``evaluation.scalings``."""

    def __post_init__(self) -> None:
        _require_least(self, tokens=0, length=0)


@dataclass(frozen=True)
class Measures:
    """``[study.measures.NAME]``: lengths; an empty list leaves that out."""

    near: list[int] = field(default_factory=list)
    """Windows inside the training length: dynamic NTK changes nothing there, and is not measured."""
    far: list[int] = field(default_factory=list)
    """Windows under every scaling."""
    passkey: list[int] = field(default_factory=list)
    """Prompts without scaling."""
    scaled_passkey: list[int] = field(default_factory=list)
    """Prompts under every other scaling."""
    near_stride: int = 512
    far_stride: int = 4096

    def __post_init__(self) -> None:
        _require_least(self, near_stride=1, far_stride=1)
        for length in (*self.near, *self.far, *self.passkey, *self.scaled_passkey):
            require(length >= 2, f"lengths in study.measures must be at least 2, got {length}; leave it out")
        both = sorted({*self.near} & {*self.far})
        require(not both, f"near and far of study.measures must not share a length, got {both}; keep it in one")


@dataclass(frozen=True)
class Member:
    """A model of the study: a conversion, or what the last of these stages leaves."""

    name: str
    start: str
    """Its conversion."""
    stages: tuple[Stage, ...] = ()
    before: str = ""
    """The model that its last stage begins with."""
    measures: str = ""
    scalings: tuple[str, ...] = ()
    """The laws it is measured under; none named = the evaluation's."""


@dataclass(frozen=True)
class Study:
    """``[study]``: CoCA dropped into a checkpoint (the paper's Sec. 3.2).

    >>> study = Study(
    ...     conversions={"copied": {}},
    ...     runs={"paper": {"start": "copied"}, "again": {"start": "copied", "middle": "light"}},
    ...     measures={"light": {}},
    ... )
    >>> list(study.members)  # "again" shares all its stages
    ['copied', 'paper-1-t', 'paper-2-qkv', 'paper-3-all']
    """

    compile: bool = False
    checkpoint_every: int = 500
    window: int = 2048
    """Tokens that bits a byte and the cache are measured with."""
    text_bytes: int = 100_000
    """Of each held-out document, for bits a byte."""
    pairs: int = 0
    """At most so many minimal pairs of a file; 0 = all."""
    conversions: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            bool(self.conversions) or not self.runs,
            f"study.runs need a conversion to start from, got none for {list(self.runs)}; add [study.conversions.NAME]",
        )
        _require_least(self, checkpoint_every=1, window=2, text_bytes=1, pairs=0)
        for name in self.measures:
            self.measured(name)
        for name in (*self.conversions, *self.runs):
            good = bool(name) and all(c.isalnum() or c in "-_" for c in name)
            require(good, f"names in study must be letters, digits, - and _, got {name!r}; they name folders")
        twice = [name for name, count in Counter(m.name for m in self._all()).items() if count > 1]
        require(
            not twice, f"models of a study must have names of their own, got {twice} twice; rename a conversion or run"
        )
        for member in self.members.values():
            require_choice(f"measures of {member.name}", member.measures, ("", *self.measures))
            self.measured(member.measures)

    def conversion(self, name: str) -> Conversion:
        """The settings of a conversion."""
        return _section(Conversion, self.conversions, "conversions", name)

    def run(self, name: str) -> Tuning:
        """The settings of a run."""
        made = _section(Tuning, self.runs, "runs", name)
        require_choice(f"study.runs.{name}.start", made.start, self.conversions)
        return made

    def measured(self, name: str) -> Measures:
        """What is measured under this name; nothing under the empty one."""
        return _section(Measures, self.measures, "measures", name) if name else Measures()

    def prompts(self, member: Member, scaling: str) -> list[int]:
        """The passkey lengths that a model is asked at under a scaling law."""
        measures = self.measured(member.measures)
        return measures.passkey if scaling == "none" else measures.scaled_passkey

    def recipe(self, name: str) -> Recipe:
        """The recipe of a run at its budget."""
        run = self.run(name)
        made = Recipe.load(run.recipe)
        made = made.capped(run.length) if run.length else made
        return made.scaled(run.tokens) if run.tokens else made

    def recipes_of(self, member: Member) -> list[Recipe]:
        """Of every run that a stage belongs to."""
        starting = [name for name in self.runs if self.run(name).start == member.start]
        recipes = [self.recipe(name) for name in starting]
        return [recipe for recipe in recipes if recipe.stages[: len(member.stages)] == member.stages]

    @cached_property
    def members(self) -> dict[str, Member]:
        """Every model by its name: conversions first, then each run's stages in order."""
        return {member.name: member for member in self._all()}

    def _all(self) -> list[Member]:
        made = {name: self.conversion(name) for name in self.conversions}
        starts = [Member(name, name, measures=one.measures, scalings=tuple(one.scalings)) for name, one in made.items()]
        return starts + self._tuned()

    def _tuned(self) -> list[Member]:
        """What stages leave, each once: two runs with the same start and the same stages so far share a model."""
        found: dict[tuple[str, str], Member] = {}
        for name in self.runs:
            run, stages = self.run(name), self.recipe(name).stages
            before = run.start
            for number, stage in enumerate(stages, 1):
                last = number == len(stages)
                made = Member(
                    f"{name}-{number}-{stage.name}",
                    run.start,
                    stages[:number],
                    before,
                    run.measures if last else run.middle,
                    tuple(run.scalings),
                )
                key = run.start, repr(made.stages)
                known = found.setdefault(key, made)
                if last or not known.measures:  # the end of one run may be a middle of another
                    kept = made if made.measures else known
                    found[key] = known = replace(known, measures=kept.measures, scalings=kept.scalings)
                before = known.name
        return list(found.values())

    def chosen(self, only: list[str] | None, *, ends: bool = False) -> tuple[list[Member], list[Member]]:
        """The models of these conversions and runs, what they end with first or alone, and, in the order they are
        made, all of them with what they come from."""
        known = [*self.conversions, *self.runs]
        for name in only or []:
            require(
                name in known, f"--only must name some of {', '.join(known)}, got {name!r}; separate them by commas"
            )
        wanted = set(only or known) & self.conversions.keys()
        last = set(wanted)
        for name in set(only or known) & self.runs.keys():
            run, stages = self.run(name), self.recipe(name).stages
            own = [m for m in self.members.values() if m.stages and m.start == run.start]
            wanted |= {m.name for m in own if stages[: len(m.stages)] == m.stages}
            last |= {m.name for m in own if stages == m.stages}
        made, members = set[str](), self.members
        for name in wanted:
            while name:
                made.add(name)
                name = members[name].before
        asked = sorted((m for m in members.values() if m.name in wanted), key=lambda m: m.name not in last)
        return asked[: len(last)] if ends else asked, [m for m in members.values() if m.name in made]


def _require_least(section: object, **least: int) -> None:
    for key, value in least.items():
        given = getattr(section, key)
        require(given >= value, f"{key} of a study must be at least {value}, got {given}; leave it out for its default")


def _section(kind: type[T], tables: Mapping[str, Any], what: str, name: str) -> T:
    require_choice(f"study.{what}", name, tables)
    values = tables[name]
    require(isinstance(values, Mapping), f"study.{what}.{name} must be a table, got {values!r}")
    return parse_section(kind, values, f"study.{what}.{name}.")
