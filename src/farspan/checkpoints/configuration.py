"""Translate configurations: a LLaMA-family config.json → FarspanConfig, and back where nothing is lost."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farspan.configuration_farspan import LIMITS, FarspanConfig
from farspan.errors import require, require_choice
from farspan.layers import AttentionSpec

if TYPE_CHECKING:
    from farspan.checkpoints.sources import Source

SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "hidden_act", "rms_norm_eps", "initializer_range"),
    *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)
"""Fields with one name and one meaning on both sides."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Scaling methods of transformers that have a counterpart in farspan.ops.rotary."""


@dataclass(frozen=True)
class Family:
    """What a `model_type` of transformers implies. A name stands for the boolean field of the source that decides."""

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
BIASES = ("qkv_bias", "out_bias", "mlp_bias")


def one_line(error: Exception) -> str:
    """Return the type of an error of another library, and the beginning of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def valid_config(raw: dict[str, Any], where: str) -> Iterator[None]:
    """Raise any failure inside as one line about the configuration `raw`, read in `where`.

    transformers and torch raise exceptions of many types for fields of a wrong type or size.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:
        need = f"{where} must be a valid {raw.get('model_type')} configuration"
        raise ValueError(f"{need} ({one_line(error)}); correct that field") from error


def config_of(source: "Source") -> FarspanConfig:
    """Return the configuration of our model that computes what the source computes."""
    return read_config(source.config, source.where)


def read_config(raw: dict[str, Any], where: str = "config.json") -> FarspanConfig:
    """Translate the content of a config.json. Errors name the file as `where`.

    >>> raw = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 8, "rope_theta": 1e6}
    >>> config = read_config(raw)
    >>> config.attention_specs[0], config.rotary().base
    (AttentionSpec(kind='rope', form=None, window=8, rotary=True), 1000000.0)
    """
    kind, kinds = raw.get("model_type"), [*FAMILIES, FarspanConfig.model_type]
    require_choice(f"{where}'s model_type", kind, kinds, "checkpoints of other families cannot be converted")
    quantised = raw.get("quantization_config")
    method = quantised.get("quant_method", quantised) if isinstance(quantised, dict) else quantised
    require(
        not quantised,
        f"{where}'s quantization_config must be absent, got {method!r}; convert the unquantised checkpoint",
    )
    with valid_config(raw, where):
        if kind == FarspanConfig.model_type:
            return FarspanConfig.from_dict(raw)
        layers, most = raw.get("num_hidden_layers", 1), LIMITS["num_hidden_layers"][1]
        require(layers <= most, f"num_hidden_layers must be at most {most}, got {layers}")  # lists are made of it
        return _translate(raw, FAMILIES[str(kind)])


def _translate(raw: dict[str, Any], family: Family) -> FarspanConfig:
    from transformers import CONFIG_MAPPING

    source = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    rope = _rope(source)
    fields: dict[str, Any] = {name: getattr(source, name) for name in SAME}
    for bias in BIASES:
        rule = getattr(family, bias)
        fields[bias] = rule if isinstance(rule, bool) else bool(getattr(source, rule, False))
    layers = range(source.num_hidden_layers)
    windows = [source.sliding_window if family.windows == "all" else None for _ in layers]
    if family.windows == "layers":
        windows = [source.sliding_window if kind == "sliding_attention" else None for kind in source.layer_types]
    rotary = [family.nope is None or bool(getattr(source, family.nope)[layer]) for layer in layers]
    specs = [AttentionSpec("rope", None, windows[layer], rotary[layer]) for layer in layers]
    plain = all(spec == AttentionSpec("rope") for spec in specs)
    return FarspanConfig(
        **fields,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        attention="rope" if plain else [spec.to_dict() for spec in specs],
        rope_parameters=rope,
        train_length=rope.get("original_max_position_embeddings") or source.max_position_embeddings,
        qk_norm=family.qk_norm,
    )


def _rope(source: Any) -> dict[str, Any]:
    """Return our `rope_parameters`; transformers has already translated those of older files."""
    rope = {name: value for name, value in source.rope_parameters.items() if value is not None and name != "type"}
    kind = rope.setdefault("rope_type", "default")
    if kind == "dynamic":
        # In one forward pass transformers takes one base for all tokens, from the length of the call.
        # It measures against max_position_embeddings, here train_length.
        rope["mode"] = "per_request"
        rope.pop("original_max_position_embeddings", None)
    if kind == "yarn":
        rope.setdefault("factor", source.max_position_embeddings / rope["original_max_position_embeddings"])
        scale, all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        if "attention_factor" not in rope and scale and all_dim:
            growth = 0.1 * math.log(rope["factor"])
            rope["attention_factor"] = (growth * scale + 1) / (growth * all_dim + 1)
    return rope


def write_config(config: FarspanConfig, to: str) -> dict[str, Any]:
    """Return the config.json of another family for a rope model. Raise if that loses anything but `log_length`.

    >>> write_config(FarspanConfig.preset("tiny", attention="rope"), "llama")["architectures"]
    ['LlamaForCausalLM']
    """
    require_choice("family", to, FAMILIES)
    family = FAMILIES[to]
    rope = dict(config.rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0})
    kind = rope.setdefault("rope_type", "default")
    per_query = rope.pop("mode", "per_query") == "per_query" and kind == "dynamic"
    require(
        kind in ROPE_TYPES and not per_query,
        f"rope_parameters must be of a type that transformers has, got {kind!r}"
        f"{' in mode per_query' if per_query else ''}; set_rope_parameters(rope_type='default') first",
    )
    raw: dict[str, Any] = {"model_type": to, "architectures": [family.architecture]}
    raw |= {name: getattr(config, name) for name in SAME} | {"head_dim": config.head_dim, "rope_parameters": rope}
    raw |= {rule: getattr(config, ours) for ours in BIASES if isinstance(rule := getattr(family, ours), str)}
    if family.windows is not None:
        raw["sliding_window"] = config.sliding_window
    if family.windows == "layers":
        raw |= {"use_sliding_window": config.sliding_window is not None, "layer_types": config.layer_types}
    if family.nope is not None:
        raw[family.nope] = [int(spec.rotary) for spec in config.attention_specs]
    mine, theirs = _meaning(config), _meaning(read_config(raw))
    for field in mine:
        require(
            mine[field] == theirs[field],
            f"a {to} model cannot have this model's {field} ({mine[field]}; it would have {theirs[field]}); "
            "choose another family, or keep the farspan folder",
        )
    return raw


def _meaning(config: FarspanConfig) -> dict[str, Any]:
    """Return the fields that a family may not have, so that equal values compute alike."""
    layers = [
        spec.name + (f" window {spec.window}" if spec.window else "") + ("" if spec.rotary else " without rotation")
        for spec in config.attention_specs
    ]
    fields = {field: getattr(config, field) for field in (*BIASES, "qk_norm", "causal")}
    attention = layers[0] if len(set(layers)) == 1 else ", ".join(layers)
    return {**fields, "attention": attention, "rotary": config.rotary()}
