"""Processes of their own that start at once: a server imports torch, transformers and farspan, and forks each."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Self

PRELOADED = [
    "farspan.bench.cosformer",
    "farspan.bench.layer",
    "farspan.convert",
    "farspan.data",
    "farspan.evaluation",
    "farspan.finetune",
    "farspan.report.figures",
    "farspan.reproduce",
    "farspan_cli",
    "tensorboard.summary.writer.record_writer",
    "tests.training.runs",
]
"""Seconds of imports, which a process started with `subprocess` would spend again."""


def start_server() -> None:
    """Start what forks; a second call does nothing.

    The first to ask for a process decides what is imported, so a worker of pytest calls this before any test.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class Started:
    """A function in a process of its own. SystemExit gives the exit status, as in a program."""

    def __init__(self, function: Callable[..., object], *arguments: object, cwd: Path | None = None) -> None:
        start_server()
        self._folder = tempfile.TemporaryDirectory()
        target = (self._folder.name, cwd or Path.cwd(), function, arguments)
        self.process = multiprocessing.get_context("forkserver").Process(target=_call, args=target)
        self.process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._folder.cleanup()

    def wait(self, seconds: float = 300) -> "CompletedProcess[str]":
        """Its exit status and what it printed; after so many seconds it is killed."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        out, err = (file.read_text() if file.exists() else "" for file in files)  # killed early, it has none
        return CompletedProcess([], self.process.exitcode or 0, out, err)


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(function, arguments)


def in_two(port: int, function: Callable[..., object], *arguments: object) -> list["CompletedProcess[str]"]:
    """A function in two processes that know of each other, as torch's launcher starts them."""
    with ExitStack() as running:
        both = [running.enter_context(Started(_ranked, rank, port, function, *arguments)) for rank in range(2)]
        return [one.wait() for one in both]


def _ranked(rank: int, port: int, function: Callable[..., object], *arguments: object) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(*arguments)


def _call(folder: str, cwd: Path, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        with (Path(folder) / name).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(cwd)
    function(*arguments)
