"""Small models for the tests of the analysis, and what a layer of theirs projects from a text."""

from typing import Any

import torch
from torch import Tensor

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.analysis.factors import Factors, walk

SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "train_length": 16}
KINDS: list[Any] = ["rope", "coca-exact", "coca-strict", "coca-slack", {"kind": "rope", "window": 7}]
N = 45


def small(attention: Any, **options: Any) -> FarspanForCausalLM:
    """A random model in float64, with weights large enough for attention to choose."""
    model = FarspanForCausalLM(FarspanConfig(attention=attention, **{**SIZES, "initializer_range": 0.3, **options}))
    return model.double().eval()  # type: ignore[no-any-return]


def text(length: int) -> Tensor:
    return torch.randint(0, 64, (length,))


@torch.no_grad()
def seen(model: FarspanForCausalLM, tokens: Tensor, index: int = 1) -> tuple[Factors, Tensor, Tensor]:
    """A layer's factors as the analysis sees them, and its projections q and k (or t) caught independently."""
    block: Any = model.model.layers[index]
    caught: list[Tensor] = []
    with block.input_layernorm.register_forward_hook(lambda *call: caught.append(call[2])):
        model(tokens[None])
    found: list[Factors] = []
    walk(model, tokens, [index], found.append)
    return (found[0], *block.self_attn.project(caught[0])[:2])


def same(got: Tensor, wanted: Tensor) -> None:
    """Equal up to rounding, of the largest value where that is above 1."""
    assert float((got.double() - wanted.double()).abs().max()) <= 1e-9 * max(1.0, float(wanted.abs().max()))
