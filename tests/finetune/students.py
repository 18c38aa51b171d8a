"""A small RoPE teacher that has learnt something, its CoCA student, and folders of both."""

from copy import deepcopy

import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.checkpoints import Target, give_attention

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


def student(of: FarspanForCausalLM, attention: object = "coca-exact") -> FarspanForCausalLM:
    """The same with CoCA from copied weights: far from its teacher."""
    model = deepcopy(of)
    give_attention(model, Target(attention))  # type: ignore[arg-type]
    return model
