"""The shared helpers: files that are complete or absent, locks, settings in one line."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from farspan.utils import atomic_path, check_folder, check_writable, lock, parse, read_settings, write_text
from tests.processes import Started


@dataclass(frozen=True)
class Inner:
    steps: Annotated[int, Field(ge=1)] = 1
    rate: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    name: str | None = None


def test_parse_reads_whole_numbers_as_decimals_and_lists_as_tuples() -> None:
    values = {"inner": {"rate": 1, "betas": [0, 1], "weights": {"a": 2}}, "name": "x"}
    assert parse(Outer, values) == Outer(Inner(rate=1.0, betas=(0.0, 1.0), weights={"a": 2.0}), "x")


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"steps": 0}, "inner.steps must be greater than or equal to 1, got 0"),
        ({"steps": "3"}, "inner.steps must be a valid integer, got '3'"),
        ({"steps": 10**30}, "inner.steps must be a finite number"),
        ({"rate": float("nan")}, "inner.rate must be a finite number"),
        ({"weights": {"a": "b"}}, "inner.weights.a must be a valid number, got 'b'"),
        ({"step": 1}, "configuration key inner.step must be one of .* did you mean 'steps'"),
        (3, "inner must be an object, got 3"),
    ],
)
def test_parse_raises_one_line_that_names_key_and_value(inner: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse(Outer, {"inner": inner})
    assert "\n" not in str(error.value)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    write_text(out, "before")
    with suppress(LookupError), atomic_path(out) as temporary:
        temporary.write_text("half")
        raise LookupError
    assert out.read_text() == "before"
    assert [x.name for x in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_appears_whole_and_replaces_only_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new", tmp_path / "empty"):
        with atomic_path(out) as temporary:
            temporary.mkdir()
            (temporary / "x").write_text("1")
            assert not (out / "x").exists()
        assert (out / "x").read_text() == "1"
    with pytest.raises(OSError, match="cannot write"), atomic_path(out) as temporary:
        temporary.mkdir()
    assert (out / "x").read_text() == "1"


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "c.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write"):
        check_writable(tmp_path / "file" / "c.json")


def test_check_folder(tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    check_folder(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"with 'config\.json'"):
        check_folder(tmp_path)
    check_folder(tmp_path, "config.json")
    with pytest.raises(ValueError, match="got the file"):
        check_folder(tmp_path / "config.json")


def hold(folder: str) -> None:
    with lock(Path(folder)):
        (Path(folder) / "held").touch()
        time.sleep(60)


def test_a_lock_excludes_other_processes_and_ends_with_them(tmp_path: Path) -> None:
    with Started(hold, str(tmp_path)) as other:
        while not (tmp_path / "held").exists():
            assert other.process.is_alive()
            time.sleep(0.01)
        with pytest.raises(ValueError, match="another process works in"), lock(tmp_path):
            pass
    with lock(tmp_path):
        pass


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "= 3", "\udcff"])
def test_a_settings_file_that_cannot_be_read_gives_one_line(tmp_path: Path, text: str) -> None:
    for file in (tmp_path / "x.toml", tmp_path / "x.json"):
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(ValueError, match=r"config .* is not valid") as error:
            read_settings(file)
        assert "\n" not in str(error.value)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="must hold an object"):
        read_settings(file)
    file.write_text(json.dumps({"a": 1}))
    assert read_settings(file) == {"a": 1}
