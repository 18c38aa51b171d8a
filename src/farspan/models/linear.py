"""A linear attention layer inside the model: the tokens of one call, and sums for all before."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from farspan.errors import require
from farspan.layers.cosformer import CosformerAttention
from farspan.layers.linear import LinearAttention
from farspan.layers.linear_coca import LinearCocaAttention
from farspan.models.cache import StateLayer
from farspan.models.configuration import FarspanConfig
from farspan.models.frame import View


class FarspanLinearAttention(LinearAttention):
    """A linear layer with the place of :class:`FarspanAttention` in a block."""

    rotates_before_cache = False
    sliding_window = None
    layer_idx: int

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        view: View,
        attention_mask: None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        memory = None if past_key_values is None else self._memory(past_key_values)
        positions, padding = view.positions, view.padding_mask
        if isinstance(positions, tuple):  # of these the new tokens are ours
            positions = positions[0]
            if padding is not None and memory is not None and memory.max_length is not None:  # a mask of all slots
                slots = memory.get_seq_length() + torch.arange(hidden_states.shape[1], device=padding.device)
                padding = padding.index_select(1, slots)
        out, state = self.mix(
            *self.project(hidden_states),
            positions=positions,
            padding_mask=padding,
            documents=view.documents,
            state=None if memory is None else memory.state,
            return_state=memory is not None,
        )
        if memory is not None and state is not None:
            memory.advance(state, hidden_states.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def _memory(self, cache: Cache) -> StateLayer:
        layer = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        require(
            isinstance(layer, StateLayer),
            f"past_key_values must be a FarspanCache where there are linear layers, got {type(cache).__name__}; "
            "build FarspanCache(config)",
        )
        assert isinstance(layer, StateLayer)
        return layer


class FarspanCosformerAttention(FarspanLinearAttention, CosformerAttention):
    """:class:`CosformerAttention` in the model."""

    def __init__(self, config: FarspanConfig, layer_idx: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            max_length=config.cosformer_max_length or config.train_length,
            beyond=config.cosformer_beyond,
            activation=config.cosformer_activation,
            **_options(config, layer_idx),
        )
        self.layer_idx = layer_idx


class FarspanLinearCocaAttention(FarspanLinearAttention, LinearCocaAttention):
    """:class:`LinearCocaAttention` in the model (experimental)."""

    def __init__(self, config: FarspanConfig, layer_idx: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            rotary=config.rotary(),
            coca_activation=config.coca_activation,
            **_options(config, layer_idx),
        )
        self.layer_idx = layer_idx


LINEAR: dict[str, type[FarspanCosformerAttention] | type[FarspanLinearCocaAttention]] = {
    "cosformer": FarspanCosformerAttention,
    "linear-coca": FarspanLinearCocaAttention,
}
"""Kind of a linear layer → its module."""


def _options(config: FarspanConfig, layer_idx: int) -> dict[str, Any]:
    """What every linear layer takes from the configuration."""
    return {
        "nope": not config.attention_specs[layer_idx].rotary,
        "num_key_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "qkv_bias": config.qkv_bias,
        "out_bias": config.out_bias,
        "qk_norm_eps": config.rms_norm_eps if config.qk_norm else None,
        "causal": config.causal,
    }
