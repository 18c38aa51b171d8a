"""A table with one column a task, as data: what is compared, and the paper's own numbers."""

import tomllib
from dataclasses import dataclass

from farspan.errors import require, require_choice
from farspan.report.experiment import build_value, shipped

MEASURES = ("accuracy", "perplexity", "speed", "memory")


@dataclass(frozen=True)
class TaskRow:
    """One line: a variant, and the paper's value for each column, "" where it has none."""

    label: str
    variant: str
    paper: tuple[float | str, ...] = ()


@dataclass(frozen=True)
class TaskTable:
    """One table of a paper whose columns are tasks."""

    name: str
    title: str
    kind: str
    measure: str
    caption: str
    columns: tuple[str, ...]
    """Names of tasks."""
    headings: tuple[str, ...]
    rows: tuple[TaskRow, ...]

    def __post_init__(self) -> None:
        require_choice("measure", self.measure, MEASURES)
        require(
            len(self.headings) == len(self.columns),
            f"headings must name each of the {len(self.columns)} columns, got {len(self.headings)}",
        )
        for row in self.rows:
            require(
                len(row.paper) in (0, len(self.columns)),
                f"paper must have one value for each of the {len(self.columns)} columns, got {len(row.paper)} "
                f"in row {row.label!r}; write '' where the paper has none",
            )


def load_task_tables() -> list[TaskTable]:
    """Every shipped table of tasks, in the order of its name.

    >>> [table.name for table in load_task_tables()][:2]
    ['cosformer-finetuning', 'cosformer-lm']
    """
    return [parse_task_table(name, text) for name, text in shipped(("tasks",))]


def parse_task_table(name: str, text: str) -> TaskTable:
    """A table from the text of its TOML file; an unknown key is refused with the nearest valid name."""
    try:
        data = tomllib.loads(text)
        rows = tuple(build_value(TaskRow, row) for row in data.pop("rows", []))
        caption = " ".join(str(data.pop("caption", "")).split())
        return build_value(TaskTable, {"name": name, "caption": caption, "rows": rows, **data})
    except ValueError as error:
        raise ValueError(f"experiment {name}: {error}") from error
