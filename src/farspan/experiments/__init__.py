"""The papers' tables and figures as data: what each compares, and the paper's own numbers."""

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from farspan.errors import require, require_choice
from farspan.utils import parse

LENGTHS = ("perplexity", "passkey", "near-far", "distance")
KINDS = (*LENGTHS, "tasks", "study", "speed")
MEASURES = ("accuracy", "perplexity", "speed", "memory")
VARIANTS = ("alibi", "rope", "coca-slack", "coca-strict", "coca-exact")
SCALINGS = ("none", "dynamic_ntk-2", "dynamic_ntk-4", "dynamic_ntk-8")
NO_NUMBER = ("OOM", "inf", "")
"""What stands for a number that a paper does not have."""


@dataclass(frozen=True)
class Row:
    """One line of a table: what is measured, and the paper's value for each column if it has any."""

    label: str
    variant: str = ""
    """Of results; in a study the name of a model."""
    scaling: str = "none"
    kind: str = ""
    """Default: the experiment's."""
    contestants: list[str] = field(default_factory=list)
    """Of a benchmark; the fastest of several is shown. Default: the variant."""
    paper: list[float | str] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """One table or figure. Lengths are the paper's, in tokens; ours have the same ratio to the training length."""

    title: str
    kind: str
    rows: list[Row]
    caption: str = ""
    name: str = ""
    train_length: int = 1
    lengths: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    """Lengths of a study's passkey prompts, after those of its windows."""
    ranges: list[float] = field(default_factory=list)
    """Ends of the ranges of distance in training lengths; the last range is open."""
    columns: list[str] = field(default_factory=list)
    """Names of tasks."""
    headings: list[str] = field(default_factory=list)
    measure: str = "perplexity"

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        require_choice("measure", self.measure, MEASURES)
        require(len(self.headings) == len(self.columns), f"headings must name all columns, got {self.headings}")
        values = len(self.lengths) + len(self.prompts) + len(self.columns) + 2 * (self.kind == "speed")
        for row in self.rows:
            require_choice("kind", row.kind or self.kind, KINDS)
            require_choice("scaling", row.scaling, SCALINGS)
            if self.kind in LENGTHS:
                require_choice("variant", row.variant, VARIANTS)
            said = f"paper must have one value for each of the {values} columns, got {len(row.paper)}"
            require(
                len(row.paper) in (0, values), f"{said} in row {row.label!r}; write 'OOM', 'inf' or '' for no number"
            )
            for value in row.paper:
                said = f"paper must hold numbers, 'OOM' or 'inf', got {value!r} in row {row.label!r}"
                require(not isinstance(value, str) or value in NO_NUMBER, said)

    def rows_of(self, kind: str) -> list[Row]:
        """Return the rows that measure this kind."""
        return [row for row in self.rows if (row.kind or self.kind) == kind]


@cache
def load_all() -> tuple[Experiment, ...]:
    """Load every shipped experiment, ordered by name."""
    files = sorted(resources.files("farspan.experiments").iterdir(), key=lambda file: file.name)
    found = [(file.name.removesuffix(".toml"), file) for file in files if file.name.endswith(".toml")]
    return tuple(parse_experiment(name, file.read_text(encoding="utf-8")) for name, file in found)


def load(*kinds: str) -> list[Experiment]:
    """Load the shipped experiments of these kinds.

    >>> [experiment.name for experiment in load("speed", "study")]
    ['coca-speed', 'cosformer-length', 'dropin']
    """
    return [experiment for experiment in load_all() if experiment.kind in kinds]


def parse_experiment(name: str, text: str) -> Experiment:
    """Parse the text of a TOML file. Raise one line that names the experiment for anything wrong."""
    try:
        experiment = parse(Experiment, tomllib.loads(text))
    except ValueError as error:
        raise ValueError(f"experiment {name}: {error}") from error
    return replace(experiment, name=name, caption=" ".join(experiment.caption.split()))
