"""What a reproduction is made of: texts, models, tasks and measures, as TOML."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from farspan.configuration_farspan import PRESETS, FarspanConfig
from farspan.data.tokenizer import BYTES_VOCABULARY
from farspan.errors import require, require_choice
from farspan.evaluation.conditions import check_scaling
from farspan.finetune import Recipe, Stage
from farspan.layers import HYBRIDS, AttentionSpec
from farspan.tasks import TASKS, VARIANTS, Material, TaskSettings, attention_of, make_task
from farspan.training import TrainConfig
from farspan.utils import parse, read_settings

NAMES = ("cpu", "gpu", "hybrid-cpu", "hybrid", "cosformer-cpu", "cosformer-gpu", "dropin-cpu", "dropin")
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
        require(
            size >= BYTES_VOCABULARY,
            f"tokenizer must be a name, a folder or a size from {BYTES_VOCABULARY} on, got {size}; try 8192",
        )
        require(
            len(self.labelled) in (0, 3),
            f"labelled must name three files, for training, for choices and for the test, got {len(self.labelled)}; "
            "repeat --labelled",
        )


@dataclass(frozen=True)
class Training:
    """``[training]``: what all models that are trained from nothing share."""

    preset: str = "tiny"
    length: Least2 = 64
    batch_size: Count = 64
    steps: Count = 100
    peak_lr: float = 1e-4
    end_lr: float = 1e-5
    warmup_share: float = 0.01
    accumulation: Count = 1
    passkey_share: float = 0.0
    retrieval_share: float = 0.0
    compile: bool = False
    checkpoint_every: Natural = 0
    """Steps; 0 = a fifth of `steps`, but at least 50."""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("training.preset", self.preset, PRESETS)


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
        cases = len(self.long_cases) in (0, len(self.long))
        require(cases, f"evaluation.long_cases must have a number for each limit in long, got {self.long_cases}")
        longest = max(self.perplexity_lengths, default=0)
        require(
            longest <= self.text_tokens,
            f"evaluation.text_tokens must be at least the longest window {longest}, got {self.text_tokens}; raise it",
        )

    def cases_of(self, far: int) -> int:
        """Return the cases of prompts beyond so many limits."""
        return self.long_cases[far - 1] if far and self.long_cases else self.cases


@dataclass(frozen=True)
class Model:
    """``[models.NAME]``: trained from nothing, converted from the checkpoint, or fine-tuned from another model."""

    attention: str = ""
    """Empty = NAME."""
    start: str = ""
    """Empty = trained from nothing by ``[training]``; "checkpoint" = converted; else the model that is fine-tuned."""
    seeds: Count = 1
    length: Natural = 0
    """Rows, in place of ``training.length`` with as many tokens per step; of a recipe, at most so many tokens."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `FarspanConfig`, such as window, global_every, log_length or rope_parameters."""
    calibrate_tokens: Natural = 0
    """Of a conversion: tokens of the training text that new layers are fitted on; 0 = copied weights."""
    calibrate_steps: Natural = 100
    window: Natural = 0
    """Of a conversion: the keys that each layer sees; 0 = as the checkpoint has it."""
    global_every: Natural = 0
    """Of a conversion: make every so manieth layer global and position-free; 0 = none."""
    recipe: str = ""
    tokens: Natural = 0
    """Budget of all stages of the recipe together; 0 = the recipe's."""
    scalings: list[str] = field(default_factory=list)
    """In place of ``evaluation.scalings``."""
    measures: str = ""
    """Name of ``[measures.NAME]``; empty = ``[evaluation]``."""
    middle: str = ""
    """The same for the models of all stages but the last; empty = they are not measured."""


@dataclass(frozen=True)
class Member:
    """A model of the plan: a model of the preset, or what a stage of its recipe leaves."""

    name: str
    model: Model
    stages: tuple[Stage, ...] = ()
    before: str = ""
    """The member that its last stage begins with."""
    measures: Evaluation | None = None
    runs: tuple[str, ...] = ()
    """Names that choose it: its own, and those of the runs that share it."""
    ends: bool = True
    """Whether a run ends with it."""


@dataclass(frozen=True)
class Preset:
    """A complete reproduction.

    >>> Preset.load("cpu").training.length, list(Preset.load("cosformer-cpu").tasks)[:2]
    (64, ['listops', 'lm'])
    >>> [name for name in Preset.load("dropin").members if "-" not in name]
    ['original', 'calibrated', 'copied']
    """

    variants: list[str] = field(default_factory=list)
    """Models that are trained from nothing, in this order, with nothing to say but their attention."""
    seeds: dict[str, Count] = field(default_factory=dict)
    """Seeds of a variant, where more than one."""
    corpus: Corpus = field(default_factory=Corpus)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    models: dict[str, Model] = field(default_factory=dict)
    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``[measures.NAME]``: ``[evaluation]`` with other values, for the models that name it."""
    tasks: dict[str, TaskSettings] = field(default_factory=dict)
    """``[tasks.NAME]``: models from nothing are trained and tested for these, and not by ``[training]``."""
    speed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``[speed.cosformer]``, ``[speed.layer]`` and ``[speed.decode]``: arguments of these benchmarks, which run only
    with ``--only speed``: nothing else should be on the device."""

    def __post_init__(self) -> None:
        require(bool(self.members), "variants must name at least one attention, got none; try ['rope', 'coca-exact']")
        for name in [*self.models, *self.variants]:
            good = bool(name) and name != CHECKPOINT and all(c.isalnum() or c in "-_" for c in name)
            require(good, f"names of models must be letters, digits, - and _, got {name!r}; they name folders")
        for name in self.seeds:
            require_choice("seeds", name, self.variants)
        for name in self.tasks:
            require_choice("tasks", name, TASKS)
        for name in self.speed:
            require_choice("speed", name, ("cosformer", "layer", "decode"))
        scratch = [name for name, member in self.members.items() if not member.model.start]
        for name in scratch:
            self.train_config(name, 0, {"tokens": 1.0})
        for name, member in self.members.items():
            model = member.model
            require(
                model.window > 0 or model.global_every == 0,
                f"global_every of {name} needs window, got {model.global_every} without; add for example window = 512",
            )
            require(
                self.converts or member.measures is None or member.measures.window == 0,
                "evaluation.window is for a preset that converts, such as dropin; leave it out",
            )
            if model.start == CHECKPOINT:
                attention = self.attention(name)
                if attention not in HYBRIDS:
                    AttentionSpec.parse(attention)  # raises for an unknown name
        for task, settings in self.tasks.items():
            require(not self.models, f"models must be left out beside tasks, got {list(self.models)}; name variants")
            make_task(task, settings, Material(Path(), {"tokens": 1.0}, lambda: [])).check(scratch)
        require(
            bool(self.tasks) or not self.corpus.labelled,
            "labelled texts are for a preset with tasks, such as cosformer-cpu, got "
            f"{self.corpus.labelled}; leave them out",
        )
        for option, value in (("checkpoint", self.corpus.checkpoint), ("pairs", self.corpus.pairs)):
            require(
                self.converts or not value,
                f"--{option} is for a preset that converts, such as dropin, got {value!r}; leave it out",
            )
        require(
            not self.converts or self.corpus.tokenizer == "bytes",
            f"--tokenizer must be left out where a checkpoint brings its own, got {self.corpus.tokenizer!r}",
        )

    @property
    def converts(self) -> bool:
        """Whether a checkpoint is converted."""
        return any(member.model.start == CHECKPOINT for member in self.members.values())

    def attention(self, name: str) -> Any:
        """Return what :class:`farspan.FarspanConfig` calls a model's attention."""
        attention = self.members[name].model.attention or name
        return attention_of(attention) if attention in VARIANTS else attention

    def train_config(self, name: str, seed: int, sources: dict[str, float]) -> TrainConfig:
        """Return the training of a model from nothing."""
        training, model = self.training, self.members[name].model
        length, options = model.length or training.length, {**training.options, **model.options}
        rows = training.batch_size * training.length / length
        require(
            rows.is_integer() and rows >= 1,
            f"models.{name}.length must divide the {training.batch_size} × {training.length} tokens of a step, "
            f"got {length}; choose another",
        )
        attention = self.attention(name)
        layers = FarspanConfig.preset(training.preset, attention=attention, **options).num_hidden_layers
        named = attention if isinstance(attention, str) else [attention] * layers

        def some(*names: str) -> dict[str, Any]:
            return {name: getattr(training, name) for name in names}

        sizes = {"sources": sources, "length": length, "batch_size": int(rows)}
        every = training.checkpoint_every or max(50, training.steps // 5)
        return TrainConfig.parse(
            {
                "model": {"preset": training.preset, "attention": named, "options": options},
                "data": {**sizes, **some("passkey_share", "retrieval_share")},
                "optimizer": some("steps", "peak_lr", "end_lr", "warmup_share", "accumulation"),
                "run": {"seed": seed, "checkpoint_every": every, **some("compile")},
            }
        )

    def measured(self, name: str, scalings: list[str]) -> Evaluation:
        """Return ``[measures.NAME]`` for a model with these scalings, if it has any of its own."""
        require_choice("measures", name, ("", *self.measures))
        values = {**asdict(self.evaluation), **self.measures.get(name, {})}
        return parse(Evaluation, {**values, **({"scalings": scalings} if scalings else {})}, f"measures.{name}.")

    @cached_property
    def members(self) -> dict[str, Member]:
        """Every model by its name: first those that no recipe makes, then what each stage of a recipe leaves."""
        models = {name: Model(seeds=self.seeds.get(name, 1)) for name in self.variants} | self.models
        found: dict[tuple[str, str], Member] = {
            (name, ""): Member(name, one, (), "", self.measured(one.measures, one.scalings), (name,))
            for name, one in models.items()
            if one.start in ("", CHECKPOINT)
        }
        for run, model in models.items():
            if model.start not in ("", CHECKPOINT):
                require_choice(f"models.{run}.start", model.start, [key[0] for key in found if not key[1]])
                self._add_stages(found, run, model)
        names = [member.name for member in found.values()]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"models must have names of their own, got {twice} twice; rename one")
        return {member.name: member for member in found.values()}

    def _add_stages(self, found: dict[tuple[str, str], Member], run: str, model: Model) -> None:
        """Add what each stage leaves, once: runs with the same start and the same stages so far share a model."""
        recipe = Recipe.load(model.recipe or "paper")
        recipe = recipe.capped(model.length) if model.length else recipe
        recipe = recipe.scaled(model.tokens) if model.tokens else recipe
        before = model.start
        for number, stage in enumerate(recipe.stages, 1):
            last, stages = number == len(recipe.stages), recipe.stages[:number]
            group = model.measures if last else model.middle
            measures = self.measured(group, model.scalings) if group else None
            made = Member(f"{run}-{number}-{stage.name}", model, stages, before, measures, (run,), last)
            known = found.setdefault((model.start, repr(stages)), made)
            if known is not made:  # the end of one run may be a middle of another
                own = made if measures is not None and (last or known.measures is None) else known
                known = replace(known, measures=own.measures, ends=known.ends or last, runs=tuple({*known.runs, run}))
            found[model.start, repr(stages)] = replace(known, runs=tuple(dict.fromkeys((known.name, *known.runs))))
            before = known.name

    @classmethod
    def load(cls, name: str | Path) -> "Preset":
        """Load a shipped preset by its name, or a TOML file."""
        if Path(name).suffix == ".toml":
            return cls.parse(read_settings(name, "preset"))
        require_choice("preset", str(name), NAMES)
        return cls.parse(tomllib.loads(files("farspan").joinpath("presets", f"{name}.toml").read_text()))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Preset":
        """Make a preset from nested mappings."""
        return parse(cls, values)
