"""The papers' tables and figures as data: what each compares, and the paper's own numbers."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal

from farspan.utils import parse

Kind = Literal["perplexity", "passkey", "tasks", "study"]


@dataclass(frozen=True)
class Row:
    """One line of a table: what is measured, and the paper's value for each column if it has any."""

    variant: str
    """Of results; in a study the name of a model."""
    label: str = ""
    """Default: the names of variant and scaling."""
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
    caption: str = ""
    rows: list[Row] = field(default_factory=list)
    """A figure has none: the page draws all that was measured."""
    train_length: int = 1
    lengths: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    """Lengths of a study's passkey prompts, after those of its windows."""
    columns: list[str] = field(default_factory=list)
    """Names of tasks."""
    headings: list[str] = field(default_factory=list)
    measure: Literal["accuracy", "perplexity"] = "perplexity"


@cache
def load_all() -> tuple[Experiment, ...]:
    """Load every shipped experiment, ordered by name."""
    files = [file for file in resources.files("farspan.experiments").iterdir() if file.name.endswith(".toml")]
    tables = {name: x for file in files for name, x in tomllib.loads(file.read_text(encoding="utf-8")).items()}
    return tuple(parse(Experiment, {**table, "name": name}) for name, table in sorted(tables.items()))


def load(*kinds: str) -> list[Experiment]:
    """Load the shipped experiments of these kinds.

    >>> [experiment.name for experiment in load("perplexity", "study")]
    ['dropin', 'figure1', 'table1', 'table3']
    """
    return [experiment for experiment in load_all() if experiment.kind in kinds]
