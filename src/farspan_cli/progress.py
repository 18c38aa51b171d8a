"""Progress of long work: a bar with the time left for each of its phases, on stderr."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan.utils import Progress

SILENT = 2.0
"""Seconds before a bar appears: short work needs no report."""


class _Log:
    """Stand for stderr in a log: each new state of a bar is a line of its own."""

    last = ""

    def write(self, text: str) -> None:
        """Write what a bar draws over its last state."""
        state = text.strip()
        if state and state != self.last:
            print(state, file=sys.stderr)
            self.last = state

    def flush(self) -> None:
        """Pass lines on."""
        sys.stderr.flush()


@contextmanager
def show_progress() -> "Iterator[Progress]":
    """Show a bar for the current phase for as long as the context lasts; in a log, a state of it every 15 seconds."""
    from tqdm import tqdm

    options: dict[str, Any] = {
        "file": sys.stderr if sys.stderr.isatty() else _Log(),
        "bar_format": "{percentage:3.0f}% {bar:8} {elapsed} ({remaining} left) {desc}",
        "mininterval": 0.1 if sys.stderr.isatty() else 15.0,
        "miniters": 0,
        "smoothing": 0,  # steps may take minutes: estimate from the average of all
        "dynamic_ncols": True,
        "delay": SILENT,
    }
    bars: dict[str, tqdm] = {}
    with ExitStack() as shown:

        def show(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
            if phase not in bars:
                shown.close()  # the phase before has ended
                bars[phase] = shown.enter_context(tqdm(total=total, initial=done, **options))
            bar = bars[phase]
            bar.total = total
            bar.set_description_str(text or phase, refresh=False)
            bar.update(done - bar.n)

        yield show
