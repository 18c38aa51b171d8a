"""What a reproduction is made of: texts, models, tasks and measures, as TOML."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from farspan.checkpoints.replace import Target
from farspan.configuration_farspan import FarspanConfig
from farspan.data.retrieval import TASKS as RETRIEVAL
from farspan.data.tokenizer import BYTES_VOCABULARY, LARGEST
from farspan.errors import require, require_choice
from farspan.evaluation.conditions import check_scaling
from farspan.finetune import Recipe
from farspan.tasks import TASKS, VARIANTS, Material, TaskSettings, attention_of, make_task
from farspan.training import TrainConfig
from farspan.utils import parse, read_settings

PRESETS = files("farspan").joinpath("presets")
NAMES = tuple(sorted(file.name.removesuffix(".toml") for file in PRESETS.iterdir()))
"""The presets that come with the package."""
CHECKPOINT = "checkpoint"
Count = Annotated[int, Field(ge=1)]
Least2 = Annotated[int, Field(ge=2)]
Natural = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Corpus:
    """``[corpus]``: what is read."""

    train: dict[str, Annotated[float, Field(gt=0)]] = field(default_factory=lambda: {"stdlib": 1.0})
    """Source → weight; several sources become one mixture (the paper: 75% text, 25% code)."""
    held_out: list[str] = field(default_factory=list)
    """Text for perplexity; empty = the documents kept back from `train`."""
    tokenizer: str = "bytes"
    """A name or folder, or the size of a BPE to train on the training text. A checkpoint brings its own."""
    labelled: list[str] = field(default_factory=list)
    """Files of labelled texts for training, for choices and for the test; without them their tasks are left out."""
    checkpoint: str = ""
    """What is converted: a folder or GGUF file."""
    pairs: list[str] = field(default_factory=list)
    """Minimal pairs, which measure grammar."""

    def __post_init__(self) -> None:
        require(bool(self.train), "corpus.train must name at least one source, got none; try { stdlib = 1.0 }")
        size = int(self.tokenizer) if self.tokenizer.isdigit() else BYTES_VOCABULARY
        need = f"tokenizer must be a name, a folder or a size of {BYTES_VOCABULARY} … {LARGEST}, got {size}; try 8192"
        require(BYTES_VOCABULARY <= size <= LARGEST, need)
        require(
            len(self.labelled) in (0, 3),
            f"labelled must name three files, for training, for choices and for the test, got {len(self.labelled)}; "
            "repeat --labelled",
        )


@dataclass(frozen=True)
class Evaluation:
    """``[evaluation]``: what is measured of a model. No lengths, tasks or tokens leave a measure out."""

    scalings: list[str] = field(default_factory=lambda: ["none", "dynamic_ntk-4"])
    perplexity_lengths: list[Least2] = field(default_factory=list)
    stride: Count = 512
    inside: Natural = 0
    """Up to this length dynamic NTK and "none+log" change nothing, and are not measured; 0 = measure everywhere."""
    long: list[Count] = field(default_factory=list)
    """Limits: windows and prompts beyond each are steps of their own, the last of all."""
    long_stride: Count = 4096
    """Beyond the first limit."""
    long_cases: list[Count] = field(default_factory=list)
    """Cases beyond each limit; without them `cases`."""
    texts: Count = 20
    text_tokens: Least2 = 32_768
    position_tokens: Natural = 0
    """Loss by position up to so many tokens."""
    passkey_lengths: list[Least2] = field(default_factory=list)
    cases: Count = 100
    new_tokens: Count = 16
    retrieval_tasks: list[str] = field(default_factory=list)
    retrieval_lengths: list[Least2] = field(default_factory=list)
    window: Natural = 0
    """Measure bits per byte, minimal pairs, and the cache, with windows of so many tokens; 0 = none of them."""
    text_bytes: Count = 100_000
    """Of each held-out document, for bits per byte."""
    pairs: Natural = 0
    """At most so many minimal pairs of a file; 0 = all."""
    tokens_at_once: Count = 2**16

    def __post_init__(self) -> None:
        for name in self.scalings:
            check_scaling(name, "evaluation.scalings")
        for name in self.retrieval_tasks:
            require_choice("evaluation.retrieval_tasks", name, RETRIEVAL)
        require(self.window != 1, "evaluation.window must be 0 or at least 2, got 1; one token predicts nothing")
        cases = len(self.long_cases) in (0, len(self.long))
        require(cases, f"evaluation.long_cases must have a number for each limit in long, got {self.long_cases}")
        longest = max(self.perplexity_lengths, default=0)
        need = f"evaluation.text_tokens must be at least the longest window {longest}, got {self.text_tokens}; raise it"
        require(longest <= self.text_tokens, need)


@dataclass(frozen=True)
class Model:
    """``[models.NAME]``: trained from nothing, converted from the checkpoint, or fine-tuned from another model."""

    attention: str = ""
    """Empty = NAME."""
    start: str = ""
    """Empty = trained from nothing; "checkpoint" = converted; else the model that is fine-tuned, each of its seeds."""
    seeds: Natural = 0
    """Of a model from nothing; 0 = one. Of a fine-tuned one; 0 = those of the model it starts from."""
    tasks: list[str] | None = None
    """Of a model from nothing: the tasks that it is trained for, by default all; without any, by ``[training]``."""
    length: Natural = 0
    """Rows, in place of ``training.data.length`` with as many tokens per step; of a recipe, at most so many tokens."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of a model from nothing: fields of `FarspanConfig`, such as window, log_length or rope_parameters."""
    calibrate_tokens: Natural = 0
    """Of a conversion: tokens of the training text that new layers are fitted on; 0 = copied weights."""
    calibrate_steps: Natural = 100
    window: Natural = 0
    """Of a conversion to a hybrid: the keys of a window; 0 = the default of `farspan convert`."""
    global_every: Natural = 0
    """Likewise: one layer in so many becomes global and position-free."""
    global_layers: list[int] | Literal["", "auto"] = ""
    """Which ones; "auto" = those whose attention reaches furthest, empty = the last of each `global_every`."""
    recipe: str = "paper"
    """Of fine-tuning."""
    tokens: Natural = 0
    """Budget of all stages of the recipe together; 0 = the recipe's."""
    scalings: list[str] = field(default_factory=list)
    """In place of ``evaluation.scalings``."""
    measures: str = ""
    """Name of ``[measures.NAME]``; empty = ``[evaluation]``."""


@dataclass(frozen=True)
class Preset:
    """A complete reproduction.

    >>> Preset.load("cpu").base_config.data.length, list(Preset.load("cosformer-cpu").tasks)[:2]
    (64, ['listops', 'lm'])
    """

    corpus: Corpus = field(default_factory=Corpus)
    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the models trained from nothing share: settings of `farspan train`, without sources and attention."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    models: dict[str, Model] = field(default_factory=dict)
    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``[measures.NAME]``: ``[evaluation]`` with other values, for the models that name it."""
    tasks: dict[str, TaskSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.models), "models must name at least one model, got none; try [models.rope]")
        for name in self.tasks:
            require_choice("tasks", name, TASKS)
        before = ["", CHECKPOINT]
        for name, model in self.models.items():
            good = name != CHECKPOINT and re.fullmatch(r"[\w-]+", name) is not None
            require(good, f"names of models must be letters, digits, - and _, got {name!r}; they name folders")
            require_choice(f"models.{name}.start", model.start, before, "it must come before, and not be for tasks")
            before += [] if self.tasks_of(name) else [name]
            self._check_model(name, model)
        labelled, corpus = any(TASKS[task].needs_labelled for task in self.tasks), self.corpus
        for option, value, needed, such in (
            ("labelled", corpus.labelled, labelled, "has tasks, such as cosformer-cpu"),
            ("checkpoint", corpus.checkpoint, self.converts, "converts, such as dropin"),
            ("pairs", corpus.pairs, self.converts, "converts, such as dropin"),
        ):
            require(needed or not value, f"--{option} is for a preset that {such}, got {value!r}; leave it out")
        require(
            not self.converts or corpus.tokenizer == "bytes",
            f"--tokenizer must be left out where a checkpoint brings its own, got {corpus.tokenizer!r}",
        )

    def _check_model(self, name: str, model: Model) -> None:
        measured, most = self.measured(name), self.seeds(model.start) if model.start else model.seeds
        need = f"models.{name}.seeds must be at most {most}, as {model.start!r} has them, got {model.seeds}"
        require(model.seeds <= most, need)
        need = "evaluation.window is for a preset that converts, such as dropin; leave it out"
        require(self.converts or measured.window == 0, need)
        if model.start == CHECKPOINT:
            self.target(name)  # raises for an unknown name, and for options that exclude each other
        elif model.start:
            distils = any(stage.needs_teacher for stage in self.recipe(name).stages)
            need = f"recipe of {name} must not distil where no checkpoint is converted, got {model.recipe!r}; try paper"
            require(self.converts or not distils, need)
        elif not self.tasks_of(name):
            self.train_config(name, 0, {"tokens": 1.0})
        for task in self.tasks_of(name):
            require_choice(f"models.{name}.tasks", task, self.tasks)
            attention, settings = self.task_settings(name, task)
            make_task(task, settings, Material(Path(), {"tokens": 1.0}, lambda: [])).check([attention])

    @property
    def converts(self) -> bool:
        """Whether a checkpoint is converted."""
        return any(model.start == CHECKPOINT for model in self.models.values())

    def tasks_of(self, name: str) -> list[str]:
        """Return the tasks that a model is trained for."""
        model = self.models[name]
        return [] if model.start else list(self.tasks) if model.tasks is None else model.tasks

    def seeds(self, name: str) -> int:
        """Return the number of seeds of a model; what is made from a checkpoint has one."""
        model = self.models.get(name, Model())
        return model.seeds or (self.seeds(model.start) if model.start else 1)

    def origin(self, name: str) -> str:
        """Return the model that was trained from nothing or converted, and from which this one was fine-tuned."""
        while self.models[name].start not in ("", CHECKPOINT):
            name = self.models[name].start
        return name

    def attention(self, name: str) -> Any:
        """Return what :class:`farspan.FarspanConfig` calls a model's attention."""
        attention = self.models[self.origin(name)].attention or self.origin(name)
        return attention_of(attention) if attention in VARIANTS else attention

    def target(self, name: str) -> Target:
        """Return what a conversion makes of the checkpoint."""
        model = self.models[name]
        layout = model.window or None, model.global_every or None, model.global_layers or None
        return Target(model.attention or name, *layout)

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of a fine-tuned model."""
        model = self.models[name]
        recipe = Recipe.load(model.recipe)
        recipe = recipe.capped(model.length) if model.length else recipe
        return recipe.scaled(model.tokens) if model.tokens else recipe

    def task_settings(self, name: str, task: str) -> tuple[str, TaskSettings]:
        """Return the attention and the settings of a model that is trained for a task."""
        model, settings = self.models[name], self.tasks[task]
        return model.attention or name, replace(settings, options={**settings.options, **model.options})

    @cached_property
    def base_config(self) -> TrainConfig:
        """``[training]`` as `farspan train` takes it."""
        data = {"sources": {"tokens": 1.0}, **self.training.get("data", {})}
        return parse(TrainConfig, {**self.training, "data": data}, "training.")

    def train_config(self, name: str, seed: int, sources: dict[str, float]) -> TrainConfig:
        """Return the training of a model from nothing."""
        base, model, attention = self.base_config, self.models[name], self.attention(name)
        length, options = model.length or base.data.length, {**base.model.options, **model.options}
        rows, rest = divmod(base.data.batch_size * base.data.length, length)
        require(
            rows >= 1 and rest == 0,
            f"models.{name}.length must divide the {base.data.batch_size} × {base.data.length} tokens of a step, "
            f"got {length}; choose another",
        )
        need = f"models.{name}.options must not hold attention, which has a key of its own"
        require("attention" not in options, need)
        config = FarspanConfig.preset(base.model.preset, attention=attention, **options)
        named = attention if isinstance(attention, str) else [attention] * config.num_hidden_layers
        return replace(
            base,
            model=replace(base.model, attention=named, options=options),
            data=replace(base.data, sources=sources, length=length, batch_size=rows),
            run=replace(base.run, seed=seed),
        )

    def measured(self, name: str) -> Evaluation:
        """Return what is measured of a model."""
        model = self.models[name]
        if model.measures:
            where, got = f"models.{name}.measures", f"got {model.measures!r}"
            require(bool(self.measures), f"{where} must be left out without [measures.NAME], {got}; add that table")
            require_choice(where, model.measures, self.measures)
        for scaling in model.scalings:
            check_scaling(scaling, f"models.{name}.scalings")
        values = {**asdict(self.evaluation), **self.measures.get(model.measures, {})}
        values |= {"scalings": model.scalings} if model.scalings else {}
        return parse(Evaluation, values, f"measures.{model.measures}.")

    @classmethod
    def load(cls, name: str | Path) -> "Preset":
        """Load a shipped preset by its name, or a TOML file."""
        return cls.parse(read_settings(name, "preset") if Path(name).suffix == ".toml" else _shipped(str(name)))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Preset":
        """Make a preset from nested mappings."""
        return parse(cls, _with_base(values))


def _shipped(name: str) -> dict[str, Any]:
    require_choice("preset", name, NAMES)
    return tomllib.loads(PRESETS.joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def _with_base(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put a preset over the shipped one that its ``base`` names, key by key.

    ``[models]`` names all models: of the base's, only those that it names remain.
    """
    own = dict(values)
    if "base" not in own:
        return own
    base = _with_base(_shipped(str(own.pop("base"))))
    models = base.pop("models")
    kept = own.get("models", models)
    require(isinstance(kept, Mapping), f"models must be tables [models.NAME], got {kept!r}")
    return {**_over(base, own), "models": {name: _over(models.get(name), one) for name, one in kept.items()}}


def _over(base: Any, own: Any) -> Any:
    """Put a table over another; any other value takes the place of what was there."""
    if not (isinstance(base, Mapping) and isinstance(own, Mapping)):
        return own
    return {**base, **{key: _over(base.get(key), value) for key, value in own.items()}}
