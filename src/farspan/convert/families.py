"""What is known about each family of checkpoints, as data: where a tensor goes, and what its configuration implies."""

from dataclasses import dataclass

_ATTENTION = tuple(f"self_attn.{name}_proj.{leaf}" for name in "qktvo" for leaf in ("weight", "bias"))
_QK_NORM = tuple(f"self_attn.{name}_norm.weight" for name in "qkt")
_MLP = tuple(f"mlp.{name}_proj.{leaf}" for name in ("gate", "up", "down") for leaf in ("weight", "bias"))
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")

WEIGHTS = {
    name: name
    for name in (
        "model.embed_tokens.weight",
        *(f"model.layers.{{i}}.{leaf}" for leaf in (*_NORMS, *_ATTENTION, *_QK_NORM, "self_attn.phase", *_MLP)),
        "model.norm.weight",
        "lm_head.weight",
    )
}
"""A tensor's name in a LLaMA-family (or farspan) safetensors folder → in our model; {i} is the layer.

The names agree. The table says which tensors are understood; a name that is not here is refused."""

GGUF_WEIGHTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "blk.{i}.attn_q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "blk.{i}.attn_k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.attn_output.bias": "model.layers.{i}.self_attn.o_proj.bias",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_gate.bias": "model.layers.{i}.mlp.gate_proj.bias",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_up.bias": "model.layers.{i}.mlp.up_proj.bias",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
    "blk.{i}.ffn_down.bias": "model.layers.{i}.mlp.down_proj.bias",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""The same for GGUF files."""

IGNORED = ("model.layers.{i}.self_attn.rotary_emb.inv_freq", "rope_freqs.weight")
"""Frequencies that older exporters stored; ours come from the configuration (GGUF's are checked against it)."""

INTERLEAVED = (
    "blk.{i}.attn_q.weight",
    "blk.{i}.attn_q.bias",
    "blk.{i}.attn_k.weight",
    "blk.{i}.attn_k.bias",
)
"""Tensors whose rows GGUF stores pair by pair, (0, d/2, 1, d/2+1, …), in the architectures that say so below."""

GGUF_CONFIG = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
}
"""A GGUF field, after the name of its architecture → the field of a transformers configuration."""

GGUF_SCALING = (
    "scaling.type",
    "scaling.factor",
    "scale_linear",
    "scaling.original_context_length",
    "scaling.finetuned",
    "scaling.attn_factor",
    "scaling.yarn_attn_factor",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
)
"""What is understood of a law of scaling, after the name of the architecture and "rope."; the rest is refused."""

GGUF_ROPE = {
    "rope.freq_base": "rope_parameters.rope_theta",
    "rope.scaling.type": "rope_parameters['rope_type']",
    "rope.scale_linear": "rope_parameters.factor",
    "rope.scaling.factor": "rope_parameters.factor",
    "rope.scaling.original_context_length": "rope_parameters.original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "rope_parameters.attention_factor",
    "rope.scaling.attn_factor": "rope_parameters.attention_factor",
    "rope.scaling.yarn_beta_fast": "rope_parameters.beta_fast",
    "rope.scaling.yarn_beta_slow": "rope_parameters.beta_slow",
}
"""The same for the angles, for errors alone. Of two names for one value, errors say the latter if the file has it."""

GGUF_NEEDED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
"""Fields without which the file describes no model."""


@dataclass(frozen=True)
class Family:
    """What a `model_type` of transformers implies. A text names the boolean field of the source that decides."""

    architecture: str
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: str | None = None
    """"all": `sliding_window` is for every layer; "layers": for those that `layer_types` names."""
    nope: str | None = None
    """The field that lists a 0 for each layer without rotation."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Family("MistralForCausalLM", windows="all"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="layers"),
    "qwen3": Family("Qwen3ForCausalLM", "attention_bias", "attention_bias", qk_norm=True, windows="layers"),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "attention_bias", "attention_bias", "mlp_bias", windows="layers", nope="no_rope_layers"
    ),
}

GGUF_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": True}
"""GGUF's name → whether q and k are :data:`INTERLEAVED`. Mistral and SmolLM(2) files call themselves llama.

A smollm3 file has no field for its layers without rotation: readers of GGUF take every fourth, which is what
transformers takes where a configuration does not say."""

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Scaling methods of transformers that have a counterpart in farspan.ops.rotary."""

OTHER_LAWS = "checkpoints with other laws cannot be converted"
OTHER_FAMILIES = "checkpoints of other families cannot be converted"
