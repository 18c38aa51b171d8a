"""Run a model over a sequence and visit each rotary layer: one layer's queries and keys exist at a time."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from farspan.analysis.factors import Factors, factors
from farspan.errors import require
from farspan.layers import Attention
from farspan.modeling_farspan import FarspanForCausalLM

Visit = Callable[[Factors, Tensor], None]
"""Called with a layer's factors and the norms of the residual that entered it, (m)."""


def rotary_layers(model: FarspanForCausalLM) -> list[int]:
    """Layers whose scores turn with position; refuses a model that has none, and one that is not causal."""
    require(model.config.causal, "model must be causal, got a bidirectional encoder; its keys stand on both sides")
    specs = model.config.attention_specs
    found = [i for i, spec in enumerate(specs) if spec.rotary and spec.kind in ("rope", "coca")]
    kinds = ", ".join(dict.fromkeys(spec.name for spec in specs))
    require(
        bool(found),
        f"model must have rotary layers with a softmax to look at, got {kinds}; choose a RoPE or CoCA model",
    )
    return found


@torch.no_grad()
def walk(model: FarspanForCausalLM, tokens: Tensor, layers: Collection[int], visit: Visit) -> Tensor:
    """Read one text (m) whole, calling `visit` at each of the layers in order; returns the last hidden states.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope"))
    >>> out = walk(model, torch.arange(9), [0, 3], lambda made, _: print(made.layer, tuple(made.query.shape)))
    0 (4, 9, 16)
    3 (4, 9, 16)
    """
    hidden = model.model.embed_tokens(tokens[None].to(model.device))
    context = model.model.context(hidden, rotary_length=tokens.shape[0])
    for index, block in enumerate(model.model.layers):
        if index in layers:
            layer: Attention = block.self_attn
            q, k, _ = layer.project(block.input_layernorm(hidden))
            _check_finite(hidden, f"before layer {index}")
            _check_finite(q, f"in layer {index}")
            _check_finite(k, f"in layer {index}")
            visit(factors(layer, index, q, k), torch.linalg.vector_norm(hidden[0], dim=-1))
        hidden = block(hidden, context)
    hidden = model.model.norm(hidden)
    _check_finite(hidden, "after the last layer")
    return hidden


def _check_finite(x: Tensor, where: str) -> None:
    require(
        bool(x.isfinite().all()),
        f"activations must be finite, got NaN or inf {where}; check the checkpoint and its dtype",
    )
