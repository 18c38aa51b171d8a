"""A layer's attention inside the model, behind transformers' attention interface: "farspan" is one of many there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farspan.errors import require
from farspan.layers.attention import Attention, sharpened
from farspan.models.configuration import FarspanConfig
from farspan.models.frame import View
from farspan.ops.coca.waves import Waves
from farspan.ops.phases import PhasePlan
from farspan.ops.rotary import Plan, working_dtype
from farspan.ops.softmax.reference import repeat_heads


def farspan_attention(
    module: "FarspanAttention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    view: View,
    plan: Plan | PhasePlan | Waves | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention implementation "farspan": this library's ops, with no N×N mask anywhere."""
    if view.slots is not None:
        require(
            query.dtype == key.dtype == value.dtype,
            f"past_key_values must hold what attention works in, {query.dtype}, got {key.dtype} and {value.dtype}; "
            "read and continue a text under the same autocast",
        )
        return module.decode(query, key, value, slots=view.slots, steps=view.steps).transpose(1, 2), None
    out = module.attend(
        query,
        key,
        value,
        plan=plan,
        positions=view.positions,
        padding_mask=view.padding_mask,
        documents=view.documents,
    )
    return out.transpose(1, 2), None


def eager_attention(
    module: "FarspanAttention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The attention implementation "eager": all weights, for those who want to look at them."""
    scores = query @ repeat_heads(key, query.shape[1]).mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=working_dtype(query.dtype)).to(query.dtype)
    return (weights @ repeat_heads(value, query.shape[1])).transpose(1, 2), weights


ALL_ATTENTION_FUNCTIONS.register("farspan", farspan_attention)


class FarspanAttention(Attention):
    """A layer's attention behind transformers' attention interface.

    The interface gets queries and keys in dot-product form, so every implementation can run them: "farspan" (ours, the
    default), "eager", "sdpa", "flash_attention_2", "vllm" … Only when a call crosses a doubling of `per_query`
    dynamic NTK do the keys depend on the query; then "farspan", and it alone, gets them unturned with the plan. So it
    does in a decoding step on the half-width kernel, which turns them while it reads.
    """

    def __init__(self, config: FarspanConfig, layer_idx: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.attention_specs[layer_idx],
            rotary=config.rotary(),
            num_key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            coca_activation=config.coca_activation,
            causal=config.causal,
        )
        self.config, self.layer_idx = config, layer_idx
        self.is_causal = config.causal
        self.num_key_value_groups = self.num_heads // self.num_key_heads
        self.sliding_window = self.spec.window

    @property
    def rotates_before_cache(self) -> bool:
        """RoPE caches rotated keys, as LLaMA does, unless their angles may still change."""
        dynamic = self.rotary is not None and self.rotary.is_dynamic
        return not dynamic and (self.spec.kind == "rope" or self.config.cache_layout == "rotated")

    @property
    def decode_backend(self) -> str:
        return self.config.decode_backend

    @property
    def log_length(self) -> int | None:
        return self.config.train_length if self.config.log_length else None

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        view: View,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.project(hidden_states)
        query = sharpened(query, view.gain)
        if self.rotates_before_cache:
            require(
                self.spec.kind == "rope" or query.dtype != torch.float16 or past_key_values is None,
                "cache_layout 'rotated' cannot hold CoCA keys in float16, got float16; use bfloat16 or layout 'half'",
            )
            assert not isinstance(view.plan, Waves)
            query, key = self.features(query, key, view.plan)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
            if key.shape[2] > view.keys:  # static: the tail is still empty; growing: more than the window was kept
                keys = slice(None, view.keys) if past_key_values.is_compileable else slice(-view.keys, None)
                key, value = key[:, :, keys], value[:, :, keys]
        plan = None if self.rotates_before_cache else view.plan
        ready = self.rotates_before_cache or view.slots is not None
        if not ready and not isinstance(plan, Waves) and (plan is None or len(plan) == 1):
            (query, key), plan = self.features(query, key, plan), None

        attention_interface: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        out, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            view=view,
            plan=plan,
            **kwargs,
        )
        del query, key, value  # they would double the peak of the output projection
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights  # vLLM gives one row a token
