"""The papers' tables and figures as data: what each compares, and the paper's own numbers."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from farspan.errors import require
from farspan.utils import parse

LENGTHS = ("perplexity", "passkey", "near-far", "distance")
Kind = Literal["perplexity", "passkey", "near-far", "distance", "tasks", "study"]
VARIANTS = ("alibi", "rope", "coca-slack", "coca-strict", "coca-exact")
"""Those of the CoCA paper."""


@dataclass(frozen=True)
class Row:
    """One line of a table: what is measured, and the paper's value for each column if it has any."""

    label: str
    variant: str = ""
    """Of results; in a study the name of a model."""
    scaling: Literal["none", "dynamic_ntk-2", "dynamic_ntk-4", "dynamic_ntk-8", "none+log"] = "none"
    kind: Kind | Literal[""] = ""
    """Default: the experiment's."""
    paper: list[float | Literal["OOM", "inf", ""]] = field(default_factory=list)
    """ "" where the paper has no number."""


@dataclass(frozen=True)
class Experiment:
    """One table or figure. Lengths are the paper's, in tokens; ours have the same ratio to the training length."""

    name: str
    title: str
    kind: Kind
    rows: list[Row]
    caption: str
    train_length: int = 1
    lengths: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    """Lengths of a study's passkey prompts, after those of its windows."""
    ranges: list[float] = field(default_factory=list)
    """Ends of the ranges of distance in training lengths; the last range is open."""
    columns: list[str] = field(default_factory=list)
    """Names of tasks."""
    headings: list[str] = field(default_factory=list)
    measure: Literal["accuracy", "perplexity", "speed", "memory"] = "perplexity"

    def __post_init__(self) -> None:
        require(len(self.headings) == len(self.columns), f"headings must name all columns, got {self.headings}")
        values = len(self.lengths) + len(self.prompts) + len(self.columns)
        for row in self.rows:
            said = f"paper must have one value for each of the {values} columns, got {len(row.paper)}"
            require(len(row.paper) in (0, values), f"{said} in row {row.label!r}; write '' for no number")

    def rows_of(self, kind: str) -> list[Row]:
        """Return the rows that measure this kind."""
        return [row for row in self.rows if (row.kind or self.kind) == kind]


@cache
def load_all() -> tuple[Experiment, ...]:
    """Load every shipped experiment, ordered by name."""
    files = [file for file in resources.files("farspan.experiments").iterdir() if file.name.endswith(".toml")]
    tables = {name: x for file in files for name, x in tomllib.loads(file.read_text(encoding="utf-8")).items()}
    return tuple(make_experiment(name, table) for name, table in sorted(tables.items()))


def load(*kinds: str) -> list[Experiment]:
    """Load the shipped experiments of these kinds.

    >>> [experiment.name for experiment in load("near-far", "study")]
    ['dropin', 'figure4']
    """
    return [experiment for experiment in load_all() if experiment.kind in kinds]


def make_experiment(name: str, table: dict[str, Any]) -> Experiment:
    """Check a table of a TOML file. Raise one line that names the experiment for anything wrong."""
    try:
        return parse(Experiment, {**table, "name": name})
    except ValueError as error:
        raise ValueError(f"experiment {name}: {error}") from error
