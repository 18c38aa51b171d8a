"""`farspan eval … --out` replaces a result with --force alone, and says so before it begins."""

import json
from pathlib import Path

import pytest

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer
from tests.command_line import called

ARGUMENTS = {
    "ppl": ["--text", "nowhere.txt"],
    "positions": ["--text", "nowhere.txt"],
    "passkey": [],
    "retrieval": [],
    "pairs": ["--pairs", "nowhere.jsonl"],
    "bits": ["--text", "nowhere.txt"],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_there_is_kept_without_force(name: str, tmp_path: Path) -> None:
    """Before the model, the text and the pairs are looked for, none of which is there."""
    out = tmp_path / "o.json"
    out.write_text("{}")
    status, _, err = called("eval", name, tmp_path / "nowhere", *ARGUMENTS[name], "--out", out)
    assert (status, out.read_text()) == (2, "{}")
    assert err == f"farspan: {str(out)!r} exists; add --force to replace it, or choose another name\n"
    status, _, err = called("eval", name, tmp_path / "nowhere", *ARGUMENTS[name], "--out", out, "--force")
    assert (status, out.read_text()) == (2, "{}")
    assert "nowhere" in err
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_out_that_cannot_be_written_is_noticed_before_any_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path, tmp_path / "file" / "o.json"):
        status, _, err = called("eval", name, tmp_path / "nowhere", *ARGUMENTS[name], "--out", out, "--force")
        assert status == 2
        assert f"write {out}" in err
        assert err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_failed_command_leaves_no_folder_for_its_result(name: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "deep" / "o.json"
    status, _, err = called("eval", name, tmp_path / "nowhere", *ARGUMENTS[name], "--out", out)
    assert status == 2
    assert "nowhere" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stride", 0], "Invalid value for '--stride': "),
        (["--stride=-3"], ", got -3; see 'farspan eval ppl --help'"),
        (["--scaling", "ntk4"], "--scaling must be own, none, ntk-F, dynamic_ntk-F"),
        (["--lengths", "1"], "--lengths must be at least 2, got [1]"),
        (["--text-tokens", 1000], "--text-tokens must be at least the longest window 2048, got 1000"),
    ],
)
def test_a_bad_option_is_named_with_its_value(arguments: list[object], said: str, tmp_path: Path) -> None:
    status, _, err = called("eval", "ppl", tmp_path, "--text", "nowhere.txt", *arguments)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_run_is_not_taken_for_its_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    status, _, err = called("eval", "passkey", tmp_path)
    assert status == 2
    assert f"give {str(tmp_path / 'model')!r}" in err


def test_a_result_says_what_made_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words and words " * 9)
    FarspanForCausalLM(FarspanConfig.preset("tiny", vocab_size=257, num_hidden_layers=1)).save_pretrained(
        tmp_path / "model"
    )
    load_tokenizer("bytes").save(tmp_path / "model")
    given = ["bits", tmp_path / "model", "--text", tmp_path / "a.txt", "--out", tmp_path / "o.json"]
    status, _, err = called("eval", *given)
    assert status == 0, err
    result = json.loads((tmp_path / "o.json").read_text())
    assert (result["schema"], result["kind"]) == (2, "bits")
    assert result["command"] == " ".join(map(str, ["farspan", "eval", *given]))
    assert len(result["model_fingerprint"]) == 64
