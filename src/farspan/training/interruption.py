"""Ctrl-C while a model is trained: the first is answered at once and obeyed after the step, the second at once."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any


@contextmanager
def interruption(saved: Callable[[], int], *, say: bool = True) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a question that the loop asks after each step; a second one stops at once.

    Args:
        saved: gives the step that the same command would continue from, should the run end now.
        say: whether this process answers the user; of several one is enough.

    >>> with interruption(lambda: 0) as interrupted:
    ...     interrupted()
    False
    """
    seen: list[int] = []
    answer = Thread(target=lambda: _answer(saved()))  # the signal may come while this thread holds a bar's lock

    def remember(number: int, _: Any) -> None:
        if seen:
            raise KeyboardInterrupt(f"stopped at once; the same command continues from step {saved()}")
        seen.append(number)
        if say:
            answer.start()

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
        if answer.is_alive():
            answer.join()  # before the caller has more to say


def _answer(saved: int) -> None:
    line = f"stopping after this training step; Ctrl-C again stops now, back at step {saved}"
    print(line, file=sys.stderr, flush=True)
