"""One LLaMA-shaped model for every attention: RMSNorm, SwiGLU, grouped heads, and a spec a layer that says which.

Read top to bottom: block, decoder, language-model head. Attention is in :mod:`farspan.models.attention` and
:mod:`farspan.models.linear`; formulas live in farspan.ops.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from farspan.errors import require
from farspan.layers.attention import Attention
from farspan.layers.spec import AttentionSpec
from farspan.models.attention import FarspanAttention
from farspan.models.cache import FarspanCache
from farspan.models.configuration import FarspanConfig
from farspan.models.frame import Frame
from farspan.models.linear import LINEAR, FarspanLinearAttention
from farspan.models.places import goes_on_by_one

__all__ = ["FarspanAttention", "FarspanBlock", "FarspanForCausalLM", "FarspanModel", "FarspanPreTrainedModel"]


class FarspanMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: FarspanConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class FarspanBlock(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each added to the residual."""

    def __init__(self, config: FarspanConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LINEAR.get(config.attention_specs[layer_idx].kind, FarspanAttention)(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FarspanMLP(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class FarspanPreTrainedModel(PreTrainedModel):
    config_class = FarspanConfig
    config: FarspanConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FarspanBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": FarspanBlock, "attentions": FarspanAttention}  # noqa: RUF012

    def set_rope_parameters(self, **rope_parameters: Any) -> None:
        """Stretch the angles of a finished model by another law; the weights stay. A cache in use must be dropped.

        >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny"))
        >>> model.set_rope_parameters(rope_type="dynamic", factor=4.0)
        >>> model.config.rotary().scaling
        DynamicNTK(factor=4.0, train_length=64, mode='per_query')
        """
        kept = {"rope_theta": (self.config.rope_parameters or {}).get("rope_theta", 10_000.0)}
        values = {**self.config.to_dict(), "rope_parameters": {**kept, **rope_parameters}}
        changed = FarspanConfig.from_dict(values)  # refuses what cannot be meant before anything changes
        self.config.rope_parameters, rotary = changed.rope_parameters, changed.rotary()
        for module in self.modules():
            if isinstance(module, Attention) and module.rotary is not None:
                module.rotary = rotary

    def set_log_length(self, on: bool) -> None:
        """Let the scores of a finished model grow with the logarithm of the length past its training, or not.

        >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny"))
        >>> model.set_log_length(True)
        >>> model.model.layers[0].self_attn.log_length
        64
        """
        FarspanConfig.from_dict({**self.config.to_dict(), "log_length": on})  # refuses what cannot be meant
        self.config.log_length = on


class FarspanModel(FarspanPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: FarspanConfig) -> None:
        require(
            not (config.causal and config.learned_positions),
            f"learned_positions must be 0 in a causal model, got {config.learned_positions}: its text goes on past any "
            "table; leave it out, or make an encoder with FarspanForMaskedLM or FarspanForSequenceClassification",
        )
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = (
            nn.Embedding(config.learned_positions, config.hidden_size) if config.learned_positions else None
        )
        self.layers = nn.ModuleList(FarspanBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        rotary_length: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run n tokens after those in the cache.

        Args:
            attention_mask: (b, tokens so far) 1 = real, 0 = padding, on either side.
            position_ids: (b, n); positions that restart mark packed documents. Learned positions follow them too.
            rotary_length: for `per_request` dynamic NTK, the length whose base to use for this whole request
                (`generate` sets it to prompt + new tokens). Default: the tokens so far.
        """
        require(
            (input_ids is None) != (inputs_embeds is None), "give exactly one of input_ids and inputs_embeds, not both"
        )
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        require(hidden.shape[1] > 0, "input_ids must hold at least one token, got length 0; skip the call")
        if use_cache and past_key_values is None and self._can_be_continued(attention_mask, position_ids):
            past_key_values = FarspanCache(self.config)
        rotary = self.config.rotary()
        frame = Frame(
            hidden,
            rotary=rotary if rotary_length is None else rotary.at_length(rotary_length),
            causal=self.config.causal,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values,
            whole_cache=self.config._attn_implementation != "farspan",
        )
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(frame.places.rows(self.embed_positions.num_embeddings))
        masks = self._dense_masks(hidden, attention_mask, position_ids, past_key_values)
        for block in self.layers:
            attention: FarspanAttention | FarspanLinearAttention = block.self_attn  # type: ignore[assignment]
            hidden = block(
                hidden,
                view=frame.view(attention, attention.layer_idx, hidden, rotated_cache=attention.rotates_before_cache),
                attention_mask=masks.get(attention.sliding_window),
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)

    def _can_be_continued(self, attention_mask: Tensor | None, position_ids: Tensor | None) -> bool:
        """Whether a cache made by this call could be used by a later one (see farspan.models.places)."""
        if not self.config.causal:
            return False
        given = position_ids is not None and attention_mask is None and not torch.compiler.is_compiling()
        return not given or goes_on_by_one(position_ids)  # type: ignore[arg-type]

    def _dense_masks(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> dict[int | None, Any]:
        """Masks by window for implementations other than our own, made by transformers; ours needs none."""
        if self.config._attn_implementation == "farspan":
            return {}
        # The layers' own specs: reading the configuration's again would break the graph of torch.compile.
        specs: list[AttentionSpec] = [block.self_attn.spec for block in self.layers]  # type: ignore[union-attr,misc]
        rotary = self.config.rotary()
        windows = {spec.window for spec in specs}
        impossible = {
            "ALiBi": any(spec.kind == "alibi" for spec in specs),
            "cosFormer": any(spec.kind == "cosformer" for spec in specs),
            "linear CoCA": any(spec.kind == "linear-coca" for spec in specs),
            "per_query dynamic NTK": rotary.follows_query,
            # vLLM keeps the cache and hands over a step of many requests: nothing here tells how long each one is.
            "per_request dynamic NTK": rotary.follows_length and self.config._attn_implementation == "vllm",
            "several window sizes": len(windows - {None}) > 1,
            "bidirectional attention": not self.config.causal,
        }
        for what, present in impossible.items():
            require(
                not present,
                f"attn_implementation {self.config._attn_implementation!r} cannot run {what}; use 'farspan'",
            )
        options: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": hidden,
            "attention_mask": attention_mask,
            "past_key_values": cache,
            "position_ids": position_ids,
        }
        return {
            window: create_causal_mask(**options) if window is None else create_sliding_window_causal_mask(**options)
            for window in windows
        }


class FarspanForCausalLM(FarspanPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head, tied to the embedding or free.

    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="coca-exact"))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 512])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    lora_target_modules = ("q_proj", "k_proj", "t_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names for PEFT's LoraConfig(target_modules=…)."""

    def __init__(self, config: FarspanConfig) -> None:
        require(
            config.causal,
            "config.causal must be True for FarspanForCausalLM, got False: each token would see those it must predict; "
            "load an encoder with FarspanForMaskedLM or FarspanForSequenceClassification",
        )
        super().__init__(config)
        self.model = FarspanModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (b, n, vocabulary), for the last `logits_to_keep` tokens only if given; with labels also the loss."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def create_masks_for_generate(
        inputs_embeds: Tensor, past_key_values: Cache, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor | None:
        """`generate` would expand the mask for a static cache; the model reads the plain one.

        None if it hides nothing; after the prompt as wide as the cache: a mask that grows would make the compiled step
        anew for each token.
        """
        if attention_mask is None or attention_mask.all():
            return None
        if isinstance(past_key_values, FarspanCache):
            slots = past_key_values.max_length or 0  # its layers may hold less: a window, or sums
        else:
            slots = max((getattr(layer, "max_cache_len", 0) for layer in past_key_values.layers), default=0)
        first = attention_mask.shape[1] == inputs_embeds.shape[1]
        return attention_mask if first else F.pad(attention_mask, (0, max(0, slots - attention_mask.shape[1])))

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Give `generate` our cache, and `per_request` dynamic NTK the length of the whole request."""
        length = max_cache_length + 1  # the last token is never cached, but it is part of the request
        if self.config.rotary().follows_length:
            model_kwargs["rotary_length"] = length
        kind = generation_config.cache_implementation
        ours = kind in (None, "dynamic", "static") and generation_config.use_cache is not False
        if not ours or model_kwargs.get("past_key_values") is not None:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        length = max(length, getattr(generation_config, "max_cache_len", None) or 0)
        model_kwargs["past_key_values"] = FarspanCache(self.config, max_length=length if kind == "static" else None)
        if getattr(generation_config, "is_assistant", False):
            model_kwargs["past_key_values"].activate_past_recording()
        return None
