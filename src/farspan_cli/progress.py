"""Progress of long work: a bar with the time left in a terminal, and a line now and then in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

EVERY = 15.0
"""Seconds between the lines of a log."""
SILENT = 2.0
"""Seconds before its first line."""


class Show(Protocol):
    """Told how far the work is; work of several phases gets a bar, and an estimate, for each.

    The time left is estimated by how fast `done` has grown, unless `left` says it: "" where it is not known.
    """

    def __call__(
        self, done: float, total: float | None, text: str = "", *, phase: str = "", left: str | None = None
    ) -> None: ...


@contextmanager
def progress(console: "Console") -> Iterator[Show]:
    """Show progress on a console for as long as the context lasts."""
    if not console.is_terminal:
        yield _Log()
        return
    from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Estimate
    from rich.table import Column
    from rich.text import Text

    class TimeLeft(Estimate):
        def render(self, task: Task) -> Text:
            said = task.fields["left"]
            return super().render(task) if said is None else Text(said or "-:--:--", style="progress.remaining")

    # In a narrow terminal the text is cut, and not the times before it.
    rest = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    bar = BarColumn(bar_width=40 if console.width >= 120 else 8)
    columns = bar, TaskProgressColumn(), TimeElapsedColumn(), "left", TimeLeft(), rest
    # Steps may take a minute or two: an estimate must look further back than rich's half minute.
    with Progress(*columns, console=console, speed_estimate_period=3600, expand=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(done: float, total: float | None, text: str = "", *, phase: str = "", left: str | None = None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(text, total=total, left=left)
            bars.update(tasks[phase], completed=done, total=total, description=text, left=left)

        yield show


class _Log:
    """Silent at first, as short work needs no report; then a line for each phase, and one every quarter of a minute."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.phase: str | None = None
        self.begun = self.first = 0.0
        self.last = self.started - EVERY

    def __call__(
        self, done: float, total: float | None, text: str = "", *, phase: str = "", left: str | None = None
    ) -> None:
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.begun, self.first, self.last = phase, now, done, now - EVERY
        if now - self.started < SILENT or now - self.last < EVERY:
            return
        self.last = now
        share = f"{done / total:4.0%}  " if total else ""
        left = self._left(done, total, now) if left is None else left
        print(f"{share}{text}{f'  ({left} left)' if left else ''}", file=sys.stderr, flush=True)

    def _left(self, done: float, total: float | None, now: float) -> str:
        if not total or done <= self.first:
            return ""
        return duration((now - self.begun) * (total - done) / (done - self.first))


def duration(seconds: float) -> str:
    """
    >>> duration(3725.4)
    '1:02:05'
    """
    return str(timedelta(seconds=round(seconds)))
