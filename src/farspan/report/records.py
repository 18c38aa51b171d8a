"""What result files hold, as typed records."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, TypeVar, cast, get_args

from farspan.errors import require, require_choice

STATES = ("done", "failed", "pending", "busy")


@dataclass(frozen=True)
class Perplexity:
    """One model's perplexity at one window length."""

    variant: str
    seed: int
    scaling: str
    length: int
    stride: int
    mode: str
    nll: float
    tokens: int
    texts: int
    ppl: float


@dataclass(frozen=True)
class Share:
    """So many right out of so many."""

    cases: int
    correct: int


@dataclass(frozen=True)
class Passkey:
    """One model's passkey retrieval at one prompt length."""

    variant: str
    seed: int
    scaling: str
    length: int
    cases: int
    correct: int
    near: Share
    far: Share
    outcomes: tuple[tuple[int, bool], ...]
    """Distance of the key from the end in tokens, and whether it was found."""

    mode = "passkey"


@dataclass(frozen=True)
class Training:
    """How one model was trained."""

    variant: str
    seed: int
    parameters: int
    tokens: int
    steps: int
    length: int
    final_loss: float
    seconds: float
    tokens_per_second: float
    passkey_share: float
    mfu: float | None
    """None where the peak of the device is not known."""
    losses: tuple[tuple[int, float], ...]

    scaling, mode = "none", "training"


@dataclass(frozen=True)
class TaskResult:
    """How one variant was trained for a task, and what it got right on the task's test set."""

    task: str
    variant: str
    seed: int
    length: int
    parameters: int
    steps: int
    pretraining_steps: int
    seconds: float
    tokens_per_second: float | None
    """None where the model had been trained by an earlier call."""
    peak_bytes: int | None
    """The most GPU memory in use during training; None on a CPU."""
    cases: int | None
    correct: int | None
    """Of questions with one answer; None for perplexity."""
    ppl: float | None
    tokens: int | None
    losses: tuple[tuple[int, float], ...]

    scaling = "none"

    @property
    def mode(self) -> str:
        return self.task


@dataclass(frozen=True)
class StudyModel:
    """One model of a drop-in study, and what it and those before it took."""

    model: str
    attention: str
    stages: int
    tokens: int
    seconds: float | None
    train_length: int
    own_scaling: str
    passkey_share: float
    window: int | None = None
    """What its layers see, where the conversion has changed that; else None or 0."""

    @property
    def plain(self) -> bool:
        """Whether it is the original in all but its weights."""
        return self.attention == "rope" and not self.window


@dataclass(frozen=True)
class Bits:
    """How many bits a byte of held-out text costs a model."""

    variant: str
    scaling: str
    bits_per_byte: float
    length: int
    bytes: int
    texts: int

    @property
    def key(self) -> tuple[str, str, int]:
        """What was measured."""
        return (self.scaling, "bits a byte", self.length)


@dataclass(frozen=True)
class Pairs:
    """Minimal pairs that a model gets right: of all ("all"), of a field or of a set."""

    variant: str
    scaling: str
    kind: str
    set: str
    field: str
    cases: int
    correct: int

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What was measured."""
        return (self.scaling, "minimal pairs", self.kind, self.set, self.field)


@dataclass(frozen=True)
class CacheBytes:
    """What reading so many tokens leaves in a model's cache."""

    variant: str
    length: int
    bytes: int


@dataclass(frozen=True)
class Source:
    """Where a file's numbers come from."""

    file: str
    command: str
    commit: str | None
    device: str
    seed: int
    versions: tuple[tuple[str, str], ...]
    model: str | None = None
    """The fingerprint of the model that was measured, if the file has it."""


@dataclass(frozen=True)
class Step:
    """One step of a run, as `status.json` has it."""

    step: str
    state: str
    message: str


Measurement = TypeVar("Measurement", Perplexity, Passkey, Training, TaskResult)
StudyRecord = TypeVar("StudyRecord", StudyModel, Bits, Pairs, CacheBytes)
Plain = TypeVar("Plain")


def parse_measurement(kind: type[Measurement], raw: Any) -> Measurement:
    """A row of a result file; fields that the report does not use are left alone.

    >>> parse_measurement(Perplexity, {"variant": "rope"})
    Traceback (most recent call last):
    ...
    ValueError: seed must be given; a row has variant, seed, scaling, length, stride, mode, nll, tokens, texts, ppl
    """
    row = parse_plain(kind, raw)
    require(row.length >= 1, f"length must be at least 1, got {row.length}; write the row with `farspan`")
    return row


def parse_plain(kind: type[Plain], raw: Any) -> Plain:
    """A record from a JSON object, each field checked against its type."""
    require(isinstance(raw, Mapping), f"a record must be a JSON object, got {raw!r}; write it with `farspan`")
    known = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for name, wanted in known.items():
        require(name in raw or isinstance(wanted, UnionType), f"{name} must be given; a row has {', '.join(known)}")
        values[name] = _value(name, wanted, raw.get(name))
    made = kind(**values)
    if isinstance(made, TaskResult) and made.ppl is not None:
        return made
    if isinstance(made, Share | Passkey | TaskResult | Pairs):
        require(
            made.cases is not None and made.correct is not None and 0 <= made.correct <= made.cases,
            f"correct must lie in 0 … cases, got {made.correct} of {made.cases}; recount",
        )
    return made


def _value(name: str, wanted: Any, value: Any) -> Any:
    """The value of one field, or an error that names it."""
    if wanted is Share:
        return parse_plain(Share, value)
    if name == "outcomes":
        return tuple((outcome.distance, outcome.right) for outcome in _list(name, value, _Outcome))
    if name == "losses":
        require(
            isinstance(value, list) and all(isinstance(point, list) and len(point) == 2 for point in value),
            f"losses must be a list of [step, loss], got {str(value)[:80]}; write the row with `farspan`",
        )
        return tuple((int(step), float(loss)) for step, loss in value)
    if isinstance(wanted, UnionType):  # something or None
        if value is None:
            return None
        wanted = get_args(wanted)[0]
    accepted: tuple[type, ...] = (wanted,) if wanted in (int, str, bool) else (int, float)
    good = isinstance(value, accepted) and (wanted is bool or not isinstance(value, bool))
    require(good, f"{name} must be {_NAMES.get(wanted, 'a number')}, got {value!r}; write the row with `farspan`")
    return _scaling(value) if name == "scaling" else value


_NAMES = {str: "a text", int: "a whole number", bool: "true or false"}


@dataclass(frozen=True)
class _Outcome:
    distance: int
    right: bool


def _list(name: str, value: Any, kind: type[Plain]) -> list[Plain]:
    require(isinstance(value, list), f"{name} must be a list, got {value!r}; write the row with `farspan`")
    return [parse_plain(kind, item) for item in cast(list[Any], value)]


def _scaling(text: str) -> str:
    """ "ntk-4/per_query" is what "ntk-4" means; other modes stay part of the name."""
    law, plus, log = text.partition("+")
    return law.removesuffix("/per_query") + plus + log


def parse_source(file: str, data: Mapping[str, Any]) -> Source:
    """Provenance of a result file."""
    for key in ("command", "commit", "versions", "device", "seed"):
        require(key in data, f"{key} must be given in a result file; write it with `farspan`")
    require(isinstance(data["versions"], dict), f"versions must be an object, got {data['versions']!r}")
    versions = tuple(sorted((str(name), str(version)) for name, version in data["versions"].items()))
    commit = None if data["commit"] is None else str(data["commit"])
    model = data.get("model_fingerprint")
    return Source(file, str(data["command"]), commit, str(data["device"]), data["seed"], versions, model)


def parse_step(raw: Any) -> Step:
    """One entry of `status.json`; the message may be left out."""
    step = parse_plain(Step, {"message": "", **raw} if isinstance(raw, Mapping) else raw)
    require_choice("state", step.state, STATES)
    return step
