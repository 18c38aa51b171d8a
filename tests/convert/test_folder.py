"""`farspan convert` and `farspan generate` end to end, back-conversion, and what is left when writing fails."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.convert import convert_folder, from_pretrained
from farspan.convert.configuration import write_config
from farspan.convert.folder import save, whole_folder
from farspan.convert.text import stream
from farspan.data import load_tokenizer
from farspan.files import claim
from farspan_cli import main
from tests.convert.sources import CASES, edit_config, saved, tokens


def command(*arguments: object, before: str = "") -> list[str]:
    """What starts the command in a process of its own, after some Python."""
    code = f"{before}\nimport sys; sys.argv = ['farspan', *sys.argv[1:]]; from farspan_cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def called(*arguments: object) -> tuple[int, str, str]:
    """The command in this process: exit status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["farspan", *map(str, arguments)]),
        pytest.raises(SystemExit) as exit_,
    ):
        main()
    return int(exit_.value.code or 0), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("case", CASES)
def test_back_conversion_loses_nothing(case: str, tmp_path: Path) -> None:
    source, ids = saved(tmp_path / "source", case), tokens()
    convert_folder(tmp_path / "source", tmp_path / "ours")
    convert_folder(tmp_path / "ours", tmp_path / "back", to=source.config.model_type)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(source)
    with torch.no_grad():
        assert torch.equal(source(ids).logits, back(ids).logits)


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "source", "qwen2")
    monkeypatch.setattr("farspan.convert.folder.SHARD_BYTES", 20_000)
    convert_folder(tmp_path / "source", tmp_path / "ours", "coca-exact")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    ids, model = tokens(), from_pretrained(tmp_path / "source", "coca-exact")
    for again in (FarspanForCausalLM.from_pretrained(tmp_path / "ours"), from_pretrained(tmp_path / "ours", None)):
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("changes", "to", "message"),
    [
        ({"attention": "coca-exact"}, "llama", "would lose attention .* has rope, this one coca-exact"),
        ({"attention": {"kind": "rope", "window": 8}}, "llama", "would lose attention .* this one rope window 8"),
        ({"qkv_bias": True}, "llama", "would lose qkv_bias"),
        ({"qk_norm": True}, "mistral", "would lose qk_norm"),
        ({"log_length": True}, "llama", "would lose log_length .* has False, this one True"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "llama", "must be of a kind that transformers has"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "llama", "in mode per_query"),
        ({}, "lama", "did you mean 'llama'"),
    ],
)
def test_what_another_family_cannot_hold_is_refused(changes: dict, to: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_config(FarspanConfig.preset("tiny", **{"attention": "rope", **changes}), to)


def with_tokenizer(folder: Path) -> Path:
    """A tiny model with the byte tokenizer, whose ids stay inside its vocabulary for the letters used here."""
    model = saved(folder, "llama tied")
    model.resize_token_embeddings(257)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    edit_config(folder, eos_token_id=0)
    return folder


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


def test_text_comes_in_pieces_and_is_what_generate_gives(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path)
    model, tokenizer = from_pretrained(source), AutoTokenizer.from_pretrained(source)
    prompt = tokenizer("some words", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=0)
    expected = tokenizer.decode(ids[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    pieces = list(stream(source, "some words", max_new_tokens=30))
    assert "".join(pieces) == expected
    sampled = ["".join(stream(source, "some words", max_new_tokens=9, temperature=2.0, seed=s)) for s in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_prompt_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        list(stream(source, ""))
    with pytest.raises(ValueError, match="--chat needs a tokenizer with a chat template"):
        list(stream(source, "a", chat=True))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="must come with its tokenizer"):
        list(stream(source, "a"))


def test_a_full_disk_leaves_no_folder(tmp_path: Path) -> None:
    """A real write fails: the process may not make files of more than 4 kB."""
    saved(tmp_path / "source")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    started = command("convert", tmp_path / "source", "--out", tmp_path / "out", before=limit)
    done = subprocess.run(started, capture_output=True, text=True)
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
    with pytest.raises(OSError, match=r"--out '.*out' could not be written \(No space left on device\); free some"):
        convert_folder(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_ended_process_leaves_no_folder(tmp_path: Path) -> None:
    """SIGTERM reaches a real process while its files are written."""
    saved(tmp_path / "source")
    slow = (
        "import time, farspan.convert.folder as folder; write = folder.save_file\n"
        "def slowly(*options):\n    write(*options)\n    time.sleep(60)\nfolder.save_file = slowly"
    )
    process = subprocess.Popen(command("convert", tmp_path / "source", "--out", tmp_path / "out", before=slow))
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".out-*.part/whole/model.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
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
            with pytest.raises(ValueError, match="--out must be a new or empty folder"):
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
    with pytest.raises(ValueError, match="--out must be a new or empty folder"):
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
    with pytest.raises(ValueError, match="--out must be a new or empty folder"):
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


def test_settings_of_generate_come_along(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path)
    text = "".join(stream(source, "some words", max_new_tokens=12))
    ids = AutoTokenizer.from_pretrained(source)(text).input_ids
    settings = {"eos_token_id": [ids[5], 0], "temperature": 0.5, "top_p": 0.9, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(settings))
    held = from_pretrained(source).generation_config
    assert (held.eos_token_id, held.temperature, held.top_p) == ([ids[5], 0], 0.5, 0.9)
    assert len("".join(stream(source, "some words", max_new_tokens=12))) < len(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attention", "coca-exact", "--to", "llama"), "--to llama would lose attention"),
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
        (("--calibrate", tmp_path / "a.txt"), "--calibrate must give at least two windows of 16 tokens, got 0"),
    ):
        status, _, err = called("convert", source, "--attention", "coca-exact", *options, "--out", tmp_path / "out")
        assert status == 2
        assert message in err
        assert not (tmp_path / "out").exists()


def test_a_file_system_without_locks_is_no_reason_to_lose_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("farspan.files.fcntl.flock", no_locks)
    with whole_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]
