"""Configurations across the border: a LLaMA-family configuration → FarspanConfig, and back where nothing is lost."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN

from farspan.configuration_farspan import FarspanConfig
from farspan.convert.families import FAMILIES, OTHER_FAMILIES, OTHER_LAWS, ROPE_TYPES, Family
from farspan.convert.sources import Place, Source
from farspan.errors import require, unknown
from farspan.layers import AttentionSpec

SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
"""Fields with one name and one meaning on both sides."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
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
"""Numbers above zero in `rope_parameters`; the base of the angles is above one."""

MALFORMED = (
    StrictDataclassError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ZeroDivisionError,
    RuntimeError,
)
"""What transformers and torch raise on fields of a wrong kind or size."""

CONFIG_JSON = Place()


@contextmanager
def sound_config(raw: dict[str, Any], place: Place) -> Iterator[None]:
    """What goes wrong inside is the fault of the configuration `raw`, and is said in one line."""
    try:
        yield
    except MALFORMED as error:
        kind, reason = raw.get("model_type"), f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{place.name} must be a valid {kind} configuration ({reason}); repair that field") from error


def config_of(source: Source) -> FarspanConfig:
    """The configuration of our rope model that computes what the source computes."""
    return read_config(source.config, source.place)


def read_config(raw: dict[str, Any], place: Place = CONFIG_JSON) -> FarspanConfig:
    """The same for a source with config.json = `raw`; `place` is what errors name in its stead.

    >>> raw = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 8, "rope_theta": 1e6}
    >>> config = read_config(raw)
    >>> config.attention_specs[0], config.rotary().base
    (AttentionSpec(kind='rope', form=None, window=8, rotary=True), 1000000.0)
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in (*FAMILIES, FarspanConfig.model_type):
        raise unknown(place.called("model_type"), kind, [*FAMILIES, FarspanConfig.model_type], OTHER_FAMILIES)
    check_sizes(raw, place)
    check_rope(raw, place)
    with sound_config(raw, place):
        config = FarspanConfig.from_dict(raw) if kind == FarspanConfig.model_type else _foreign(raw, kind, place)
    if config.hidden_act not in ACT2FN:
        raise unknown(place.called("hidden_act"), config.hidden_act, ACT2FN)
    return config


def _foreign(raw: dict[str, Any], kind: str, place: Place) -> FarspanConfig:
    from transformers import CONFIG_MAPPING

    require(
        not raw.get("quantization_config"),
        f"{place.called('quantization_config')} must be absent, got {_method(raw)!r}; "
        "convert the unquantised checkpoint",
    )
    _check_rope_type(raw, place)
    family, source = FAMILIES[kind], CONFIG_MAPPING[kind].from_dict(raw)
    width = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    rope = _rope(source)
    return FarspanConfig(
        **{name: getattr(source, name) for name in SAME},
        head_dim=width,
        attention=_attention(source, family),
        rope_parameters=rope,
        train_length=rope.get("original_max_position_embeddings") or source.max_position_embeddings,
        qkv_bias=_decided(source, family.qkv_bias),
        out_bias=_decided(source, family.out_bias),
        mlp_bias=_decided(source, family.mlp_bias),
        qk_norm=family.qk_norm,
    )


def _method(raw: dict[str, Any]) -> Any:
    found = raw.get("quantization_config")
    return found.get("quant_method", found) if isinstance(found, dict) else found


def check_sizes(raw: dict[str, Any], place: Place) -> None:
    """By the names of their fields, before transformers, torch and arithmetic trip over the values."""
    for field in SIZES:
        size = raw.get(field)
        require(
            not isinstance(size, int) or size >= 1,
            f"{place.called(field)} must be at least 1, got {size!r}; repair that field",
        )


def check_rope(raw: dict[str, Any], place: Place) -> None:
    """The same of the numbers that angles are made from, in `rope_parameters` or as older files have them."""
    holders = {"": raw, **{f"{field}.": rope for field, rope in _ropes(raw, place)}}
    for prefix, held in holders.items():
        for field in ROPE_NUMBERS if prefix else ("rope_theta",):
            number, least = held.get(field), 1 if field == "rope_theta" else 0
            require(
                number is None or (type(number) in (int, float) and least < number < math.inf),
                f"{place.called(prefix + field)} must be a number above {least}, got {number!r}; repair that field",
            )


def _ropes(raw: dict[str, Any], place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """What says how angles turn, by the names that newer and older files have for it."""
    for field in ("rope_parameters", "rope_scaling"):
        rope = {} if raw.get(field) is None else raw[field]
        require(
            isinstance(rope, dict), f"{place.called(field)} must be an object or null, got {rope!r}; repair that field"
        )
        yield field, rope


def _check_rope_type(raw: dict[str, Any], place: Place) -> None:
    """Before transformers reads it, which would warn about a type it does not know and go on."""
    for field, rope in _ropes(raw, place):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise unknown(place.called(f"{field}['rope_type']"), kind, ROPE_TYPES, OTHER_LAWS)


def _rope(source: Any) -> dict[str, Any]:
    """transformers has already brought `rope_theta` and `rope_scaling` of older files into `rope_parameters`."""
    rope = {name: value for name, value in source.rope_parameters.items() if value is not None and name != "type"}
    kind = rope.setdefault("rope_type", "default")
    if kind == "dynamic":
        # In one forward pass transformers takes one base for all tokens, from the length of the call.
        # That law measures against max_position_embeddings, here train_length.
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


def _decided(source: Any, rule: bool | str) -> bool:
    return rule if isinstance(rule, bool) else bool(getattr(source, rule, False))


def write_config(config: FarspanConfig, to: str) -> dict[str, Any]:
    """config.json of another family, `to`, for a rope model, where it loses nothing; what it would lose is refused.

    >>> write_config(FarspanConfig.preset("tiny", attention="rope"), "llama")["architectures"]
    ['LlamaForCausalLM']
    """
    if to not in FAMILIES:
        raise unknown("to", to, FAMILIES)
    family = FAMILIES[to]
    raw: dict[str, Any] = {"model_type": to, "architectures": [family.architecture]}
    raw |= {name: getattr(config, name) for name in SAME}
    raw |= {"head_dim": config.head_dim, "rope_parameters": _foreign_rope(config)}
    for ours in ("qkv_bias", "out_bias", "mlp_bias"):
        rule = getattr(family, ours)
        if isinstance(rule, str):
            raw[rule] = getattr(config, ours)
    raw |= _foreign_windows(config, family)
    back = read_config(raw)
    for field in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "causal", "attention", "rotary", "log_length"):
        theirs, mine = _meaning(back, field), _meaning(config, field)
        require(
            mine == theirs,
            f"to {to!r} would lose {field} (a {to} model has {theirs}, this one {mine}); "
            "choose another family, or keep the farspan folder",
        )
    return raw


def _meaning(config: FarspanConfig, field: str) -> Any:
    """A field's value so that equal values compute alike."""
    if field == "rotary":
        return config.rotary()
    if field == "attention":
        words = [
            spec.name + (f" window {spec.window}" if spec.window else "") + ("" if spec.rotary else " without rotation")
            for spec in config.attention_specs
        ]
        return words[0] if len(set(words)) == 1 else words
    return getattr(config, field)


def _foreign_rope(config: FarspanConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0})
    kind = rope.get("rope_type", "default")
    per_query = rope.pop("mode", "per_query") == "per_query" and kind == "dynamic"
    require(
        kind in ROPE_TYPES and not per_query,
        f"rope_parameters must be of a kind that transformers has, got {kind!r}"
        f"{' in mode per_query' if per_query else ''}; set_rope_parameters(rope_type='default') first",
    )
    return rope


def _foreign_windows(config: FarspanConfig, family: Family) -> dict[str, Any]:
    window = config.sliding_window
    if family.windows is None:
        return {}
    raw: dict[str, Any] = {"sliding_window": window}
    if family.windows == "layers":
        raw |= {"use_sliding_window": window is not None, "layer_types": config.layer_types}
    if family.nope is not None:
        raw[family.nope] = [int(spec.rotary) for spec in config.attention_specs]
    return raw
