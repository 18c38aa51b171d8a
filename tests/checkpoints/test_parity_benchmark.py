"""The benchmark that compares a conversion with transformers sees agreement, and would see its absence."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.checkpoints.sources import with_tokenizer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "llama_parity.py"


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_parity", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_conversion_and_its_witness_are_one_function(parity: ModuleType, tmp_path: Path) -> None:
    rows = parity.compare(with_tokenizer(tmp_path), "some words in a row", 16, 5)
    assert rows[0] == {
        "kind": "weights",
        "witness": "transformers' safetensors reader",
        "different": [],
        "ours_alone": [],
    }
    wide = next(row for row in rows if row.get("arithmetic") == "float64, norms and angles too")
    assert wide["largest_difference"] <= 1e-12
    assert [row["of"] for row in rows if row.get("against") == "theirs in float64"] == [
        "ours",
        "theirs on SDPA",
        "theirs eager",
    ]
    assert rows[-1]["same"]


def test_another_weight_is_seen(parity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = parity.from_pretrained

    def wrong(*options: object, **settings: object) -> torch.nn.Module:
        model = right(*options, **settings)
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[0].neg_()
        return model

    monkeypatch.setattr(parity, "from_pretrained", wrong)
    rows = parity.compare(with_tokenizer(tmp_path), "some words in a row", 16, 5)
    assert rows[0]["different"] == ["model.layers.1.self_attn.k_proj.weight"]
    assert next(row for row in rows if "float64, norms" in row.get("arithmetic", ""))["largest_difference"] > 1e-6
