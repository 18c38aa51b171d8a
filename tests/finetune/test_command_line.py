"""`farspan finetune`: bad arguments, what Ctrl-C leaves, and what it makes."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

import farspan.training.loop as loop
from farspan.finetune.recipe import NAMES
from tests.checkpoints.sources import edit_config
from tests.command_line import called
from tests.finetune.folders import Folders

Finetune = Callable[..., tuple[int, str, str]]


@pytest.fixture
def finetune(folders: Folders, tmp_path: Path) -> Finetune:
    """The command for the CoCA copy to tmp_path / "out": exit status, stdout, stderr. DATA stands for its tokens."""
    _, coca, source = folders

    def run(*options: object, model: Path = coca) -> tuple[int, str, str]:
        given = [str(option).replace("DATA", source) for option in options]
        data = [] if "--data" in given else ["--data", source]
        return called("finetune", model, *given, *data, "--out", tmp_path / "out")

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "distil"], "did you mean 'distill'"),
        (["--data", "gone"], "data must be a folder with manifest.json, got 'gone'"),
        (["--recipe", "TOML"], "configuration key stages[0].lenght"),
        (["--data", "DATA=none"], "--data must be DIR or DIR=WEIGHT"),
        (["--recipe", "paper", "--precision", "fp8"], "run.precision must be 'auto', 'bf16' or 'fp32', got 'fp8'"),
    ],
)
def test_bad_arguments_get_one_line(arguments: list[str], message: str, finetune: Finetune, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[[stages]]\nname = 'a'\nlenght = 5")
    status, plan, said = finetune(*(a.replace("TOML", str(tmp_path / "mine.toml")) for a in arguments))
    assert (status, plan) == (2, "")
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_help_names_every_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, shown, _ = called("finetune", "--help")
    assert status == 0
    assert set(NAMES) <= set(shown.replace(",", " ").split())


def test_a_model_of_another_family_is_named_as_such_and_not_for_its_teacher(
    folders: Folders, finetune: Finetune, tmp_path: Path
) -> None:
    copytree(folders[1], tmp_path / "model")
    edit_config(tmp_path / "model", model_type="gpt2")
    (tmp_path / "model" / "conversion.json").unlink()
    status, _, said = finetune(model=tmp_path / "model")
    assert status == 2
    assert "config.json's model_type must be one of" in said


def test_ctrl_c_says_where_it_stopped_and_the_same_command_goes_on(
    finetune: Finetune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--recipe", "paper", "--length", 16, "--tokens", 240]
    original = loop._Run.advance

    def press(self: loop._Run, step: int) -> None:
        original(self, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop._Run, "advance", press)
    status, _, said = finetune(*given)
    assert (status, said) == (130, "interrupted; stopped at step 3; the same command continues\n")
    assert "stopping after this training step; Ctrl-C again stops sooner, back at step 0\n" in capfd.readouterr().err
    monkeypatch.undo()
    assert finetune(*given)[0] == 0
    rows = json.loads((tmp_path / "out" / "recipe.json").read_text())["rows"]
    assert [row["optimizer"]["steps"] for row in rows] == [5] * 3


def test_the_command_line_applies_a_recipe(finetune: Finetune, tmp_path: Path) -> None:
    sizes = ["--length", 246, "--tokens", 6400]  # the shortest rows that a passkey text of bytes fits into
    status, said, err = finetune("--data", "DATA=2", *sizes)
    assert status == 0, err
    rows = json.loads((tmp_path / "out" / "recipe.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["attention", "logits", "text"]
    for row in rows:  # 32 rows a step at the recipe's own budget
        steps = row["optimizer"]["steps"]
        assert f"stage {row['name']}: {steps} steps of 1 × 246 tokens\n" in said
        assert row["batch_size"] == 1
    assert all(row["name"] in said for row in rows)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
