"""Ctrl-C while a model is trained: the first is answered at once and obeyed after the step, the second sooner."""

import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any


@contextmanager
def interruption(saved: Callable[[], int], *, say: bool = True) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a question that the loop asks after each step; a second one raises KeyboardInterrupt.

    Args:
        saved: gives the step that the same command would continue from, should the run end now.
        say: whether this process answers the user; of several one is enough.

    >>> with interruption(lambda: 0) as interrupted:
    ...     interrupted()
    False
    """
    seen: list[int] = []
    heard: list[int] = []

    def remember(number: int, _: Any) -> None:
        if seen or len(heard) > 1:  # two during one operation reach this handler once
            raise KeyboardInterrupt(f"stopped at once; the same command continues from step {saved()}")
        seen.append(number)

    def hear() -> None:
        heard.append(signal.SIGINT)
        if say and len(heard) == 1:
            line = f"stopping after this training step; Ctrl-C again stops sooner, back at step {saved()}"
            print(line, file=sys.stderr, flush=True)

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        with _listening(hear):
            yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _listening(hear: Callable[[], None]) -> Iterator[None]:
    """Call `hear` for each Ctrl-C, in a thread that the operating system's handler wakes.

    Python's own handler waits until the operation that runs, perhaps a whole backward pass, is done.
    """
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)

    def listen() -> None:
        while byte := ear.recv(1):
            if byte[0] == signal.SIGINT:
                hear()

    thread = Thread(target=listen, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        mouth.shutdown(socket.SHUT_RDWR)  # the thread hears the end, even if a forked child holds a copy
        thread.join()
        mouth.close()
        ear.close()
