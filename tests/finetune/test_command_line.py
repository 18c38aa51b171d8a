"""`farspan finetune`: what it refuses, what Ctrl-C leaves, and what it makes."""

import json
import os
import signal
from pathlib import Path
from shutil import copytree

import pytest

import farspan.training.loop as loop
import farspan_cli
from farspan.finetune.recipe import NAMES
from tests.convert.sources import edit_config


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["farspan", "finetune", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        farspan_cli.main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "distil"], "did you mean 'distill'"),
        (["--length", "128"], "length of stage attention must be at least 246 tokens for a passkey text"),
        (
            ["--recipe", "paper", "--teacher", "nowhere"],
            "--teacher must be left out for a recipe that",
        ),
        (["--teacher", "nowhere"], "--teacher must exist, got 'nowhere'"),
        (["--data", "gone"], "data must be a folder with manifest.json, got 'gone'"),
        (["--recipe", "TOML"], "configuration key stages[0].lenght"),
        (["--data", "DATA=none"], "--data must be DIR or DIR=WEIGHT"),
        (["--recipe", "paper", "--precision", "fp8"], "--precision must be one of"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    arguments: list[str],
    message: str,
    folders: tuple[Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, coca, source = folders
    (tmp_path / "mine.toml").write_text("[[stages]]\nname = 'a'\nlenght = 5")
    given = [a.replace("DATA", source).replace("TOML", str(tmp_path / "mine.toml")) for a in arguments]
    given += [] if "--data" in given else ["--data", source]
    assert command(monkeypatch, coca, *given, "--out", tmp_path / "out") == 2
    plan, said = capsys.readouterr()
    assert plan == ""
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_help_names_every_recipe_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out.replace(",", " ").split()
    assert set(NAMES) <= set(shown)


def test_a_model_of_another_family_is_refused_as_such_and_not_for_its_teacher(
    folders: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, coca, source = folders
    copytree(coca, tmp_path / "model")
    edit_config(tmp_path / "model", model_type="gpt2")
    (tmp_path / "model" / "conversion.json").unlink()
    assert command(monkeypatch, tmp_path / "model", "--data", source, "--out", tmp_path / "out") == 2
    assert "config.json's model_type must be one of" in capsys.readouterr().err


def test_ctrl_c_says_where_it_stopped_and_the_same_command_goes_on(
    folders: tuple[Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, coca, source = folders
    given = [coca, "--data", source, "--recipe", "paper", "--length", 16, "--tokens", 240, "--out", tmp_path / "out"]
    original = loop._Run.advance

    def press(self, step: int) -> None:
        original(self, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop._Run, "advance", press)
    assert command(monkeypatch, *given) == 130
    assert capsys.readouterr().err.splitlines() == [
        "stopping after this training step; Ctrl-C again stops sooner, back at step 0",
        "interrupted; stopped at step 3; the same command continues",
    ]
    monkeypatch.setattr(loop._Run, "advance", original)
    assert command(monkeypatch, *given) == 0
    assert [
        row["optimizer"]["steps"] for row in json.loads((tmp_path / "out" / "recipe.json").read_text())["rows"]
    ] == [5] * 3


def test_the_command_line_applies_a_recipe(
    folders: tuple[Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, coca, source = folders
    sizes = ["--length", 246, "--tokens", 6400]  # the shortest rows that a passkey text of bytes fits into
    assert command(monkeypatch, coca, "--data", f"{source}=2", *sizes, "--out", tmp_path / "out") == 0
    rows = json.loads((tmp_path / "out" / "recipe.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["attention", "logits", "text"]
    said = capsys.readouterr().out
    for row in rows:  # 32 rows a step at the recipe's own budget
        steps = row["optimizer"]["steps"]
        assert f"stage {row['name']}: {steps} steps of 1 row of 246 tokens\n" in said
        assert row["batch_size"] == 1
    assert all(row["name"] in said for row in rows)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
