"""Run a model over a text and look at each rotary layer on the way: one layer's queries and keys exist at a time."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from farspan.analysis.factors import Factors, factors
from farspan.errors import require
from farspan.models import FarspanForCausalLM
from farspan.models.modeling import FarspanAttention

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
    residual: dict[int, Tensor] = {}

    def note_residual(_: nn.Module, arguments: tuple[Any, ...], index: int) -> None:
        hidden = arguments[0]
        require(
            bool(hidden.isfinite().all()),
            f"activations must be finite, got NaN or inf before layer {index}; check the checkpoint and its dtype",
        )
        residual[index] = torch.linalg.vector_norm(hidden[0], dim=-1)

    def look(attention: nn.Module, arguments: tuple[Any, ...], index: int) -> None:
        assert isinstance(attention, FarspanAttention)
        q, k, _ = attention.project(arguments[0])
        require(
            bool(q.isfinite().all() and k.isfinite().all()),
            f"activations must be finite, got NaN or inf in layer {index}; check the checkpoint and its dtype",
        )
        visit(factors(attention, index, q, k), residual.pop(index))

    hooks = []
    try:
        for index in layers:
            block = model.model.layers[index]
            attention: Any = block.self_attn
            hooks.append(block.register_forward_pre_hook(lambda m, a, i=index: note_residual(m, a, i)))
            hooks.append(attention.register_forward_pre_hook(lambda m, a, i=index: look(m, a, i)))
        out = model.model(tokens[None].to(model.device), use_cache=False, rotary_length=tokens.shape[0])
    finally:
        for hook in hooks:
            hook.remove()
    require(
        bool(out.last_hidden_state.isfinite().all()),
        "activations must be finite, got NaN or inf after the last layer; check the checkpoint and its dtype",
    )
    return out.last_hidden_state
