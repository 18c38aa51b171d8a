"""Interrupted, killed, shared or out of space: the shards come out the same."""

import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farspan.data import Shards, prepare
from farspan.data.shards import ShardWriter
from farspan.utils import lock
from tests.data.corpora import SMALL, TEXTS, all_texts, contents, jsonl

prepare_module = sys.modules[prepare.__module__]  # the package's name for it is the function


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, as in a long run."""
    monkeypatch.setattr(prepare_module, "CHUNK", 5000)


def in_fork(function: Callable[..., object], *arguments: object) -> int | None:
    """Call a function in another process, and return its exit code."""
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(60)
    return child.exitcode


def run(sources: list[str], out: Path) -> None:
    prepare(sources, out, **SMALL)


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
    run(sources, tmp_path / "counting")
    assert contents(tmp_path / "counting") == contents(expected)  # whatever the chunks
    total = count
    for step in {*range(4), total // 3, total // 2, *range(total - 16, total, 3), total - 1}:
        count, last = 0, step
        assert in_fork(run, sources, tmp_path / f"{step}") == -signal.SIGKILL
        with pytest.raises(ValueError, match=r"must be a folder with manifest.json"):
            Shards(tmp_path / f"{step}")
        last = -1
        run(sources, tmp_path / f"{step}")
        assert contents(tmp_path / f"{step}") == contents(expected)


def test_continuing_tokenizes_what_is_in_no_shard(
    sources: list[str], expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, append, appended, out = ShardWriter.finish, ShardWriter.append, 0, tmp_path / "out"

    def stop_later(self: ShardWriter) -> None:
        if len(self.shards) == 4:
            raise KeyboardInterrupt
        finish(self)

    def count(self: ShardWriter, tokens: Any, position: tuple[int, ...]) -> bool:
        nonlocal appended
        appended += 1
        return append(self, tokens, position)

    monkeypatch.setattr(ShardWriter, "finish", stop_later)
    with pytest.raises(KeyboardInterrupt):
        run(sources, out)
    written = json.loads((out / ".unfinished.json").read_text())["written"].values()
    kept = sum(shard["documents"] for split in written for shard in split["shards"])
    with pytest.raises(ValueError, match=r"this folder began with valid_share = 0.2, got 0.5; keep it or use another"):
        prepare(sources, out, **(SMALL | {"valid_share": 0.5}))
    with pytest.raises(ValueError, match=r"this folder began with sources"):
        prepare(sources[:2], out, **SMALL)
    monkeypatch.setattr(ShardWriter, "finish", finish)
    monkeypatch.setattr(ShardWriter, "append", count)
    run(sources, out)
    assert kept > 60
    assert appended == len(all_texts(sources)) - kept
    assert contents(out) == contents(expected)


def limited(sources: list[str], out: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    try:
        prepare(sources, out, tokenizer="bytes", shard_tokens=5000)
    except OSError as error:
        os._exit(7 if "free some space and run the same command again" in str(error) else 8)


def test_a_full_disk_says_so_and_loses_nothing(sources: list[str], tmp_path: Path) -> None:
    assert in_fork(limited, sources, tmp_path / "out") == 7
    assert not (tmp_path / "out" / "manifest.json").exists()
    for out in ("out", "whole"):
        prepare(sources, tmp_path / out, tokenizer="bytes", shard_tokens=5000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_in_use_is_an_error(sources: list[str], tmp_path: Path) -> None:
    with lock(tmp_path / "out"), pytest.raises(ValueError, match="another process works in"):
        prepare(sources, tmp_path / "out")


@pytest.mark.parametrize("field", ["text", "txt"])
@pytest.mark.parametrize("tokenizer", ["bytes", 300])
def test_input_that_cannot_be_read_leaves_nothing_behind_but_whole_shards(
    field: str, tokenizer: str | int, tmp_path: Path
) -> None:
    bad = jsonl(tmp_path / "bad.jsonl", TEXTS)
    bad.write_text(bad.read_text() + "{\n")
    (tmp_path / "empty").mkdir()
    message = r"bad\.jsonl:301 must be one JSON .*; repair it|field must be one of"
    for out in (tmp_path / "new" / "out", tmp_path / "empty"):
        with pytest.raises(ValueError, match=message):
            prepare([str(bad)], out, field=field, tokenizer=tokenizer)
    assert {path.name for path in tmp_path.rglob("*")} <= {"bad.jsonl", "empty"}
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            prepare([str(bad)], tmp_path / "out", field=field, tokenizer="bytes", shard_tokens=2000)
    assert (len([*tmp_path.glob("out/train-0000[0-5].bin")]) == 6) == (field == "text")
