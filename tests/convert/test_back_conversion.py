"""Folders that are written can be read again, here and by another family, and what that would lose is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.convert import convert_folder, from_pretrained
from farspan.convert.configuration import write_config
from tests.convert.sources import CASES, saved, tokens


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
