"""`farspan eval … --out` replaces a result with --force alone, and says so before it begins."""

from pathlib import Path

import pytest

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
def test_where_a_result_goes_is_checked_before_any_work(name: str, tmp_path: Path) -> None:
    """Model, text and pairs are not there, and are looked for only where the result can be written."""
    kept, deep = tmp_path / "o.json", tmp_path / "new" / "deep" / "o.json"
    kept.write_text("{}")
    there = f"farspan: {str(kept)!r} exists; add --force to replace it, or choose another name\n"
    for out, force, said in (
        (kept, [], there),
        (kept, ["--force"], "nowhere"),
        (tmp_path, ["--force"], f"write {tmp_path}"),
        (kept / "o.json", ["--force"], f"write {kept / 'o.json'}"),
        (deep, [], "nowhere"),
    ):
        status, _, err = called("eval", name, tmp_path / "nowhere", *ARGUMENTS[name], "--out", out, *force)
        assert (status, err.count("\n"), kept.read_text()) == (2, 1, "{}")
        assert said in err
        assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stride", 0], "Invalid value for '--stride': "),
        (["--stride=-3"], ", got -3; see 'farspan eval ppl --help'"),
        (["--scaling", "ntk4"], "--scaling must be own, none, ntk-F, dynamic_ntk-F"),
        (["--lengths", "1"], "--lengths must be at least 2, got 1"),
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
