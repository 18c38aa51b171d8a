"""Progress of long work: a bar with the time left in a terminal, and a line now and then in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from farspan.utils import Progress

EVERY = 15.0
"""Seconds between the lines of a log."""
SILENT = 2.0
"""Seconds before its first line."""


@contextmanager
def show_progress(console: "Console") -> "Iterator[Progress]":
    """Show progress on a console for as long as the context lasts: each phase has a bar and an estimate of its own."""
    if not console.is_terminal:
        yield _Log()
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.table import Column

    # In a narrow terminal the text is cut, and not the times before it.
    rest = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    bar = BarColumn(bar_width=40 if console.width >= 120 else 8)
    columns = bar, TaskProgressColumn(), TimeElapsedColumn(), "left", TimeLeft(), rest
    # Steps may take a minute or two: an estimate must look further back than rich's half minute.
    with Progress(*columns, console=console, speed_estimate_period=3600, expand=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(text, total=total)
            bars.update(tasks[phase], completed=done, total=total, description=text or phase)

        yield show


class _Log:
    """Print nothing at first, as short work needs no report; then a line per phase, and one every few seconds."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.phase: str | None = None
        self.begun = self.first = self.last = 0.0

    def __call__(self, done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.begun, self.first, self.last = phase, now, done, now - EVERY
        if now - self.started < SILENT or now - self.last < EVERY:
            return
        self.last, left = now, ""
        if total and done > self.first:
            seconds = (now - self.begun) * (total - done) / (done - self.first)
            left = f"  ({timedelta(seconds=round(seconds))} left)"
        print(f"{done / total:4.0%}  " if total else "", text or phase, left, sep="", file=sys.stderr, flush=True)
