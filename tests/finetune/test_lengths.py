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

LINEAR = {"rope_parameters": {"rope_type": "linear"}}
FAR = recipe({"reach": 4, **LINEAR}).stages[0]


def test_a_stage_of_far_positions_keeps_its_training_length_and_scaling(folders: Folders, tmp_path: Path) -> None:
    _, coca, source = folders
    near = finetune(coca, {source: 1.0}, recipe({"objective": {"logit-kl": 1.0}}), tmp_path / "near")
    done = finetune(coca, {source: 1.0}, recipe(FAR_UNDER_NTK), tmp_path / "far")
    config = FarspanForCausalLM.from_pretrained(done).config
    assert (config.train_length, law_of(config), config.rotary().scaling.train_length) == (16, "dynamic_ntk-4", 16)
    logarithmic = replace(recipe(FAR_UNDER_NTK), log_length=True)
    same = finetune(coca, {source: 1.0}, logarithmic, tmp_path / "log")
    assert law_of(FarspanForCausalLM.from_pretrained(same).config) == "dynamic_ntk-4+log"
    assert torch.equal(weights(same)["model.norm.weight"], weights(done)["model.norm.weight"])  # trained without
    assert not torch.equal(weights(near)["model.norm.weight"], weights(done)["model.norm.weight"])


@pytest.mark.parametrize(
    "options", [{"attention": "rope", "log_length": True}, {"attention": {"kind": "coca", "window": 8}}], ids=str
)
def test_far_positions_raise_where_they_would_mean_something_else(options: dict) -> None:
    with pytest.raises(ValueError, match=r"reach of stage s0 must be 1 for a model with windows.* got 4"):
        lengthened(FarspanConfig.preset("tiny", train_length=16, **options), FAR)


@pytest.mark.parametrize("said", [True, False])
def test_stretching_follows_the_rows_and_compounds(said: bool) -> None:
    """32 → 64 → 128 is factor 4, whether or not the stages say what the training length is."""
    rows = ({"length": n, "train_length": n if said else 0, **LINEAR} for n in (64, 128))
    first, second = recipe(*rows).stages
    config = FarspanConfig.preset("tiny", train_length=32)
    twice, once = lengthened(lengthened(config, first), second), lengthened(config, second)
    assert twice.rope_parameters["factor"] == 4.0
    assert twice.rotary() == once.rotary()
    assert twice.train_length == once.train_length == 128
    assert law_of(lengthened(FarspanConfig.preset("tiny", train_length=16), FAR)) == "linear-4"  # as far as positions


@pytest.mark.parametrize(
    ("more", "options"),
    [
        (LINEAR, {"attention": "hybrid-rope", "window": 8, "global_every": 2}),
        (LINEAR, {"attention": "rope", "log_length": "learned"}),
        ({}, {"attention": "hybrid-rope", "window": 8, "global_every": 2}),
        ({}, {"attention": "pope", "log_length": True}),
        ({}, {"attention": "coca-exact", "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
        ({}, {"attention": "cosformer", "cosformer_beyond": "decay"}),
    ],
    ids=lambda case: case.get("attention", "linear" if case else "plain"),
)
def test_a_longer_training_length_survives_saving(more: dict, options: dict, tmp_path: Path) -> None:
    """What is trained is what is saved: temperature, angles and cosFormer's M follow the new length."""
    before = FarspanForCausalLM(FarspanConfig.preset("tiny", train_length=16, **options))
    before.save_pretrained(tmp_path / "before")
    trained = begun(tmp_path / "before", recipe({"train_length": 64, "length": 64, **more}).stages[0])
    trained.save_pretrained(tmp_path / "after")
    models = before, trained, FarspanForCausalLM.from_pretrained(tmp_path / "after")
    ids = torch.randint(1, 257, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old, now, reloaded = (model.eval()(ids).logits for model in models)
    assert torch.equal(now, reloaded)
    assert not torch.equal(now, old)


def test_rows_longer_than_512_can_be_distilled(folders: Folders, tmp_path: Path) -> None:
    _, coca, source = folders
    long = {"length": 600, "batch_size": 1, "passkey_share": 0.05, "optimizer": {"steps": 3, "accumulation": 1}}
    long["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0}
    stages = recipe(*({**long, "objective": {name: 1.0}} for name in ("attention-output", "logit-kl")))
    finetune(coca, {source: 1.0}, stages, tmp_path / "out")
    assert [len(losses(tmp_path / "out" / stage)) for stage in ("stage-1-s0", "stage-2-s1")] == [3, 3]


def test_a_scaling_does_not_silently_replace_another() -> None:
    stretched = lengthened(FarspanConfig.preset("tiny", train_length=8), FAR)
    dynamic = recipe({"length": 128, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}).stages[0]
    with pytest.raises(ValueError, match="must keep to the model's own scaling, linear-8, got 'dynamic'; leave them"):
        lengthened(stretched, dynamic)
