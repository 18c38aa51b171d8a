"""Scalings, training lengths and reaches that stages give a model: kept, stretched, compounded, or wrong."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.evaluation import scaling_of as law_of
from farspan.finetune import finetune
from farspan.finetune.run import begun, lengthened
from tests.finetune.folders import FAR_UNDER_NTK, Folders, recipe, weights
from tests.helpers import losses


def test_a_stage_of_far_positions_keeps_its_training_length_and_scaling(folders: Folders, tmp_path: Path) -> None:
    _, coca, source = folders
    near = finetune(coca, {source: 1.0}, recipe({"objective": {"logit-kl": 1.0}}), tmp_path / "near")
    done = finetune(coca, {source: 1.0}, recipe(FAR_UNDER_NTK), tmp_path / "far")
    config = FarspanForCausalLM.from_pretrained(done).config
    assert (config.train_length, law_of(config)) == (16, "dynamic_ntk-4")
    logarithmic = replace(recipe(FAR_UNDER_NTK), log_length=True)
    same = finetune(coca, {source: 1.0}, logarithmic, tmp_path / "log")
    assert law_of(FarspanForCausalLM.from_pretrained(same).config) == "dynamic_ntk-4+log"
    assert torch.equal(weights(same)["model.norm.weight"], weights(done)["model.norm.weight"])  # trained without
    assert not torch.equal(weights(near)["model.norm.weight"], weights(done)["model.norm.weight"])


FAR = recipe({"reach": 4, "rope_parameters": {"rope_type": "linear"}}).stages[0]


@pytest.mark.parametrize(
    "options", [{"attention": "rope", "log_length": True}, {"attention": {"kind": "coca", "window": 8}}], ids=str
)
def test_far_positions_raise_where_they_would_mean_something_else(options: dict) -> None:
    with pytest.raises(ValueError, match=r"reach of stage s0 must be 1 for a model with windows.* got 4"):
        lengthened(FarspanConfig.preset("tiny", train_length=16, **options), FAR)


def test_a_factor_follows_from_what_positions_reach() -> None:
    assert law_of(lengthened(FarspanConfig.preset("tiny", train_length=16), FAR)) == "linear-4"


@pytest.mark.parametrize("said", [True, False])
def test_stretching_follows_the_rows_and_compounds(said: bool, folders: Folders, tmp_path: Path) -> None:
    """32 → 64 → 128 is factor 4, whether or not the stages say what the training length is."""
    stages = recipe(
        *(
            {"length": n, "train_length": n if said else 0, "rope_parameters": {"rope_type": "linear"}}
            for n in (64, 128)
        )
    ).stages
    begun(folders[1], stages[0]).save_pretrained(tmp_path / "once")
    twice, plain = begun(tmp_path / "once", stages[1]), begun(folders[1], stages[1])
    assert twice.config.rope_parameters["factor"] == 4.0
    assert twice.config.rotary() == plain.config.rotary() == plain.model.layers[0].self_attn.rotary
    assert plain.config.train_length == 128


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {"attention": "hybrid-rope", "window": 8, "global_every": 2}),
        ("linear", {"attention": "rope", "log_length": "learned"}),
        ("", {"attention": "hybrid-rope", "window": 8, "global_every": 2}),
        ("", {"attention": "pope", "log_length": True}),
        ("", {"attention": "coca-exact", "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
        ("", {"attention": "cosformer", "cosformer_beyond": "decay"}),
    ],
    ids=lambda case: case if isinstance(case, str) else case["attention"],
)
def test_a_longer_training_length_survives_saving(kind: str, options: dict, tmp_path: Path) -> None:
    """What is trained is what is saved: temperature, angles and cosFormer's M follow the new length."""
    FarspanForCausalLM(FarspanConfig.preset("tiny", train_length=16, **options)).save_pretrained(tmp_path / "before")
    stage = {"train_length": 64, "length": 64, **({"rope_parameters": {"rope_type": kind}} if kind else {})}
    trained = begun(tmp_path / "before", recipe(stage).stages[0]).eval()
    trained.save_pretrained(tmp_path / "after")
    ids = torch.randint(1, 257, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, now, reloaded = (
            model(ids).logits
            for model in (
                FarspanForCausalLM.from_pretrained(tmp_path / "before").eval(),
                trained,
                FarspanForCausalLM.from_pretrained(tmp_path / "after").eval(),
            )
        )
    assert torch.equal(now, reloaded)
    assert not torch.equal(now, before)


def test_dynamic_scaling_measures_against_the_stages_own_training_length(folders: Folders) -> None:
    stage = recipe({"train_length": 16, "length": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})
    assert begun(folders[1], stage.stages[0]).config.rotary().scaling.train_length == 16


def test_rows_longer_than_512_can_be_distilled(folders: Folders, tmp_path: Path) -> None:
    _, coca, source = folders
    long = {"length": 600, "batch_size": 1, "passkey_share": 0.05, "optimizer": {"steps": 3, "accumulation": 1}}
    long["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0}
    stages = recipe(*({**long, "objective": {name: 1.0}} for name in ("attention-output", "logit-kl")))
    finetune(coca, {source: 1.0}, stages, tmp_path / "out")
    assert [len(losses(tmp_path / "out" / stage)) for stage in ("stage-1-s0", "stage-2-s1")] == [3, 3]


def test_a_scaling_does_not_silently_replace_another(folders: Folders) -> None:
    stretched = begun(folders[1], recipe({"length": 64, "rope_parameters": {"rope_type": "linear"}}).stages[0])
    dynamic = recipe({"length": 128, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}).stages[0]
    with pytest.raises(ValueError, match="must keep to the model's own scaling, linear-2, got 'dynamic'; leave them"):
        lengthened(stretched.config, dynamic)
