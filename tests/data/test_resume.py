"""Interrupted, killed, shared or out of space: the shards come out the same."""

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from farspan.data import Shards, encoding, prepare
from tests.data.corpora import SMALL, TEXTS, all_texts, contents

prepare_module = sys.modules[prepare.__module__]  # the package's name for it is the function


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and a saved state after each, as in a long run."""
    monkeypatch.setattr(encoding, "CHUNK", 5000)
    monkeypatch.setattr(prepare_module, "SAVE_SECONDS", 0.0)


def test_any_number_of_workers_gives_the_same_bytes(sources: list[str], expected: Path, tmp_path: Path) -> None:
    for workers in (2, 3):
        prepare(sources, tmp_path / f"{workers}", workers=workers, **SMALL)
        assert contents(tmp_path / f"{workers}") == contents(expected)


def _run(sources: list[str], out: Path, workers: int) -> None:
    prepare(sources, out, workers=workers, **SMALL)


def _killed_after(seconds: float, sources: list[str], out: Path, workers: int) -> int | None:
    """Start preparing in another process and SIGKILL it after a while; its exit code."""
    child = multiprocessing.get_context("fork").Process(target=_run, args=(sources, out, workers))
    child.start()
    child.join(seconds)
    if child.exitcode is None:
        os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    return child.exitcode


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_moment_it_continues_to_the_same_bytes(
    workers: int, sources: list[str], expected: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    prepare(sources, tmp_path / "timing", workers=workers, **SMALL)
    whole = time.monotonic() - began
    choose = random.Random(workers)
    killed = 0
    for attempt in range(4):
        out = tmp_path / str(attempt)
        for _ in range(3):
            if _killed_after(choose.uniform(0, whole), sources, out, workers) == -signal.SIGKILL:
                killed += 1
            else:
                whole /= 2  # it was done before: the first run waited for a busy machine
            if not (out / "manifest.json").exists():
                with pytest.raises(ValueError, match=r"must be a folder with manifest.json"):
                    Shards(out)
        prepare(sources, out, workers=workers, **SMALL)
        assert contents(out) == contents(expected)
    assert killed >= 3


def test_killed_at_any_replacement_it_continues_to_the_same_bytes(
    sources: list[str], expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Death right before the n-th replacement of a file: the first, the last and some between."""
    replace, count, last = os.replace, 0, -1

    def dying(source: Any, target: Any) -> None:
        nonlocal count
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    prepare(sources, tmp_path / "counting", workers=1, **SMALL)
    total = count
    for step in {*range(4), total // 3, total // 2, *range(total - 16, total, 3), total - 1}:
        count, last = 0, step
        assert _killed_after(60, sources, tmp_path / f"{step}", 1) == -signal.SIGKILL
        last = -1
        prepare(sources, tmp_path / f"{step}", workers=1, **SMALL)
        assert contents(tmp_path / f"{step}") == contents(expected)


def _interrupted(sources: list[str], out: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        prepare(sources, out, workers=2, **SMALL)
    except KeyboardInterrupt:
        sys.exit(7)  # a normal end: it waits for processes that the pool forgot


@pytest.mark.parametrize("moment", ["starting", "working"])
def test_ctrl_c_ends_every_process_and_the_rest_continues(
    moment: str, sources: list[str], expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, calls = ProcessPoolExecutor, 0
    # Right after the processes exist and before they have a manager: the moment at which nobody would end them.
    method, when = {"starting": ("_launch_processes", 1), "working": ("submit", 6)}[moment]
    whole = getattr(pool, method)

    def interrupted(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = whole(self, *arguments)
        if calls == when:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(pool, method, interrupted)
    child = multiprocessing.get_context("fork").Process(target=_interrupted, args=(sources, tmp_path / "out"))
    child.start()
    child.join(20)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 7
    monkeypatch.undo()
    prepare(sources, tmp_path / "out", workers=1, **SMALL)
    assert contents(tmp_path / "out") == contents(expected)


def test_continuing_does_not_repeat_finished_work(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class StoppedError(Exception):
        pass

    class Counting(encoding.Encoder):
        def __call__(self, texts: list[str]) -> Any:
            if len(seen) > 110:
                raise StoppedError
            seen.extend(texts)
            return super().__call__(texts)

    monkeypatch.setattr(prepare_module, "Encoder", Counting)
    total = len(all_texts(sources))
    with pytest.raises(StoppedError):
        prepare(sources, tmp_path / "out", workers=1, **SMALL)
    first, seen = len(seen), []
    with pytest.raises(StoppedError):
        prepare(sources, tmp_path / "out", workers=1, **SMALL)
    assert seen == all_texts(sources)[first : first + len(seen)]
    first += len(seen)
    seen = []
    prepare(sources, tmp_path / "out", workers=1, **SMALL)
    assert first + len(seen) == total


def test_a_worker_that_dies_is_one_sentence_and_the_rest_continues(
    sources: list[str], expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(encoding.Encoder):
        def __call__(self, texts: list[str]) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "Encoder", Dying)
        with pytest.raises(OSError, match=r"got one of 2 that ended by itself, .* again with fewer: it continues"):
            prepare(sources, tmp_path / "out", workers=2, **SMALL)
    prepare(sources, tmp_path / "out", workers=1, **SMALL)
    assert contents(tmp_path / "out") == contents(expected)


def _limited(sources: list[str], out: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    try:
        prepare(sources, out, tokenizer="bytes", workers=1, shard_tokens=5000)
    except OSError as error:
        os._exit(7 if "free some space and run the same command again" in str(error) else 8)


def test_a_full_disk_says_so_and_loses_nothing(sources: list[str], tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_limited, args=(sources, tmp_path / "out"))
    child.start()
    child.join()
    assert child.exitcode == 7
    assert not (tmp_path / "out" / "manifest.json").exists()
    for out in ("out", "whole"):
        prepare(sources, tmp_path / out, tokenizer="bytes", workers=1, shard_tokens=5000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def _refused(sources: list[str], out: Path) -> None:
    try:
        prepare(sources, out, workers=1)
    except ValueError as error:
        os._exit(7 if "another process is filling" in str(error) else 8)


def test_a_folder_in_use_is_refused(sources: list[str], tmp_path: Path) -> None:
    with prepare_module._working_in(tmp_path / "out" / ".unfinished"):
        child = multiprocessing.get_context("fork").Process(target=_refused, args=(sources, tmp_path / "out"))
        child.start()
        child.join()
    assert child.exitcode == 7


def test_unfinished_work_is_not_continued_with_other_settings_but_a_failed_start_is_forgotten(
    sources: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="field must be one of"):
        prepare(sources, tmp_path / "out", workers=1, field="txt", tokenizer="bytes")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:50]) + "{\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:51 must be one JSON"):
        prepare([str(bad)], tmp_path / "out", workers=1)
    with pytest.raises(ValueError, match=r"continued with what it was begun, .* of another valid_share .* start over"):
        prepare([str(bad)], tmp_path / "out", workers=1, valid_share=0.5)
