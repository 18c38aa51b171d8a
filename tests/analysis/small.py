"""Small models for the tests of the analysis, and what a layer of theirs projects from a text."""

from typing import Any

import torch
from torch import Tensor

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.analysis.factors import Factors, walk

SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "train_length": 16,
}


def small(attention: Any, **options: Any) -> FarspanForCausalLM:
    """A random model in float64, with weights large enough for attention to choose."""
    model = FarspanForCausalLM(FarspanConfig(attention=attention, **{**SIZES, "initializer_range": 0.3, **options}))
    return model.double().eval()  # type: ignore[no-any-return]


def text(length: int) -> Tensor:
    return torch.randint(0, 64, (length,))


def seen(model: FarspanForCausalLM, tokens: Tensor, index: int = 1) -> tuple[Factors, Tensor, Tensor]:
    """A layer's factors as the analysis sees them, and its projections q and k (or t) caught independently."""
    attention: Any = model.model.layers[index].self_attn
    caught: list[tuple[Tensor, Tensor, Tensor]] = []
    project = attention.project

    def remember(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        caught.append(project(x))
        return caught[-1]

    attention.project = remember
    try:
        with torch.no_grad():
            model(tokens[None])
    finally:
        del attention.project
    found: list[Factors] = []
    walk(model, tokens, [index], lambda made, _: found.append(made))
    return found[0], caught[0][0], caught[0][1]
