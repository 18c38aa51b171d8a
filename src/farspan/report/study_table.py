"""The table of a drop-in study as data: its models in order, and the paper's own numbers."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farspan.errors import require
from farspan.report.experiment import NOT_A_NUMBER, build_value, shipped


@dataclass(frozen=True)
class StudyRow:
    """One model, and what the paper has for its counterpart under each law: perplexities, then passkey accuracies."""

    label: str
    model: str
    paper: Mapping[str, Sequence[float | str]] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyTable:
    """Windows and prompts are given in training lengths."""

    name: str
    title: str
    kind: str
    caption: str
    train_length: int
    """The paper's."""
    windows: tuple[int, ...]
    prompts: tuple[int, ...]
    rows: tuple[StudyRow, ...]

    def __post_init__(self) -> None:
        wanted = len(self.windows) + len(self.prompts)
        for row in self.rows:
            for law, values in row.paper.items():
                good = all(isinstance(value, int | float) or value in NOT_A_NUMBER for value in values)
                require(
                    good and len(values) == wanted,
                    f"paper.{law} must have a number, 'OOM' or 'inf' for each of the {wanted} windows and prompts, "
                    f"got {values} in row {row.label!r}; correct it",
                )


def load_study_table() -> StudyTable:
    """The shipped table.

    >>> load_study_table().rows[0].model
    'original'
    """
    [(name, text)] = shipped(("study",))
    return parse_study_table(name, text)


def parse_study_table(name: str, text: str) -> StudyTable:
    """A table from the text of its TOML file; an unknown key is refused with the nearest valid name."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
        rows = tuple(build_value(StudyRow, row) for row in data.pop("rows", []))
        caption = " ".join(str(data.pop("caption", "")).split())
        return build_value(StudyTable, {"name": name, "caption": caption, "rows": rows, **data})
    except ValueError as error:
        raise ValueError(f"experiment {name}: {error}") from error
