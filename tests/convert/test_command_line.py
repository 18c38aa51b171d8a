"""`farspan convert` and `farspan generate` end to end: what they make, say and refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from farspan.convert import convert_folder, from_pretrained
from farspan.convert.folder import save
from farspan.convert.text import stream
from tests.command_line import called
from tests.convert.sources import saved, with_tokenizer


@pytest.mark.parametrize("existed", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("command_name", ["convert", "export"])
def test_ctrl_c_after_the_folder_is_whole_says_so_and_before_asks_for_the_same_command(
    command_name: str, existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = with_tokenizer(tmp_path / "source"), tmp_path / "out"
    if existed:
        out.mkdir()
    place = {"convert": "farspan.convert.pretrained.save", "export": "farspan.export.folder.save"}[command_name]

    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def save_and_press(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(place, press)
    status, _, err = called(command_name, source, "--out", out)
    assert (status, err) == (130, "interrupted; give the same command again\n")
    monkeypatch.setattr(place, save_and_press)
    status, _, err = called(command_name, source, "--out", out)
    assert (status, err) == (130, f"interrupted; {out} is complete\n")
    assert from_pretrained(out).config.vocab_size == 257
    status, _, err = called(command_name, source, "--out", out)  # refused: what was there before is not called complete
    assert (status, "must be a new or empty folder" in err) == (2, True)


def test_help_says_what_attention_is_by_default_and_which_layers_are_kept() -> None:
    shown = " ".join(called("convert", "--help")[1].replace("│", " ").split())
    assert "Default: rope, or what a farspan folder has." in shown
    assert "those with the largest error of the stream" in shown


def test_convert_and_generate_from_the_command_line(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source")
    status, out, err = called(
        "convert", source, "--attention", "coca-slack,rope,coca-exact", "--out", tmp_path / "ours"
    )
    assert status == 0, err
    assert f"written: {tmp_path / 'ours'}" in out.replace("\n", "")
    assert err.startswith("farspan: 2 CoCA layers start from copied W_K and do not yet compute what the original did: ")
    assert "--calibrate TEXT" in err
    assert "farspan finetune" in err
    assert len(err.splitlines()) == 1
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == ["FarspanForCausalLM"]
    kinds = [spec.name for spec in from_pretrained(tmp_path / "ours", None).config.attention_specs]
    assert kinds == ["coca-slack", "rope", "coca-exact"]
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")("ab").input_ids == [98, 99]
    status, out, err = called("generate", tmp_path / "ours", "hello", "--max-new-tokens", 8)
    assert status == 0, err
    assert out == "".join(stream(tmp_path / "ours", "hello", max_new_tokens=8)) + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "coca-exact", "--to", "llama"), "to 'llama' would lose attention"),
        (("--calibrate", "a.txt"), "--calibrate needs --attention, the one to fit, got a.txt without"),
        (("--attention", "rope", "--global-every", 2), "global_every needs window, what the other layers see, got 2"),
        (
            ("--attention", "rope", "--window", 8, "--global-every", 4),
            "global_every must be 2 … 3",
        ),
        (
            ("--attention", "coca-exact", "--window", 8, "--keep-rope", 1),
            "keep_rope gives layers",
        ),
        (("--window", 8), "window needs attention, one name for all layers, got None"),
        (("--attention", "rope,coca-exact,rope", "--window", 8), "window needs attention, one name for all layers"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "source")

    def work(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("farspan.convert.pretrained.load", work)
    monkeypatch.setattr("farspan.convert.pretrained.calibration_windows", work)
    status, _, err = called("convert", tmp_path / "source", *options, "--out", tmp_path / "out")
    assert status == 2
    assert message in err


def test_a_caller_reads_of_its_own_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text needs attention, the one to fit, got a\.txt without; give for example"):
        convert_folder("source", tmp_path / "out", text=["a.txt"])
    saved(tmp_path / "source")
    with pytest.raises(ValueError, match=r"to must be one of .*, got 'lama'; did you mean 'llama'\?"):
        convert_folder(tmp_path / "source", tmp_path / "out", to="lama")


def test_calibration_from_the_command_line_leaves_its_report(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source")
    (tmp_path / "a.txt").write_text("some words in a row, and then others. " * 40)
    options = ("--calibrate", tmp_path / "a.txt", "--calibrate-tokens", 1024, "--calibrate-steps", 1, "--keep-rope", 1)
    options += ("--calibrate-length", 9)
    status, out, err = called("convert", source, "--attention", "coca-exact", *options, "--out", tmp_path / "ours")
    assert status == 0, err
    report = json.loads((tmp_path / "ours" / "calibration.json").read_text())
    assert report["schema"] == 1
    assert [row["layer"] for row in report["rows"]] == [0, 1, 2]
    assert sum(row["kept_rope"] for row in report["rows"]) == 1
    kinds = [spec.kind for spec in from_pretrained(tmp_path / "ours", None).config.attention_specs]
    assert kinds == ["rope" if row["kept_rope"] else "coca" for row in report["rows"]]
    assert "calibrated on 1,017 tokens" in out
    assert out.count("coca-exact") == 2
    assert "rope (kept)" in out
    assert "…" not in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "copied W_K" not in err


def test_local_and_global_layers_from_the_command_line(tmp_path: Path) -> None:
    source, ours = with_tokenizer(tmp_path / "source"), tmp_path / "ours"
    (tmp_path / "a.txt").write_text("some words in a row, and then others. " * 40)
    options = ("--calibrate", tmp_path / "a.txt", "--calibrate-tokens", 1024, "--calibrate-steps", 1)
    options += ("--window", 8, "--global-every", 2)
    status, _, err = called("convert", source, "--attention", "coca-exact", *options, "--out", ours)
    assert status == 0, err
    model = from_pretrained(ours, None)
    assert [(s.window, s.rotary) for s in model.config.attention_specs] == [(8, True), (None, False), (8, True)]
    status, _, err = called("generate", ours, "some words", "--max-new-tokens", 12)
    assert status == 0, err


def test_calibration_that_cannot_be_is_refused(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source")
    (tmp_path / "a.txt").write_text("short")
    for options, message in (
        (("--keep-rope", 1), "keep_rope needs calibration text"),
        (("--calibrate", tmp_path / "a.txt"), "calibration text must give at least two windows of 16 tokens, got 0"),
    ):
        status, _, err = called("convert", source, "--attention", "coca-exact", *options, "--out", tmp_path / "out")
        assert status == 2
        assert message in err
        assert not (tmp_path / "out").exists()
