"""A folder is written whole, with ordinary rights, or not at all: what is left when writing fails."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from farspan.convert import convert_folder
from farspan.convert.folder import whole_folder
from farspan.files import claim
from tests.command_line import farspan, started
from tests.convert.sources import saved


def test_a_full_disk_leaves_no_folder(tmp_path: Path) -> None:
    """A real write fails: the process may not make files of more than 4 kB."""
    saved(tmp_path / "source")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    done = farspan("convert", tmp_path / "source", "--out", tmp_path / "out", before=limit)
    assert done.returncode == 2
    assert "could not be written" in done.stderr
    assert "free some space" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_no_space_at_the_write_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "source")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("farspan.convert.folder.save_file", full)
    with pytest.raises(OSError, match=r"out '.*out' could not be written \(No space left on device\); free some"):
        convert_folder(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_ended_process_leaves_no_folder(tmp_path: Path) -> None:
    """SIGTERM reaches a real process while its files are written."""
    saved(tmp_path / "source")
    slow = (
        "import time, farspan.convert.folder as folder; write = folder.save_file\n"
        "def slowly(*options):\n    write(*options)\n    time.sleep(60)\nfolder.save_file = slowly"
    )
    with started("convert", tmp_path / "source", "--out", tmp_path / "out", before=slow) as running:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".out-*.part/whole/model.safetensors")):
            assert running.process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.process.terminate()
        assert running.wait(30).returncode == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("empty", [False, True], ids=["new", "empty"])
def test_what_a_killed_call_left_is_removed_and_a_living_ones_is_not(empty: bool, tmp_path: Path) -> None:
    saved(tmp_path / "source")
    out = tmp_path / "out"
    home = out if empty else tmp_path
    dead, alive, other = (home / f".{name}.part" for name in ("out-a1b2c3_d", "out-a1b2c3_e", "outer-a1b2c3_d"))
    for litter in (dead, alive) if empty else (dead, alive, other):
        (litter / "whole").mkdir(parents=True)
    with claim(alive / "lock"):
        if empty:
            with pytest.raises(ValueError, match="out must be a new or empty folder"):
                convert_folder(tmp_path / "source", out)
        else:
            convert_folder(tmp_path / "source", out)
        assert [path.exists() for path in (dead, alive, other)] == [False, True, not empty]
    if empty:
        convert_folder(tmp_path / "source", out)
        assert not alive.exists()
    assert (out / "model.safetensors").is_file()


def test_a_folder_that_holds_something_is_not_touched(tmp_path: Path) -> None:
    saved(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        convert_folder(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    convert_folder(tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_rights_are_those_of_the_umask(umask: int, tmp_path: Path) -> None:
    saved(tmp_path / "source")
    before = os.umask(umask)
    try:
        convert_folder(tmp_path / "source", tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o666 & ~umask}


def test_an_empty_folder_may_be_a_link_or_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "source")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    convert_folder(tmp_path / "source", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert_folder(tmp_path / "source", ".")
    names = {"config.json", "generation_config.json", "model.safetensors"}
    assert {p.name for p in (tmp_path / "there").iterdir()} == {p.name for p in Path().iterdir()} == names
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        convert_folder(tmp_path / "source", tmp_path / "broken")


def test_parents_made_for_a_run_that_fails_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "source")
    convert_folder(tmp_path / "source", tmp_path / "a" / "b" / "good")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("farspan.convert.folder.save_file", broken)
    with pytest.raises(OSError, match=r"could not be written \(Input/output error\); choose another folder"):
        convert_folder(tmp_path / "source", tmp_path / "a" / "c" / "d" / "out")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match="choose another folder"):
        convert_folder(tmp_path / "source", tmp_path / "empty")
    assert not any((tmp_path / "empty").iterdir())


def test_a_file_system_without_locks_is_no_reason_to_lose_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("farspan.files.fcntl.flock", no_locks)
    with whole_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
