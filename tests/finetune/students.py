"""A small RoPE teacher that has learnt something, its CoCA student, and folders of both."""

from copy import deepcopy

import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.checkpoints import replace_attention
from farspan.layers import AttentionSpec

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 257, "train_length": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def teacher(**options: object) -> FarspanForCausalLM:
    """A RoPE model whose scores are not all alike."""
    model = FarspanForCausalLM(FarspanConfig(**{**SHAPE, **HEADS, "attention": "rope", **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    return model


def student(of: FarspanForCausalLM, attention: str | list[str] = "coca-exact") -> FarspanForCausalLM:
    """The same with CoCA from copied weights: far from its teacher."""
    model = deepcopy(of)
    for layer in range(model.config.num_hidden_layers):
        name = attention if isinstance(attention, str) else attention[layer]
        replace_attention(model, layer, AttentionSpec.parse(name))
    return model
