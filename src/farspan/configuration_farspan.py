"""The configuration of a farspan model: a LLaMA-shaped decoder with one attention spec per layer."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from farspan.errors import require, require_choice, unknown
from farspan.layers import ACTIVATIONS, LENGTH_FORMS, AttentionSpec, hybrid
from farspan.ops.cosformer import BEYOND
from farspan.ops.masking import LIMIT
from farspan.ops.reference import ACTIVATIONS as COSFORMER_ACTIVATIONS
from farspan.ops.rotary import NTK, DynamicNTK, Linear, Llama3, Rotary, Scaling, YaRN

PRESETS: dict[str, dict[str, Any]] = {
    # Section 3.2: 350M parameters, 24 layers, hidden 1024, 16 heads, length 512 (SwiGLU at the same size).
    "350m": {},
    # As SmolLM2-135M.
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "train_length": 2048,
    },
    # As deep and wide as the smallest GPT-2; 124M parameters with RoPE.
    "124m": {
        "hidden_size": 768,
        "intermediate_size": 3008,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 16_384,
    },
    "33m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 16_384,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "train_length": 64,
    },
}

HYBRID_OPTIONS = ("window", "global_every")
ROPE_TYPES = ("default", "linear", "ntk", "dynamic", "yarn", "llama3")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("vocab_size", "intermediate_size"), (1, 2**24)),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), (1, 2**12)),
    **dict.fromkeys(("hidden_size", "head_dim"), (2, 2**20)),
    **dict.fromkeys(("cosformer_max_length", "train_length", "max_position_embeddings"), (1, LIMIT)),
    "learned_positions": (0, 2**24),
    "rms_norm_eps": (1e-30, 1.0),  # below, half precision divides by zero
    "initializer_range": (0.0, 10.0),
}
"""The least and the largest value of a number."""


def _in_one_line(init: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor raise ValueErrors of one line, whatever transformers raises for a value of the wrong type."""

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except (StrictDataclassError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise ValueError(f"a model's configuration must have valid fields, got one that fails: {reason}") from error

    return checked


@strict
class FarspanConfig(PreTrainedConfig):
    """Configure a farspan model. The defaults are the paper's 350M model with exact CoCA.

    Args:
        attention: "rope", "alibi", "coca-exact", "coca-strict", "coca-slack", "coca-polar", "pope", "cosformer" or
            "linear-coca" (experimental) for every layer, or a list with one entry per layer, each a name or a mapping
            such as ``{"kind": "coca", "form": "exact", "window": 128}``. "hybrid-rope",
            "hybrid-coca-exact", "hybrid-coca-polar", "hybrid-pope" and "hybrid-cosformer" stand for local layers of
            that kind and global ones without positions; "hybrid" is "hybrid-pope". They become a list of layers.
        window, global_every: of a hybrid, the keys that a local layer sees (128), and the layers per global one (4).
        coca_activation: keeps t ≥ 0: "relu" (the paper) or "softplus".
        cosformer_max_length: M, the distance at which cosFormer's cosine reaches zero; default `train_length`.
        cosformer_beyond: what its weights do past M: "raise", "decoupled" or "decay".
        cosformer_activation: "relu" (the paper) or "elu" (elu + 1).
        train_length: length of training, against which dynamic NTK, YaRN and `log_length` measure.
        rope_parameters: as in transformers; for ``"rope_type": "dynamic"`` also ``"mode"``, "per_query" (default)
            or "per_request". Linear CoCA layers take every scaling except "dynamic".
        log_length: a temperature for scores that follows n, the number of keys. True: ln n / ln train_length for
            n > `train_length`, in every layer with a softmax (in a window, n is at most its width). "learned": s·ln n
            with s learned per head. "step": 1 + 0.1·ln(1 + ⌊position / train_length⌋), which other engines run. The
            last two are for layers without a window. Default: True for hybrids, else False.
        polar_phase, polar_activation: of PoPE and polar CoCA: learn a phase per head and frequency (True), and what
            keeps their magnitudes ≥ 0: "softplus" or "relu".
        kv_shift: an experiment: mix keys and values of global layers without positions with those of the token before.
        causal: False makes a bidirectional encoder.
        learned_positions: for an encoder, the number of positions with an embedding of their own, added to the tokens';
            no sequence may be longer. 0 = none.

    >>> FarspanConfig.preset("tiny", attention="rope").num_hidden_layers
    4
    """

    model_type = "farspan"
    attribute_map = {"norm_eps": "rms_norm_eps"}  # noqa: RUF012
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    ignore_keys_at_rope_validation = {"mode"}  # noqa: RUF012

    vocab_size: int = 50_304
    hidden_size: int = 1024
    intermediate_size: int = 2736
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention: str | list | dict = "coca-exact"  # type: ignore[type-arg]
    coca_activation: str = "relu"
    cosformer_max_length: int | None = None
    cosformer_beyond: str = "raise"
    cosformer_activation: str = "relu"
    causal: bool = True
    learned_positions: int = 0
    train_length: int = 512
    max_position_embeddings: int = 32_768
    rope_parameters: dict | None = None  # type: ignore[type-arg]
    log_length: bool | str | None = None
    polar_phase: bool = True
    polar_activation: str = "softplus"
    kv_shift: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    _validate_ntk_rope_parameters = PreTrainedConfig._validate_linear_rope_parameters  # or transformers logs a warning

    def __new__(cls, *args: Any, **kwargs: Any) -> "FarspanConfig":
        """Import the models, which register themselves with the Auto classes.

        `__new__` also runs when a config is unpickled or copied, as in the worker processes of a server. Importing
        the models takes seconds, so `import farspan` alone does not.
        """
        from farspan import modeling_farspan  # noqa: F401

        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("cache_layout", None)  # of version 0.1, which could also cache rotated keys; the logits are the same
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        labels = kwargs.get("num_labels")
        good = labels is None or (isinstance(labels, int) and 1 <= labels <= 2**20)
        require(good, f"num_labels must be 1 … {2**20}, got {labels!r}")
        self._check_numbers(kwargs.get("torch_dtype"))
        self._expand_hybrid(**{name: kwargs.pop(name) for name in HYBRID_OPTIONS if name in kwargs})
        for key in _unknown_keys(kwargs):
            if near := get_close_matches(key, FIELDS, n=3, cutoff=0.85):  # the default would be used in its place
                raise unknown("configuration key", key, near)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            require(
                self.hidden_size % self.num_attention_heads == 0,
                f"hidden_size must be a multiple of num_attention_heads = {self.num_attention_heads}, "
                f"got {self.hidden_size}; give head_dim to choose another width",
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is not None and self.rope_parameters.get("rope_type") in ("yarn", "llama3"):
            # transformers would fill in max_position_embeddings, which says nothing about training here.
            self.rope_parameters = {"original_max_position_embeddings": self.train_length, **self.rope_parameters}
        if kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = "farspan"
        super().__post_init__(**kwargs)
        self._check()

    def _expand_hybrid(self, **options: int) -> None:
        """Replace the name of a hybrid by its layers, and set what it needs to work past the training length."""
        found = isinstance(self.attention, str) and self.attention.startswith("hybrid")
        require(
            found or not options,
            f"{' and '.join(options)} can be given for a hybrid only, got attention {self.attention!r}; "
            "elsewhere a window belongs to a layer: attention={'kind': 'rope', 'window': 128}",
        )
        self.log_length = found if self.log_length is None else self.log_length
        if found:
            require(self.causal, f"attention {self.attention!r} needs a causal model, got causal=False; use another")
            if self.attention == "hybrid-cosformer" and self.cosformer_beyond == "raise":
                self.cosformer_beyond = "decay"
            specs = hybrid(str(self.attention), self.num_hidden_layers, **options)
            self.attention = [spec.to_dict() for spec in specs]

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "FarspanConfig":
        """Make the configuration of a named size, one of :data:`PRESETS`, with some fields replaced."""
        require_choice("preset", name, PRESETS)
        config = cls(**{**PRESETS[name], **overrides})
        for key in _unknown_keys(overrides):  # transformers would keep them without a word
            hint = "see help(FarspanConfig)"
            if key in AttentionSpec.__dataclass_fields__:
                hint = f"it belongs to an attention: attention={{'kind': 'coca', {key!r}: …}}"
            raise ValueError(f"options of preset {name!r} must be a model's fields, got {key!r}; {hint}")
        return config

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One spec per layer."""
        if isinstance(self.attention, list):
            return tuple(AttentionSpec.parse(entry) for entry in self.attention)
        return (AttentionSpec.parse(self.attention),) * self.num_hidden_layers

    @property
    def layer_types(self) -> list[str]:
        """What each layer caches, in transformers' words. `attention` decides; a value that is set is ignored."""
        return ["full_attention" if spec.window is None else "sliding_attention" for spec in self.attention_specs]

    @layer_types.setter
    def layer_types(self, value: object) -> None: ...

    @property
    def sliding_window(self) -> int | None:
        """The widest window, for tools that know only one: they keep enough, and the layer masks the rest."""
        return max((spec.window for spec in self.attention_specs if spec.window is not None), default=None)

    @sliding_window.setter
    def sliding_window(self, value: object) -> None: ...

    def rotary(self) -> Rotary:
        """Make the rotary that `rope_parameters` describe."""
        rope = self.rope_parameters or {}
        kind, factor = rope.get("rope_type", "default"), rope.get("factor", 1.0)
        length = rope.get("original_max_position_embeddings", self.train_length)
        require_choice("rope_parameters['rope_type']", kind, ROPE_TYPES, "choose one of these")
        require(
            type(length) is int and 1 <= length <= LIMIT and not any(isinstance(x, dict) for x in rope.values()),
            "rope_parameters must be one mapping for all layers, with original_max_position_embeddings ≥ 1, "
            f"got {rope}; correct it",
        )
        require(
            rope.get("partial_rotary_factor", 1.0) == 1.0,
            f"partial_rotary_factor must be 1, got {rope.get('partial_rotary_factor')}; every pair is rotated here",
        )
        scaling: Scaling | None = None
        if kind == "linear":
            scaling = Linear(factor)
        elif kind == "ntk":
            scaling = NTK(factor)
        elif kind == "dynamic":
            scaling = DynamicNTK(factor, length, rope.get("mode", "per_query"))
        elif kind == "yarn":
            betas = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
            scaling = YaRN(factor, length, *betas, rope.get("attention_factor"), rope.get("truncate", True))
        elif kind == "llama3":
            scaling = Llama3(factor, length, rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0))
        assert self.head_dim is not None
        return Rotary(self.head_dim, rope.get("rope_theta", 10_000.0), scaling)

    def _check_numbers(self, torch_dtype: Any) -> None:
        """Raise for numbers outside of their limits, and for a dtype that no weight can have."""
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), (0, self.vocab_size - 1))
        for name, (low, high) in (LIMITS | tokens).items():
            values = getattr(self, name)
            for value in values if isinstance(values, list) else [values]:
                require(value is None or low <= value <= high, f"{name} must be {low} … {high}, got {value!r}")
        dtype = torch_dtype if self.dtype is None else self.dtype
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and found not in DTYPES:
            raise unknown("dtype", dtype, [str(x).removeprefix("torch.") for x in DTYPES])

    def _check(self) -> None:
        """Raise for values that no model can have, and bring `attention` into a form that JSON can hold."""
        if isinstance(self.attention, list):
            require(
                len(self.attention) == self.num_hidden_layers,
                f"attention must have one entry for each of the {self.num_hidden_layers} layers, "
                f"got {len(self.attention)}; set num_hidden_layers or repeat the pattern",
            )
            self.attention = [_plain(entry) for entry in self.attention]
        else:
            self.attention = _plain(self.attention)
        specs = self.attention_specs
        from transformers.activations import ACT2FN  # imports models' code, which `import farspan` does without

        for name, options in {**CHOICES, "hidden_act": ACT2FN}.items():
            require_choice(name, getattr(self, name), options)
        rotary = self.rotary()  # raises for odd head_dim and bad scaling
        found = rotary.at_length(4 * self.train_length).frequencies(device=torch.device("cpu")) * rotary.factor
        require(bool(found.isfinite().all()), f"rope_parameters must give finite angles, got {self.rope_parameters}")
        assert self.num_key_value_heads is not None
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_key_value_heads must divide num_attention_heads = {self.num_attention_heads}, "
            f"got {self.num_key_value_heads}; choose a divisor",
        )
        require(
            not rotary.is_dynamic or not any(spec.kind == "linear-coca" and spec.rotary for spec in specs),
            f"linear-coca layers need fixed frequencies, got {rotary.scaling}: sums cannot be rotated again; "
            "use rope_type 'ntk', 'linear' or 'yarn'",
        )
        require(
            not self.log_length or (self.causal and self.train_length > 1 and not all(spec.linear for spec in specs)),
            "log_length needs a causal model with a softmax and train_length ≥ 2, got "
            f"causal={self.causal}, attention={self.attention!r}, train_length={self.train_length}; leave it out",
        )
        require(
            not self.kv_shift or any(spec.shiftable for spec in specs),
            f"kv_shift needs a global layer without positions, got attention {self.attention!r}; use a hybrid",
        )


FarspanConfig.__init__ = _in_one_line(FarspanConfig.__init__)  # type: ignore[method-assign]
CHOICES: dict[str, Iterable[Any]] = {
    "coca_activation": ACTIVATIONS,
    "polar_activation": ACTIVATIONS,
    "cosformer_beyond": BEYOND,
    "cosformer_activation": COSFORMER_ACTIVATIONS,
    "log_length": (False, True, *LENGTH_FORMS[1:]),
}
FIELDS = [field.name for field in fields(FarspanConfig)]


def _plain(attention: Any) -> str | dict[str, Any]:
    """Return one layer's attention as JSON can hold it; raise for unknown names."""
    spec = AttentionSpec.parse(attention)
    return attention if isinstance(attention, str) else spec.to_dict()


def _unknown_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys that neither we nor transformers know."""
    return [
        key
        for key in keys
        if key not in (*FIELDS, *HYBRID_OPTIONS, *FarspanConfig.attribute_map, "attn_implementation")
        and not hasattr(PreTrainedConfig, key)
    ]


AutoConfig.register("farspan", FarspanConfig, exist_ok=True)
