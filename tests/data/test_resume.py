"""Interrupted, killed, shared or out of space: the shards come out the same."""

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from farspan.data import Shards, prepare
from farspan.data.shards import ShardWriter
from farspan.utils import lock
from tests.data.corpora import SMALL, TEXTS, all_texts, contents

prepare_module = sys.modules[prepare.__module__]  # the package's name for it is the function


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and a saved state after each, as in a long run."""
    monkeypatch.setattr(prepare_module, "CHUNK", 5000)
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


def test_ctrl_c_ends_at_once_and_the_rest_continues(
    sources: list[str], expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, calls = ShardWriter.append, 0

    def interrupted(self: ShardWriter, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        append(self, *arguments)
        if calls == 6:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ShardWriter, "append", interrupted)
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
    encode, written = ShardWriter.append, 0

    def append(self: ShardWriter, tokens: Any, lengths: Any) -> None:
        nonlocal written
        if written > 110:
            raise KeyboardInterrupt
        written += len(lengths)
        encode(self, tokens, lengths)

    total, first = len(all_texts(sources)), 0
    monkeypatch.setattr(ShardWriter, "append", append)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(sources, tmp_path / "out", workers=1, **SMALL)
        state = json.loads((tmp_path / "out" / ".unfinished.json").read_text())["splits"].values()
        kept = sum(split["documents"] + sum(one["documents"] for one in split["finished"]) for split in state)
        assert first < kept <= first + written  # the chunk in which it stopped is repeated
        assert kept > first + 60
        first, written = kept, 0
    monkeypatch.undo()
    manifest = prepare(sources, tmp_path / "out", workers=1, **SMALL)
    assert sum(split["documents"] for split in manifest["splits"].values()) == total


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


def test_a_folder_in_use_is_an_error(sources: list[str], tmp_path: Path) -> None:
    with lock(tmp_path / "out"), pytest.raises(ValueError, match="another process works in"):
        prepare(sources, tmp_path / "out", workers=1)


def test_unfinished_work_is_not_continued_with_other_settings(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: ShardWriter, *_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "append", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(sources, tmp_path / "out", workers=1, **SMALL)
    with pytest.raises(ValueError, match=r"this folder began with valid_share = 0.2, got 0.5; keep it or use another"):
        prepare(sources, tmp_path / "out", workers=1, **(SMALL | {"valid_share": 0.5}))
    assert (tmp_path / "out" / ".unfinished.json").exists()


@pytest.mark.parametrize("field", ["text", "txt"])
def test_input_that_cannot_be_read_leaves_nothing_behind(field: str, tmp_path: Path) -> None:
    """Whatever was tokenized before it: the mended input has another hash, so it would not be continued."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "{\n")
    for tokenizer in ("bytes", 300):
        with pytest.raises(ValueError, match=r"bad\.jsonl:301 must be one JSON|field must be one of"):
            prepare([str(bad)], tmp_path / "new" / "out", workers=1, field=field, tokenizer=tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="bad"):
        prepare([str(bad)], tmp_path / "empty", workers=1, field=field)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.jsonl", "empty"]
