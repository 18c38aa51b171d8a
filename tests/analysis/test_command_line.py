"""`farspan analyze` end to end, its page, and its errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.data import load_tokenizer
from tests.command_line import called

SIZES = {"vocab_size": 257, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 2, "train_length": 16, "initializer_range": 0.3}


def save(folder: Path, attention: Any) -> Path:
    torch.manual_seed(0)
    FarspanForCausalLM(FarspanConfig(attention=attention, **SIZES)).save_pretrained(folder)  # type: ignore[arg-type]
    load_tokenizer("bytes").save(folder)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models side by side in one folder, one with windows; the page is made once, after all, by a forced repetition."""
    folder = tmp_path_factory.mktemp("look")
    (folder / "book.txt").write_text("the cat sat on the mat and " * 10)
    options = ["--text", folder / "book.txt", "--queries", 4, "--text-tokens", 70, "--out", folder / "out"]
    mixed = save(folder / "mixed", [{"kind": "rope"}, {"kind": "rope", "window": 5}] * 2)
    slack = [save(folder / "slack", "coca-slack"), *options, "--label", "my-slack"]
    with pytest.MonkeyPatch.context() as no_page:
        no_page.setattr("farspan_cli.analyze._page", lambda out: [])
        assert called("analyze", save(folder / "rope", "rope"), *options)[0] == 0
        assert called("analyze", mixed, *options, "--label", "mixed", "--scalings", "none")[0] == 0
        assert called("analyze", *slack)[0] == 0
        status, _, error = called("analyze", *slack)
    assert status == 2
    assert "exists; add --force to replace it, or choose another name" in error
    assert called("analyze", *slack, "--force")[0] == 0
    return folder / "out"


def test_numbers_come_with_their_provenance(out: Path) -> None:
    data = json.loads((out / "results" / "analysis-rope.json").read_text())
    assert (data["schema"], data["kind"]) == (2, "analysis")
    assert data["rows"][0]["scalings"] == ["none", "linear", "ntk", "dynamic_ntk", "yarn"]
    assert data["command"].startswith("farspan analyze")
    kinds = {row["kind"] for row in data["rows"]}
    assert kinds == {"model", "census", "borders", "curve", "drift", "loss"}


def test_the_page_has_every_section_and_asks_for_nothing_from_outside(out: Path) -> None:
    page = (out / "report" / "index.html").read_text()
    for group in ("angles", "scores", "borders", "drift"):
        assert re.search(rf'id="\w+-{group}"', page)
    assert "RoPE" in page
    assert "my-slack" in page
    assert not re.search("<(script|link|iframe|img)", page)
    assert (out / "report" / "tables" / "analysis.md").read_text().count("0.0%") >= 4  # slack's


def test_figures_are_titled_labelled_and_have_units(out: Path) -> None:
    folder = out / "report" / "figures"
    names = {path.stem for path in folder.glob("*.svg")}
    assert names == {path.stem for path in folder.glob("*.png")}
    wanted = {"angles-layers", "angles-histogram-rope", "borders-rope"}
    wanted |= {f"{kind}-{label}" for kind in ("scores", "drift-even") for label in ("rope", "my-slack")}
    wanted |= {"scores-mixed"}  # window layers have no scores beyond their window
    assert wanted <= names
    assert "angles-histogram-my-slack" not in names  # all at 0: the layers' figure says so
    for name in names:
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", (folder / f"{name}.svg").read_text())
        words = [text for text in texts if len(text) > 4 and not re.fullmatch(r"[\d.,%−-]+", text)]
        assert len(words) >= 3, f"{name} must have a title and two labelled axes, got {words}"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("rope", ["--text", "no.txt"], "no.txt"),
        ("rope", ["--text", "book.txt", "--text", "no.txt", "--texts", "1"], "no.txt"),
        ("rope", ["--text", "short.txt"], "two windows = 32 tokens, got none that long"),
        ("rope", ["--text", "book.txt", "--scalings", "none,ntq"], "did you mean 'ntk'"),
        ("rope", ["--text", "book.txt", "--label", "a/b"], "label must be"),
        ("none", ["--text", "book.txt"], "does not exist"),
        ("alibi", ["--text", "book.txt"], "must have rotary layers"),
        ("empty", ["--text", "book.txt"], "config.json"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    model: str, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "book.txt").write_text("abc " * 50)
    (tmp_path / "short.txt").write_text("short")
    if model in ("rope", "alibi"):
        save(tmp_path / model, model)
    status, _, error = called("analyze", model, *options, "--out", "out")
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
