"""Ctrl-C is answered even while one long operation runs, and nothing of the answering is left behind."""

import hashlib
import os
import signal
import sys
import threading
import time

import pytest

from farspan.training.interruption import interruption


class Printed:
    """Stands in for stderr, and remembers when something was said."""

    def __init__(self) -> None:
        self.when: list[float] = []

    def write(self, text: str) -> int:
        if text.strip():
            self.when.append(time.monotonic())
        return len(text)

    def flush(self) -> None: ...


def seconds_of_hashing(rounds: int) -> float:
    """One call into C that lets other threads run, as a backward pass does."""
    began = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    return time.monotonic() - began


def test_the_answer_does_not_wait_for_a_long_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Printed()
    rounds = int(100_000 * 2 / seconds_of_hashing(100_000))
    monkeypatch.setattr(sys, "stderr", printed)
    with interruption(lambda: 7) as interrupted:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        took, ended = seconds_of_hashing(rounds), time.monotonic()
        assert interrupted()
    assert took > 1
    [answered] = printed.when
    assert answered < ended - 0.5


def test_two_during_one_operation_are_two() -> None:
    rounds = int(100_000 / seconds_of_hashing(100_000))
    with interruption(lambda: 7, say=False):
        for delay in (0.2, 0.4):
            threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt, match="stopped at once"):
            seconds_of_hashing(rounds)


def test_a_forked_child_does_not_keep_it_waiting() -> None:
    with interruption(lambda: 0):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("say", [True, False])
def test_afterwards_all_is_as_it_was(say: bool) -> None:
    before, threads = signal.getsignal(signal.SIGINT), threading.active_count()
    with interruption(lambda: 0, say=say) as interrupted:
        assert not interrupted()
        assert threading.active_count() == threads + 1
    assert signal.getsignal(signal.SIGINT) == before
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_another_thread_asks_in_vain() -> None:
    asked: list[bool] = []

    def ask() -> None:
        with interruption(lambda: 0) as interrupted:
            asked.append(interrupted())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert asked == [False]
