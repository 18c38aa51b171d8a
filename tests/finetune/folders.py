"""Folders that a recipe is applied to: text as tokens, a RoPE original, and its CoCA copy."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from farspan.convert import convert_folder
from farspan.finetune import Recipe
from farspan.training import TrainConfig, train
from tests.training.runs import tokens

Folders = tuple[Path, Path, str]
"""The original, its CoCA copy, and the tokens."""
OPTIMIZER = {"steps": 8, "peak_lr": 3e-3, "end_lr": 3e-4, "weight_decay": 0.0, "accumulation": 1}
FAR_UNDER_NTK = {
    "objective": {"logit-kl": 1.0},
    "reach": 8,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
    "train_length": 16,
}


def recipe(*stages: dict[str, Any]) -> Recipe:
    """Small stages, each with only its differences given."""
    common = {"length": 16, "batch_size": 4, "optimizer": OPTIMIZER}
    return Recipe.parse({"stages": [{"name": f"s{i}", **common, **stage} for i, stage in enumerate(stages)]})


def made(folder: Path) -> Folders:
    """(original, converted, tokens): an original that was trained a little on the text."""
    source = tokens(folder)
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    config = {
        "model": {"preset": "tiny", "attention": "rope", "options": shape},
        "data": {"sources": {source: 1.0}, "length": 32, "batch_size": 16},
        "optimizer": {"steps": 60, "peak_lr": 1e-2, "accumulation": 1},
    }
    original = train(TrainConfig.parse(config), folder / "original")
    convert_folder(original, folder / "coca", "coca-exact")
    return original, folder / "coca", source


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
