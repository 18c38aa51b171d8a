"""The notebooks run from top to bottom, at toy size, and their models are those that the text describes."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parent.parent / "docs" / "notebooks"
TOY = {"LENGTH": 16, "LONG": 128, "STEPS": 20, "BATCH": 4}


def run(name: str) -> dict[str, Any]:
    """Execute the code cells, with toy values after the cell of parameters, and return what they define."""
    names: dict[str, Any] = {}
    for cell in json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), name, "exec"), names)
            if "parameters" in cell["metadata"].get("tags", []):
                assert TOY.keys() <= names.keys()
                names |= TOY
    return names


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")


def test_train_short_read_long(capsys: pytest.CaptureFixture[str]) -> None:
    models = run("train-short-read-long.ipynb")["models"]
    assert [spec.name for spec in models["RoPE"].config.attention_specs] == ["rope"] * 4
    assert [spec.window for spec in models["hybrid"].config.attention_specs] == [4, 4, 4, None]
    assert "of cache after 128 bytes" in capsys.readouterr().out


def test_look_inside(capsys: pytest.CaptureFixture[str]) -> None:
    run("look-inside.ipynb")
    assert "CoCA: 0% of the angles lie past π" in capsys.readouterr().out
