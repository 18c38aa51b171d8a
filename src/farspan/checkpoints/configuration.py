"""Translate configurations: a LLaMA-family config.json → FarspanConfig, and back where nothing is lost."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN

from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require, unknown
from farspan.layers import AttentionSpec

if TYPE_CHECKING:
    from farspan.checkpoints.sources import Source

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
SAME = (
    *SIZES,
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Fields with one name and one meaning on both sides."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Scaling methods of transformers that have a counterpart in farspan.ops.rotary."""
ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
MALFORMED = (
    StrictDataclassError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ZeroDivisionError,
    RuntimeError,
    OverflowError,
)
"""What transformers and torch raise for fields of a wrong type or size."""


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


@contextmanager
def valid_config(raw: dict[str, Any], where: str) -> Iterator[None]:
    """Raise what goes wrong inside as one line about the configuration `raw`, which stands in `where`."""
    try:
        yield
    except MALFORMED as error:
        kind, reason = raw.get("model_type"), f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{where} must be a valid {kind} configuration ({reason}); correct that field") from error


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
    kind, ours = raw.get("model_type"), FarspanConfig.model_type
    if not isinstance(kind, str) or kind not in (*FAMILIES, ours):
        remedy = "checkpoints of other families cannot be converted"
        raise unknown(f"{where}'s model_type", kind, [*FAMILIES, ours], remedy)
    quantised = raw.get("quantization_config")
    require(
        not quantised,
        f"{where}'s quantization_config must be absent, got {_method(quantised)!r}; convert the unquantised checkpoint",
    )
    _check_numbers(raw, where)
    _check_rope(raw, where, foreign=kind != ours)
    with valid_config(raw, where):
        config = FarspanConfig.from_dict(raw) if kind == ours else _translate(raw, kind)
    if config.hidden_act not in ACT2FN:
        raise unknown(f"{where}'s hidden_act", config.hidden_act, ACT2FN)
    return config


def _translate(raw: dict[str, Any], kind: str) -> FarspanConfig:
    from transformers import CONFIG_MAPPING

    family, source = FAMILIES[kind], CONFIG_MAPPING[kind].from_dict(raw)
    rope = _rope(source)
    fields: dict[str, Any] = {name: getattr(source, name) for name in SAME}
    for bias in ("qkv_bias", "out_bias", "mlp_bias"):
        rule = getattr(family, bias)
        fields[bias] = rule if isinstance(rule, bool) else bool(getattr(source, rule, False))
    return FarspanConfig(
        **fields,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        attention=_attention(source, family),
        rope_parameters=rope,
        train_length=rope.get("original_max_position_embeddings") or source.max_position_embeddings,
        qk_norm=family.qk_norm,
    )


def _method(quantised: Any) -> Any:
    return quantised.get("quant_method", quantised) if isinstance(quantised, dict) else quantised


def _check_numbers(raw: dict[str, Any], where: str) -> None:
    """Check sizes by the names of their fields, before transformers and torch stumble over the values."""
    for field in (*SIZES, "head_dim"):
        size = raw.get(field)
        require(
            not isinstance(size, int) or 1 <= size < 2**31,
            f"{where}'s {field} must be at least 1 and below 2^31, got {size!r}; correct that field",
        )
    epsilon = raw.get("rms_norm_eps", 1e-6)
    require(
        isinstance(epsilon, int | float) and 0 < epsilon < 1,
        f"{where}'s rms_norm_eps must be a number between 0 and 1, got {epsilon!r}; correct that field",
    )


def _check_rope(raw: dict[str, Any], where: str, *, foreign: bool) -> None:
    """Check `rope_parameters`, or what older files have in its stead."""
    held = {"": {"rope_theta": raw.get("rope_theta")}}
    for field in ("rope_parameters", "rope_scaling"):
        rope = {} if raw.get(field) is None else raw[field]
        require(
            isinstance(rope, dict), f"{where}'s {field} must be an object or null, got {rope!r}; correct that field"
        )
        kind = rope.get("rope_type", rope.get("type", "default"))
        if foreign and kind not in ROPE_TYPES:  # transformers would warn and go on
            remedy = "checkpoints with other scaling methods cannot be converted"
            raise unknown(f"{where}'s {field}['rope_type']", kind, ROPE_TYPES, remedy)
        held[f"{field}."] = rope
    for prefix, rope in held.items():
        for field in ROPE_NUMBERS:
            number, least = rope.get(field), 1 if field == "rope_theta" else 0
            require(
                number is None or (type(number) in (int, float) and least < number < math.inf),
                f"{where}'s {prefix}{field} must be a number above {least}, got {number!r}; correct that field",
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


def _attention(source: Any, family: Family) -> str | list[dict[str, Any]]:
    layers = source.num_hidden_layers
    windows: list[int | None] = [None] * layers
    if family.windows == "all":
        windows = [source.sliding_window] * layers
    elif family.windows == "layers":
        windows = [source.sliding_window if kind == "sliding_attention" else None for kind in source.layer_types]
    rotary = [True] * layers if family.nope is None else [bool(flag) for flag in getattr(source, family.nope)]
    specs = [AttentionSpec("rope", None, windows[i], rotary[i]) for i in range(layers)]
    return "rope" if all(spec == AttentionSpec("rope") for spec in specs) else [spec.to_dict() for spec in specs]


def write_config(config: FarspanConfig, to: str, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the config.json of another family for a rope model. Raise if that loses anything but `without`.

    >>> write_config(FarspanConfig.preset("tiny", attention="rope"), "llama")["architectures"]
    ['LlamaForCausalLM']
    """
    if to not in FAMILIES:
        raise unknown("family", to, FAMILIES)
    family = FAMILIES[to]
    raw: dict[str, Any] = {"model_type": to, "architectures": [family.architecture]}
    raw |= {name: getattr(config, name) for name in SAME} | {"head_dim": config.head_dim}
    raw["rope_parameters"] = _foreign_rope(config)
    for ours in ("qkv_bias", "out_bias", "mlp_bias"):
        rule = getattr(family, ours)
        if isinstance(rule, str):
            raw[rule] = getattr(config, ours)
    if family.windows is not None:
        raw["sliding_window"] = config.sliding_window
    if family.windows == "layers":
        raw |= {"use_sliding_window": config.sliding_window is not None, "layer_types": config.layer_types}
    if family.nope is not None:
        raw[family.nope] = [int(spec.rotary) for spec in config.attention_specs]
    back = read_config(raw)
    for field in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "causal", "attention", "rotary", "log_length"):
        theirs, mine = _meaning(back, field), _meaning(config, field)
        require(
            mine == theirs or field in without,
            f"a {to} model cannot have this model's {field} ({mine}; it would have {theirs}); "
            "choose another family, or keep the farspan folder",
        )
    return raw


def _meaning(config: FarspanConfig, field: str) -> Any:
    """Return a field's value so that equal values compute alike."""
    if field == "rotary":
        return config.rotary()
    if field == "attention":
        words = [
            spec.name + (f" window {spec.window}" if spec.window else "") + ("" if spec.rotary else " without rotation")
            for spec in config.attention_specs
        ]
        return words[0] if len(set(words)) == 1 else ", ".join(words)
    return getattr(config, field)


def _foreign_rope(config: FarspanConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0})
    kind = rope.setdefault("rope_type", "default")
    per_query = rope.pop("mode", "per_query") == "per_query" and kind == "dynamic"
    require(
        kind in ROPE_TYPES and not per_query,
        f"rope_parameters must be of a type that transformers has, got {kind!r}"
        f"{' in mode per_query' if per_query else ''}; set_rope_parameters(rope_type='default') first",
    )
    return rope
