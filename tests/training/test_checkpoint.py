"""Checkpoints: damage is found, the newest intact one is used, and a failed write leaves the last good one."""

import os
import random
import shutil
from pathlib import Path

import pytest

from farspan.training import TrainingStoppedError, checkpoint, train
from farspan.training.checkpoint import CHECKSUMS, checkpoints, damage, newest_intact
from tests.processes import Started
from tests.training.runs import PowerCutError, config, cut_at, run_out_of_space, tokens

Stopped = tuple[str, Path, bytes]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Tokens, a run that was cut at step 9 and has checkpoints 4 and 8, and the weights of an uninterrupted one."""
    folder = tmp_path_factory.mktemp("runs")
    source = tokens(folder)
    with cut_at(9), pytest.raises(PowerCutError):
        train(config(source), folder / "cut")
    weights = (train(config(source), folder / "whole") / "model.safetensors").read_bytes()
    return source, folder / "cut", weights


@pytest.fixture
def run(stopped: Stopped, tmp_path: Path) -> Path:
    """A copy of the cut run."""
    return Path(shutil.copytree(stopped[1], tmp_path / "run"))


def truncate(path: Path, size: int) -> None:
    with path.open("rb+") as file:
        file.truncate(size)


DAMAGE = {
    "truncated model": ("model.safetensors", lambda path: truncate(path, 3000)),
    "empty model": ("model.safetensors", lambda path: truncate(path, 0)),
    "no optimizer": ("optimizer.safetensors", Path.unlink),
    "no config": ("config.json", Path.unlink),
    "broken trainer": ("trainer.json", lambda path: path.write_text('{"step": 8, ')),
    "no checksums, as in version 0.1": (CHECKSUMS, Path.unlink),
    "deep checksums": (CHECKSUMS, lambda path: path.write_text("[" * 100_000)),
    "a list of checksums": (CHECKSUMS, lambda path: path.write_text("[]")),
    "no entries": (CHECKSUMS, lambda path: path.write_text("{}")),
    "a file without a checksum": ("adapter_config.json", Path.touch),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_for_an_older_one(
    name: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest, older = run / "checkpoint-00000008", run / "checkpoint-00000004"
    file, spoil = DAMAGE[name]
    spoil(newest / file)
    (run / "checkpoint-²").mkdir()  # a digit to Python, and no checkpoint
    (run / "checkpoint-00000099").touch()
    assert newest_intact(run) == older
    said = "config.json" if name == "no entries" else file  # the first of all files
    assert f"skipped damaged checkpoints (checkpoint-00000008: {said} " in caplog.text
    assert checkpoints(run) == [older]
    truncate(older / "model.safetensors", 10)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is intact \(checkpoint-00000004: .*\); remove them"):
        newest_intact(run)
    assert older.is_dir()


def test_a_checkpoint_under_another_step_is_damaged(run: Path) -> None:
    """It would finish the run with weights of the earlier step."""
    (run / "checkpoint-00000004").rename(run / "checkpoint-00000012")
    assert newest_intact(run) == run / "checkpoint-00000008"
    assert damage(run / "checkpoint-00000012.damaged") is not None


def test_every_flipped_bit_is_found(run: Path) -> None:
    newest, draw = run / "checkpoint-00000008", random.Random(0)
    files = sorted(path for path in newest.iterdir())
    for _ in range(200):
        path = draw.choice(files)
        held = bytearray(path.read_bytes())
        place = draw.randrange(len(held))
        held[place] ^= 1 << draw.randrange(8)
        intact = path.read_bytes()
        path.write_bytes(held)
        assert damage(newest) is not None, (path.name, place)
        path.write_bytes(intact)
    assert damage(newest) is None


def test_a_run_goes_on_from_the_intact_checkpoint_to_the_same_weights(
    stopped: Stopped, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truncate(run / "checkpoint-00000008" / "model.safetensors", 3000)
    model = train(config(stopped[0]), run)
    assert "the run continues from checkpoint-00000004" in caplog.text
    assert (model / "model.safetensors").read_bytes() == stopped[2]
    assert not list(run.glob("checkpoint-*"))


def test_others_may_read_what_is_trained(stopped: Stopped) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for path in (stopped[1] / "checkpoint-00000008").iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path.name


def test_a_full_disk_keeps_the_last_checkpoint(stopped: Stopped, tmp_path: Path) -> None:
    """A limit on file sizes stops safetensors itself, whose error is of its own kind."""
    with Started(run_out_of_space, str(tmp_path), stopped[0]) as running:
        done = running.wait()
    assert done.returncode == 1
    assert "checkpoint-00000008 could not be written" in done.stderr
    assert "the last good checkpoint is" in done.stderr
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-00000004"]
    assert not list(tmp_path.glob("*.part"))


def test_weights_that_are_not_finite_are_never_saved(
    stopped: Stopped, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = checkpoint.gather

    def poisoned(*arguments):  # type: ignore[no-untyped-def]
        weights, moments = gather(*arguments)
        next(iter(weights.values()))[0] = float("nan")
        return weights, moments

    monkeypatch.setattr(checkpoint, "gather", poisoned)
    with pytest.raises(TrainingStoppedError, match=r"weight \S+ is not finite after step 11; .*checkpoint-00000008"):
        train(config(stopped[0]), run)
    assert not list(run.glob("*.part"))
