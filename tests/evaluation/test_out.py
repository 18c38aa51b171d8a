"""`farspan eval … --out` replaces results of the same command alone, and says so before it begins."""

import json
from pathlib import Path

import pytest

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer
from farspan.results import GROUPS
from farspan_cli.app import app
from tests.command_line import called

ARGUMENTS = {
    "ppl": ["--text", "nowhere.txt"],
    "passkey": [],
    "pairs": ["--pairs", "nowhere.jsonl"],
    "bits": ["--text", "nowhere.txt"],
}
REFUSED = "farspan: out must be a new file or an earlier result of the same command, got"


def made_by(line: str) -> str:
    return json.dumps({"command": line, "rows": []})


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize(
    ("held", "maker"),
    [
        (made_by("farspan bench model --out o.json"), "made by 'farspan bench model --out o.json'"),
        (made_by("farspan eval other m --out o.json"), "made by 'farspan eval other m --out o.json'"),
        (made_by("farspan eval"), "made by 'farspan eval'"),
        (made_by(""), "made by ''"),
        ("# Notes", "which holds no result"),
    ],
)
def test_what_another_command_made_is_refused_before_any_work(name: str, held: str, maker: str, tmp_path: Path) -> None:
    """Before the model, the text and the pairs are looked for, none of which is there."""
    out = tmp_path / "o.json"
    out.write_text(held)
    status, _, err = called("eval", name, tmp_path / "nowhere", *ARGUMENTS[name], "--out", out)
    assert status == 2
    assert err == f"{REFUSED} {str(out)!r}, {maker}; choose another name\n"
    assert out.read_text() == held
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_out_that_cannot_be_written_is_noticed_before_any_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path, tmp_path / "file" / "o.json"):
        status, _, err = called("eval", name, tmp_path / "nowhere", *ARGUMENTS[name], "--out", out)
        assert status == 2
        assert err.startswith(f"farspan: out must take the result, could not write {out} (")
        assert err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_refused_command_leaves_no_folder_for_its_result(name: str, tmp_path: Path) -> None:
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
        (["--ntk-mode", "always"], "--ntk-mode must be one of 'per_query', 'per_request', got 'always'"),
    ],
)
def test_a_refused_option_is_named_with_its_value(arguments: list[object], said: str, tmp_path: Path) -> None:
    status, _, err = called("eval", "ppl", tmp_path, "--text", "nowhere.txt", *arguments)
    assert status == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_run_is_not_taken_for_its_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    status, _, err = called("eval", "passkey", tmp_path)
    assert status == 2
    assert f"give {str(tmp_path / 'model')!r}, the model of that run" in err


def test_the_same_command_replaces_its_result_whatever_its_arguments_were(tmp_path: Path) -> None:
    """Another model, arguments in another order, and options: it is one command as long as its words are."""
    (tmp_path / "a.txt").write_text("words and words " * 9)
    text, out = ["--text", tmp_path / "a.txt"], tmp_path / "o.json"
    for folder in ("one", "two"):
        config = FarspanConfig.preset("tiny", vocab_size=257, num_hidden_layers=1)
        FarspanForCausalLM(config).save_pretrained(tmp_path / folder)
        load_tokenizer("bytes").save(tmp_path / folder)
    seen = set()
    for given in (
        ["bits", tmp_path / "one", *text, "--out", out],
        ["bits", *text, "--out", out, "--length", 32, tmp_path / "two"],
        ["bits", tmp_path / "one", "--out", out, *text],
    ):
        status, _, err = called("eval", *given)
        assert status == 0, err
        seen.add(out.read_text())
        assert json.loads(out.read_text())["command"] == " ".join(map(str, ["farspan", "eval", *given]))
    assert len(seen) == 3
    status, _, err = called("eval", "ppl", tmp_path / "one", *text, "--lengths", 16, "--out", out)
    assert status == 2
    assert err.startswith(REFUSED)


def test_the_rule_knows_which_commands_have_commands_of_their_own() -> None:
    assert {group.name for group in app.registered_groups} == set(GROUPS)
