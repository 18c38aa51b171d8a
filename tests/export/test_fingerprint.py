"""Results are tied to the weights they were measured with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from farspan import FarspanForCausalLM
from farspan.checkpoints import convert_folder, export_as, fingerprint, open_source
from farspan.data import load_tokenizer
from tests.command_line import called
from tests.models.small import make


def test_results_of_another_model_raise_and_those_of_another_scaling_do_not(tmp_path: Path) -> None:
    """The other two have the same tensors in another attention, and the same attention with one number changed."""
    options = {"num_hidden_layers": 2, "vocab_size": 257, "train_length": 64}
    mine = make("coca-exact", dtype=torch.float32, **options)
    mine.save_pretrained(tmp_path / "mine")
    other = make("coca-exact", dtype=torch.float32, **options)
    other.load_state_dict(mine.state_dict())
    other.model.norm.weight.data[3] += 0.5
    other.save_pretrained(tmp_path / "moved")
    slack = make("coca-slack", dtype=torch.float32, **options)
    slack.load_state_dict(mine.state_dict())
    slack.save_pretrained(tmp_path / "slack")
    (tmp_path / "text.txt").write_text("words and words " * 20)
    for name in ("mine", "moved", "slack"):
        load_tokenizer("bytes").save(tmp_path / name)
        for scaling in ([], ["--scaling", "dynamic_ntk-4+log"]):
            measured = ("eval", "ppl", tmp_path / name, "--text", tmp_path / "text.txt", "--lengths", 64)
            out = tmp_path / f"{name}{len(scaling)}.json"
            assert called(*measured, "--text-tokens", 128, *scaling, "--out", out)[0] == 0
    for name in ("moved", "slack"):
        status, _, err = called(
            "export", tmp_path / "mine", "--results", tmp_path / f"{name}0.json", "--out", tmp_path / "x"
        )
        assert status == 2
        assert f"results must be about '{tmp_path / 'mine'}', got '{name}0.json' of another model" in err
        assert err.count("\n") == 1
        assert not (tmp_path / "x").exists()
    results = ["--results", tmp_path / "mine0.json", "--results", tmp_path / "mine2.json"]
    assert called("export", tmp_path / "mine", *results, "--dtype", "bfloat16", "--out", tmp_path / "hub")[0] == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "dynamic NTK 4, log length" in card


def digest(model: FarspanForCausalLM, folder: Path, **options: Any) -> str:
    model.save_pretrained(folder, **options)
    return fingerprint(open_source(folder))


@pytest.mark.parametrize("case", ["shards", "llama", "bfloat16"])
def test_a_fingerprint_is_that_of_the_numbers_and_not_of_the_file(case: str, tmp_path: Path) -> None:
    lengths = {"train_length": 64, "max_position_embeddings": 64}
    model = make("rope", dtype=torch.float32, num_hidden_layers=2, vocab_size=257, **lengths)
    if case == "bfloat16":
        model.to(torch.bfloat16).float()
    first, copy = digest(model, tmp_path / "model"), tmp_path / "copy"
    if case == "shards":
        assert digest(model, copy, max_shard_size="20KB") == first
        return
    if case == "llama":
        export_as(tmp_path / "model", copy, "llama")
    else:
        convert_folder(tmp_path / "model", copy, dtype=torch.bfloat16)
    assert fingerprint(open_source(copy)) == first


@pytest.mark.parametrize("change", [0.0, 0.5], ids=["equal", "another"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_equal_head_is_a_tied_one_however_it_is_stored(dtype: torch.dtype, change: float, tmp_path: Path) -> None:
    tied = make("rope", dtype=torch.float32, tie_word_embeddings=True).to(torch.bfloat16).float()
    apart = make("rope", dtype=torch.float32, tie_word_embeddings=False)
    apart.load_state_dict(tied.state_dict())
    apart.lm_head.weight.data[-1, -1] += change
    apart.lm_head.to(dtype)
    assert (digest(tied, tmp_path / "tied") == digest(apart, tmp_path / "apart")) == (change == 0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("attention", "change", "same"),
    [
        ("rope", {"rms_norm_eps": float(torch.tensor(1e-6))}, True),  # as a GGUF file keeps it
        ("rope", {"rms_norm_eps": 1e-5}, False),
        ("rope", {"rope_parameters": YARN | {"original_max_position_embeddings": 64}}, False),
        ("rope", {"rope_parameters": dict(YARN)}, True),
        ("hybrid", {"polar_activation": "relu"}, False),
        ("hybrid", {"log_length": "step"}, False),
    ],
    ids=str,
)
def test_a_fingerprint_tells_apart_what_computes_something_else(
    attention: str, change: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    usual = {"rope_parameters": YARN} if attention == "rope" else {"global_every": 2}
    options: dict[str, Any] = {"dtype": torch.float32, "rms_norm_eps": 1e-6, **usual}
    model, other = make(attention, **options), make(attention, **(options | change))
    other.load_state_dict(model.state_dict())
    assert (digest(model, tmp_path / "one") == digest(other, tmp_path / "other")) == same
