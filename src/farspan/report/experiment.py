"""The papers' tables and figures as data: what is compared, and the paper's own numbers."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any, TypeVar

from farspan.errors import require, require_choice, unknown

KINDS = ("perplexity", "passkey", "near-far", "distance")
VARIANTS = ("alibi", "rope", "coca-slack", "coca-strict", "coca-exact")
SCALINGS = ("none", "ntk-2", "ntk-4", "ntk-8")
NOT_A_NUMBER = ("OOM", "inf")
"""What the paper prints where it has no number."""

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of a table: a trained variant under a scaling law, and the paper's values for it if it has any."""

    label: str
    variant: str
    scaling: str = "none"
    kind: str = ""
    """What this line measures, where a table mixes kinds; otherwise the experiment's."""
    paper: tuple[float | str, ...] = ()

    def __post_init__(self) -> None:
        require_choice("variant", self.variant, VARIANTS)
        require_choice("scaling", self.scaling, SCALINGS)
        for value in self.paper:
            require(
                isinstance(value, int | float) or value in NOT_A_NUMBER,
                f"paper must hold numbers, 'OOM' or 'inf', got {value!r} in row {self.label!r}; correct it",
            )


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper."""

    name: str
    title: str
    kind: str
    caption: str
    train_length: int
    """The paper's training length: ours may differ, so that columns are aligned by multiples of it."""
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]
    ranges: tuple[float, ...] = ()
    """Ends of the distance ranges in training lengths (kind "distance"); the last range is open."""

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        for row in self.rows:
            require(
                len(row.paper) in (0, len(self.lengths)),
                f"paper must have one value for each of the {len(self.lengths)} lengths, got {len(row.paper)} "
                f"in row {row.label!r}; write 'OOM' or 'inf' where the paper does",
            )

    def rows_of(self, kind: str) -> list[Row]:
        """The lines that measure this kind."""
        return [row for row in self.rows if (row.kind or self.kind) == kind]


def load_experiments() -> list[Experiment]:
    """Every shipped experiment on lengths past the training length, in the order of its name.

    >>> [experiment.name for experiment in load_experiments()]
    ['figure1', 'figure4', 'figure5', 'table1', 'table2', 'table3']
    """
    return [parse_experiment(name, text) for name, text in shipped(KINDS)]


def shipped(kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Name and text of every shipped file of one of these kinds."""
    folder = resources.files("farspan") / "experiments"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    texts = [(file.name.removesuffix(".toml"), file.read_text(encoding="utf-8")) for file in files]
    return [(name, text) for name, text in texts if tomllib.loads(text).get("kind") in kinds]


def parse_experiment(name: str, text: str) -> Experiment:
    """An experiment from the text of its TOML file; an unknown key is refused with the nearest valid name."""
    try:
        data = tomllib.loads(text)
        rows = tuple(build_value(Row, row) for row in data.pop("rows", []))
        for row in rows:
            require_choice("kind", row.kind or data.get("kind"), KINDS)
        caption = " ".join(str(data.pop("caption", "")).split())
        return build_value(Experiment, {"name": name, "caption": caption, "rows": rows, **data})
    except ValueError as error:
        raise ValueError(f"experiment {name}: {error}") from error


def build_value(kind: type[T], values: Mapping[str, Any]) -> T:
    """A frozen value from a TOML table, with lists as tuples."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise unknown("key", key, known)
    for key, field in known.items():
        optional = field.default is not MISSING or field.default_factory is not MISSING
        require(optional or key in values, f"{key} must be given in {dict(values)}; add it")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
