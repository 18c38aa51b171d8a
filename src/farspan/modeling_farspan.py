"""One LLaMA-shaped model for every attention: RMSNorm, SwiGLU, grouped heads, and one attention spec per layer.

Read top to bottom: cache, attention adapter, block, decoder, language-model head, encoder heads. The attention layers
are in :mod:`farspan.layers`, the formulas in :mod:`farspan.ops`.
"""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from farspan.cache import LayerCache, StateCache, StaticWindowCache, is_alike
from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.layers import Attention, AttentionSpec, CosformerAttention, LinearAttention, LinearCocaAttention
from farspan.ops.device import product_dtype, working_dtype
from farspan.ops.masking import AttentionContext, is_consecutive
from farspan.ops.reference import repeat_heads
from farspan.ops.rotary import Rotary


class StaticLayerCache(StaticLayer):
    """A layer that keeps all tokens in storage allocated once; a reset keeps it, so that compiled graphs stay valid."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.keys is None or not is_alike(self.keys, key_states):
            super().lazy_initialization(key_states, value_states)
        self.is_initialized = True

    def reset(self) -> None:
        if self.keys is not None and self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self.keys = None  # may be read now, but not written: allocate again
            self.is_initialized = False
            self.__dict__["cumulative_length"] = torch.tensor(0)
        super().reset()
        self.is_initialized = False  # so that the next prompt counts as the first


CacheLayerMixin.register(LayerCache)
CacheLayerMixin.register(StateCache)
CacheLayerMixin.register(StaticWindowCache)


class FarspanCache(Cache):
    """One cache per layer: all tokens for a global layer, the last `window` for a window layer, sums for a linear one.

    CoCA layers store un-rotated t (d/2 numbers per head) where RoPE layers store k (d), and their windows rotated
    features. The cache grows as needed; with `max_length` it is allocated once (static, for torch.compile).
    `generate`, beam search and `crop` use it like any transformers cache.

    >>> config = FarspanConfig.preset("tiny", num_hidden_layers=2, attention=["rope", {"kind": "rope", "window": 8}])
    >>> FarspanCache(config)
    FarspanCache(layers=[LayerCache(), LayerCache(window=8)])
    """

    def __init__(self, config: FarspanConfig, *, max_length: int | None = None) -> None:
        def layer(spec: AttentionSpec) -> Any:
            if spec.linear:
                return StateCache(max_length)
            if max_length is None:
                return LayerCache(spec.window)
            return StaticLayerCache(max_length) if spec.window is None else StaticWindowCache(spec.window)

        self.specs, self.max_length = config.attention_specs, max_length
        super().__init__(layers=[layer(spec) for spec in self.specs])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, dropped ones included."""
        return self.layers[layer_idx].get_seq_length()  # type: ignore[union-attr]

    @property
    def max_cache_len(self) -> int:
        """`max_length` as PEFT asks for it: -1 for no limit."""
        return -1 if self.max_length is None else self.max_length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held by all layers."""
        held = (x for layer in self.layers for x in (layer.keys, layer.values))  # type: ignore[union-attr]
        return sum(x.nbytes for x in held if x is not None)


class _LayerOf:
    """One layer of another transformers cache, which may create its layers when they are first used."""

    def __init__(self, cache: Cache, layer_idx: int) -> None:
        self.cache, self.layer_idx = cache, layer_idx
        self.is_compileable = cache.is_compileable

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        layers: Any = self.cache.layers
        held = layers[self.layer_idx].keys if self.get_seq_length() else keys
        require(
            held.shape[-1] == keys.shape[-1],
            lambda: (
                f"past_key_values must hold {keys.shape[-1]} numbers per key in layer {self.layer_idx}, got "
                f"{held.shape[-1]}; PEFT's prefix tuning cannot be used with this layer, but its prompt tuning can"
            ),
        )
        return self.cache.update(keys, values, self.layer_idx)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length(self.layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.layer_idx)


def eager_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Run the attention implementation "eager", which returns all weights."""
    scores = query @ repeat_heads(key, query.shape[1]).mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=working_dtype(query.dtype)).to(query.dtype)
    return (weights @ repeat_heads(value, query.shape[1])).transpose(1, 2), weights


def _farspan_only(*_: Any, **__: Any) -> None:
    """Stand for the name "farspan", with which a block calls its layer and no interface."""
    raise ValueError("attn_implementation 'farspan' is for farspan models only; choose another, such as 'sdpa'")


ALL_ATTENTION_FUNCTIONS.register("farspan", _farspan_only)


class FarspanAttention(nn.Module):
    """Run a softmax layer on other attention code: "eager", "sdpa", "flash_attention_2", "vllm" ….

    It gets queries and keys in dot-product form. This module has no weights: the layer is an argument.
    """

    def __init__(self, config: FarspanConfig, layer: Attention, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.is_causal, self.scaling, self.sliding_window = config.causal, layer.scaling, layer.spec.window
        self.num_key_value_groups = layer.num_heads // layer.num_key_heads

    def forward(
        self,
        layer: Attention,
        hidden_states: Tensor,
        context: AttentionContext,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value, mask, rotary = layer.update_cache(*layer.project(hidden_states), context, cache)
        query, key = layer.features(query, key, mask, rotary)
        if key.shape[-1] > value.shape[-1]:  # PoPE's keys are wider
            value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        implementation = self.config._attn_implementation
        attention_interface: Any = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        kwargs["sliding_window"] = self.sliding_window
        out, weights = attention_interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        out = out.reshape(*hidden_states.shape[:-1], layer.num_heads, -1)  # vLLM returns one row per token
        return layer.o_proj(out[..., : layer.head_dim].flatten(-2)), weights


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


def make_attention(config: FarspanConfig, spec: AttentionSpec) -> Attention:
    """Make the attention layer of a spec in a model of this configuration."""
    options: dict[str, Any] = {
        "num_key_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "qkv_bias": config.qkv_bias,
        "out_bias": config.out_bias,
        "qk_norm_eps": config.rms_norm_eps if config.qk_norm else None,
        "causal": config.causal,
    }
    width, heads = config.hidden_size, config.num_attention_heads
    if spec.kind == "cosformer":
        options |= {"beyond": config.cosformer_beyond, "activation": config.cosformer_activation}
        length = config.cosformer_max_length or config.train_length
        return CosformerAttention(width, heads, max_length=length, nope=not spec.rotary, **options)
    options |= {"rotary": config.rotary(), "coca_activation": config.coca_activation}
    if spec.kind == "linear-coca":
        return LinearCocaAttention(width, heads, nope=not spec.rotary, **options)
    options |= {"polar_phase": config.polar_phase, "polar_activation": config.polar_activation}
    options |= {"kv_shift": config.kv_shift and spec.shiftable, **_length_options(config, spec)}
    return Attention(width, heads, spec, **options)


def _length_options(config: FarspanConfig, spec: AttentionSpec) -> dict[str, Any]:
    """Return what `log_length` says about a layer with a softmax."""
    form = "log" if config.log_length is True else config.log_length or "log"
    applies = config.log_length and (form == "log" or spec.window is None)
    return {"log_length": config.train_length if applies else None, "length_form": form}


class FarspanBlock(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each added to the residual.

    A block runs alone, too: ``block(hidden, model.context(hidden))``.
    """

    def __init__(self, config: FarspanConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.config, self.layer_idx = config, layer_idx
        self.set_attention(make_attention(config, config.attention_specs[layer_idx]))
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FarspanMLP(config)

    def set_attention(self, layer: Attention) -> None:
        """Give the block an attention layer; the configuration must say the same."""
        self.self_attn = layer
        self.is_linear = isinstance(layer, LinearAttention)
        self.interface = FarspanAttention(self.config, layer, self.layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        context: AttentionContext,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        cache: Any = None
        if isinstance(past_key_values, FarspanCache):
            cache = past_key_values.layers[self.layer_idx]
        elif past_key_values is not None:
            cache = _LayerOf(past_key_values, self.layer_idx)
        require(
            cache is None or not self.is_linear or isinstance(cache, StateCache),
            "past_key_values must be a FarspanCache of this configuration where there are linear layers, got "
            f"{type(past_key_values).__name__}; build FarspanCache(config)",
        )
        normed = self.input_layernorm(hidden_states)
        if self.is_linear or self.config._attn_implementation == "farspan":
            attended = self.self_attn(normed, context, cache)
        else:
            attended = self.interface(self.self_attn, normed, context, attention_mask, cache, **kwargs)[0]
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

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Attention):
            for learned in (module.phase, module.shift):
                if learned is not None:
                    init.zeros_(learned)
            if module.length_scale is not None:
                init.constant_(module.length_scale, module.first_length_scale)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        try:
            return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        except (ImportError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"attn_implementation must be one that is installed, got {attn_implementation!r}: {reason}"
            ) from error

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights from safetensors, and never from a pickle such as pytorch_model.bin."""
        require(
            kwargs.get("use_safetensors") is not False,
            "use_safetensors must be True, got False: pickles are not read; convert the weights to safetensors",
        )
        index = Path(str(pretrained_model_name_or_path)) / "model.safetensors.index.json"
        if index.is_file():  # transformers would follow a path out of the folder
            named = json.loads(index.read_text()).get("weight_map")
            inside = isinstance(named, dict) and all(isinstance(x, str) and Path(x).name == x for x in named.values())
            require(inside, f"weight_map of {str(index)!r} must name files beside it; do not trust this folder")
        return super().from_pretrained(pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True})

    def set_rope_parameters(self, **rope_parameters: Any) -> None:
        """Change the scaling of a finished model's angles; the weights stay. Drop caches that are in use.

        >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny"))
        >>> model.set_rope_parameters(rope_type="dynamic", factor=4.0)
        >>> model.config.rotary().scaling
        DynamicNTK(factor=4.0, train_length=64, mode='per_query')
        """
        kept = {"rope_theta": (self.config.rope_parameters or {}).get("rope_theta", 10_000.0)}
        values = {**self.config.to_dict(), "rope_parameters": {**kept, **rope_parameters}}
        changed = FarspanConfig.from_dict(values)  # raises for bad values before anything changes
        self.config.rope_parameters = changed.rope_parameters
        self.share_rotary(changed.rotary())

    def share_rotary(self, rotary: Rotary) -> None:
        """Give all rotary layers one object: blocks that are compiled one by one compare it by identity."""
        wide = replace(rotary, dim=2 * rotary.dim)
        for module in self.modules():
            if isinstance(module, Attention) and module.rotary is not None:
                module.rotary = wide if module.spec.kind == "pope" else rotary

    def set_log_length(self, on: bool | str) -> None:
        """Set `log_length` of a finished model, see its configuration; "learned" needs training and stays.

        >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny"))
        >>> model.set_log_length(True)
        >>> model.model.layers[0].self_attn.log_length
        64
        """
        changed = FarspanConfig.from_dict({**self.config.to_dict(), "log_length": on})  # raises for bad values
        require(
            on == self.config.log_length or "learned" not in (on, self.config.log_length),
            f"log_length 'learned' belongs to the weights, so {self.config.log_length!r} cannot become {on!r}; "
            "train a model with it",
        )
        self.config.log_length = on
        for module in self.modules():
            if isinstance(module, Attention) and not module.spec.linear:
                vars(module).update(_length_options(changed, module.spec))


class FarspanModel(FarspanPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: FarspanConfig) -> None:
        require(
            not (config.causal and config.learned_positions),
            f"learned_positions must be 0 in a causal model, got {config.learned_positions}: its sequences outgrow any "
            "table; leave it out, or make an encoder with FarspanForMaskedLM or FarspanForSequenceClassification",
        )
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        learned = config.learned_positions
        self.embed_positions = nn.Embedding(learned, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(FarspanBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.share_rotary(config.rotary())
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
        rotary_length: int | Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run n tokens after those in the cache.

        Args:
            attention_mask: (b, tokens so far) 1 = real, 0 = padding, on either side.
            position_ids: (b, n); positions that restart mark packed documents. Learned positions follow them too.
            rotary_length: for `per_request` dynamic NTK, the length whose base to use for this whole request, or
                (b) lengths (`generate` sets it to prompt + new tokens, without padding). Default: the tokens so far.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds, not both")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        require(hidden.shape[1] > 0, "input_ids must hold at least one token, got length 0; skip the call")
        if self.config._attn_implementation == "farspan":
            require(
                not kwargs.get("output_attentions", self.config.output_attentions),
                "output_attentions must be False with attn_implementation 'farspan', which computes no weights; "
                "use model.set_attn_implementation('eager')",
            )
        if use_cache and past_key_values is None and self._can_be_continued(attention_mask, position_ids):
            past_key_values = FarspanCache(self.config)
        compiled = self.layers[0]._compiled_call_impl is not None
        context = self.context(hidden, attention_mask, position_ids, past_key_values, rotary_length, prepare=compiled)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(_rows(context, self.embed_positions.num_embeddings))
        if context.padding is not None:
            hidden = context.clean(hidden, 0 if past_key_values is None else past_key_values.get_seq_length())
        masks: dict[int | None, Any] = {}
        if context.whole_cache:
            kwargs["position_ids"] = position_ids  # flash attention finds packed documents by them
            masks = self._dense_masks(hidden, attention_mask, position_ids, past_key_values)
        for block in self.layers:
            mask = masks.get(block.interface.sliding_window)  # type: ignore[union-attr,arg-type]
            hidden = block(hidden, context, attention_mask=mask, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)

    def context(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        rotary_length: int | Tensor | None = None,
        *,
        prepare: bool = False,
    ) -> AttentionContext:
        """Make what the blocks share in one forward pass of hidden states (b, n, ·).

        With `prepare` everything is computed now, for blocks that are compiled one by one.
        """
        past: int | Tensor = 0
        has_windows = static = False
        if past_key_values is not None:
            past, static = past_key_values.get_seq_length(), past_key_values.is_compileable
            has_windows = attention_mask is not None and any(past_key_values.is_sliding)
        context = AttentionContext(
            hidden,
            causal=self.config.causal,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past=past,
            cached=past_key_values is not None,
            static=static,
            whole_cache=self.config._attn_implementation != "farspan",
            has_windows=has_windows,
            rotary_length=rotary_length,
        )
        if prepare and past_key_values is None and rotary_length is None:
            for block in self.layers:
                block.self_attn.prepare(context, product_dtype(hidden))  # type: ignore[union-attr,operator]
        return context

    def _can_be_continued(self, attention_mask: Tensor | None, position_ids: Tensor | None) -> bool:
        """Return whether a later call would use a cache made by this one (see :class:`AttentionContext`)."""
        if not self.config.causal or (self.training and torch.is_grad_enabled()):
            return False
        if position_ids is None or torch.compiler.is_compiling():
            return True
        fits = attention_mask is not None and attention_mask.shape[1:] == position_ids.shape[1:]
        return is_consecutive(position_ids, attention_mask.bool() if fits else None)  # type: ignore[union-attr]

    def _dense_masks(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> dict[int | None, Any]:
        """Make transformers' masks by window, for implementations other than "farspan"."""
        # From the layers: reading the configuration's specs again would break the graph of torch.compile.
        layers: list[Attention] = [block.self_attn for block in self.layers]  # type: ignore[misc]
        rotaries = [layer.rotary for layer in layers if layer.rotary is not None]
        windows = {layer.spec.window for layer in layers}
        implementation = self.config._attn_implementation
        names = {"alibi": "ALiBi", "cosformer": "cosFormer", "linear-coca": "linear CoCA"}
        impossible = {
            **{name: any(layer.spec.kind == kind for layer in layers) for kind, name in names.items()},
            "per_query dynamic NTK": any(rotary.follows_query for rotary in rotaries),
            # vLLM keeps the cache and passes one step of many requests: nothing here tells how long each one is.
            "per_request dynamic NTK": implementation == "vllm" and any(rotary.follows_length for rotary in rotaries),
            "several window sizes": len(windows - {None}) > 1,
            "bidirectional attention": not self.config.causal,
            "kv_shift": self.config.kv_shift,
        }
        for what, present in impossible.items():
            require(not present, f"attn_implementation {implementation!r} cannot run {what}; use 'farspan'")
        options: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds": hidden,
            "attention_mask": attention_mask,
            "past_key_values": cache,
            "position_ids": position_ids,
        }
        in_window = dict(options)
        if isinstance(cache, FarspanCache) and cache.max_length is not None:
            in_window["and_mask_function"] = _is_token
            if attention_mask is not None and attention_mask.dim() == 2:  # indices below 0 count from its end
                widest = max(filter(None, windows), default=0)
                in_window["attention_mask"] = F.pad(attention_mask, (0, max(0, widest - attention_mask.shape[1])))
        return {
            window: create_causal_mask(**options) if window is None else create_sliding_window_causal_mask(**in_window)
            for window in windows
        }


def _is_token(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Hide slots of a static window that no token has reached yet: their index is below 0."""
    return key >= 0


def _rows(context: AttentionContext, table: int) -> Tensor:
    """Return the rows of an encoder's table of learned positions, (1 or b, n).

    Positions count real tokens, unless `position_ids` say otherwise; padding gets row 0. Raise for a sequence that
    leaves the table; while tracing, the look-up itself raises.
    """
    require(not context.cached, "past_key_values must be None where learned_positions are used, got a cache; drop it")
    positions, padding = context.mask().key_positions, context.padding
    # Ranks are below n: only longer sequences and given positions are worth a look at the values.
    if (context.n > table or context.position_ids is not None) and not torch.compiler.is_compiling():
        real = positions if padding is None else positions.expand(context.batch, -1)[padding]
        for position in (int(real.min()), int(real.max())) if real.numel() else ():
            require(
                0 <= position < table,
                f"learned_positions is {table} and a token has position {position}, counted from 0; "
                "shorten the sequence, or train with more of them",
            )
    return positions if padding is None else positions.masked_fill(~padding, 0)


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
        self._static_cache: FarspanCache | None = None
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
        rotary_length: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits (b, n, vocabulary), of the last `logits_to_keep` tokens if given, and with labels the loss."""
        given = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds
        out = self.model(*given, use_cache=use_cache, rotary_length=rotary_length, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states, out.attentions)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_static_cache": None}  # of this process only

    @staticmethod
    def create_masks_for_generate(
        inputs_embeds: Tensor, past_key_values: Cache, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor | None:
        """Keep the plain 2-D mask, which `generate` would expand for a static cache.

        Return None if it hides nothing. After the prompt it is as wide as the cache: a mask that grows would make
        torch.compile start anew for each token.
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
        """Give `generate` our cache, and `per_request` dynamic NTK the length of the whole request.

        A static cache is kept by the model and serves later calls that need no more slots, one call at a time.
        """
        length = max_cache_length + 1  # the last token is never cached, but it is part of the request
        if self.config.rotary().follows_length:
            mask = model_kwargs.get("attention_mask")
            model_kwargs["rotary_length"] = length if mask is None or mask.all() else length - (mask == 0).sum(-1)
        kind = generation_config.cache_implementation
        ours = kind in (None, "dynamic", "static") and generation_config.use_cache is not False
        if not ours or model_kwargs.get("past_key_values") is not None:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        cache = FarspanCache(self.config) if kind != "static" else self._static_cache
        if kind == "static":
            length = max(length, getattr(generation_config, "max_cache_len", None) or 0)
            if cache is None or (cache.max_length or 0) < length or cache.specs != self.config.attention_specs:
                cache = self._static_cache = FarspanCache(self.config, max_length=length)
            cache.reset()
        model_kwargs["past_key_values"] = cache
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()  # type: ignore[union-attr]
        return None


class FarspanEncoder(FarspanPreTrainedModel):
    """A model with attention in both directions and no cache; a subclass adds its head."""

    def __init__(self, config: FarspanConfig) -> None:
        require(
            not config.log_length, "log_length, which hybrids have, needs a causal model; use another attention here"
        )
        config = deepcopy(config)
        config.causal, config.use_cache = False, False
        super().__init__(config)
        self.model = FarspanModel(config)


class FarspanForSequenceClassification(FarspanEncoder):
    """A bidirectional encoder that classifies the mean over real tokens; `num_labels` and `problem_type` as usual.

    >>> model = FarspanForSequenceClassification(FarspanConfig.preset("tiny", attention="cosformer", num_labels=3))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: FarspanConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 1
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Compute logits (b, num_labels). Without an attention mask, `pad_token_id` (if set) says what is padding."""
        if attention_mask is None and input_ids is not None and self.config.pad_token_id is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        out = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, use_cache=False, **kwargs
        )
        logits = self.score(_mean(out.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss, logits, out.hidden_states, out.attentions)


class FarspanForMaskedLM(FarspanEncoder):
    """A bidirectional encoder that predicts masked tokens; labels are -100 where nothing is asked.

    >>> model = FarspanForMaskedLM(FarspanConfig.preset("tiny", attention="cosformer"))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 512])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FarspanConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute logits (b, n, vocabulary); the loss is taken where labels are not -100."""
        out = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, use_cache=False, **kwargs
        )
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss, logits, out.hidden_states, out.attentions)


def _mean(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Compute the mean over real tokens, (b, n, hidden) → (b, hidden), summed in float32 or wider."""
    if attention_mask is None:
        return hidden.mean(1)
    real = attention_mask.bool()[..., None]
    if real.device.type == "cpu" and not torch.compiler.is_compiling():
        require(
            bool(real.any(1).all()), "attention_mask must leave at least one token in each row, got a row of padding"
        )
    wide = hidden.to(working_dtype(hidden.dtype))
    return (wide.masked_fill(~real, 0.0).sum(1) / real.sum(1)).to(hidden.dtype)


AutoModel.register(FarspanConfig, FarspanModel, exist_ok=True)
AutoModelForCausalLM.register(FarspanConfig, FarspanForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(FarspanConfig, FarspanForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(FarspanConfig, FarspanForSequenceClassification, exist_ok=True)
