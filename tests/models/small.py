"""Small models of every configuration, and tokens for them."""

import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Cache

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM

NAMES = ["rope", "alibi", "coca-exact", "coca-strict", "coca-slack"]
LOCAL = {"kind": "coca", "form": "exact", "window": 8}
MIXED = [LOCAL, "rope", {"kind": "coca", "form": "slack", "rotary": False}]
NOPE = {"kind": "rope", "rotary": False}
LINEAR = ["cosformer", LOCAL, "linear-coca"]
"""To be used with cosformer_beyond="decay"."""
PER_QUERY = {"rope_type": "dynamic", "factor": 4.0, "mode": "per_query"}
PER_REQUEST = {"rope_type": "dynamic", "factor": 4.0, "mode": "per_request"}
TIGHT = 1e-10
"""Bound for float64, where the initialisation is strong: nothing but rounding may differ."""


def make(
    attention: object = "coca-exact", *, dtype: torch.dtype = torch.float64, **options: object
) -> FarspanForCausalLM:
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "train_length": 8,
        # Strong enough that a wrong mask or angle moves the logits; float32 would show its rounding at 0.3.
        "initializer_range": 0.3 if dtype == torch.float64 else 0.1,
    }
    model = FarspanForCausalLM(FarspanConfig(attention=attention, **(settings | options))).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("phase", "shift", "length_scale")):  # they start where they change nothing
            torch.nn.init.normal_(parameter)
    return model


LEFT = torch.tensor([[1] * 20, [0] * 5 + [1] * 15])
RIGHT = LEFT.flip(1)
BOTH = torch.tensor([[0] * 3 + [1] * 17, [0] * 2 + [1] * 14 + [0] * 4])
"""Padding of two rows."""


def poisoned(embeddings: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put NaN, inf and -inf into the padding, a different one in each column."""
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=embeddings.dtype)
    bad = bad.repeat(embeddings.shape[-1])[: embeddings.shape[-1]]
    return torch.where(mask.bool()[..., None], embeddings, bad)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 97, shape)  # 0 is padding, from which `generate` would infer a mask


def chunked(
    model: FarspanForCausalLM,
    x: torch.Tensor,
    pieces: list[int],
    mask: torch.Tensor | None = None,
    *,
    length: int | None = None,
    cache: Cache | None = None,
    positions: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """Compute the logits of tokens x (b, n), or of embeddings (b, n, ·), read piece by piece through a cache."""
    cache, parts, seen = FarspanCache(model.config, max_length=length) if cache is None else cache, [], 0
    for piece in x.split(pieces, dim=1):
        begin, seen = seen, seen + piece.shape[1]
        given = {"input_ids" if piece.dim() == 2 else "inputs_embeds": piece}
        if mask is not None:
            given["attention_mask"] = mask[:, :seen]
        if positions is not None:
            given["position_ids"] = positions[:, begin:seen]
        parts.append(model(**given, past_key_values=cache, **options).logits)
    return torch.cat(parts, dim=1)


def compiled_steps(
    model: FarspanForCausalLM, x: torch.Tensor, prompt: int, slots: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """Compute the logits after a prompt token by token in a static cache, compiled, and count the graphs."""

    def seen(tokens: int, width: int) -> dict[str, torch.Tensor]:
        return {} if mask is None else {"attention_mask": F.pad(mask[:, :tokens], (0, width - tokens))}

    cache, parts = FarspanCache(model.config, max_length=slots), []
    model(x[:, :prompt], past_key_values=cache, **seen(prompt, prompt))
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=graphs)
    for i in range(prompt, x.shape[1]):
        parts.append(step(x[:, i : i + 1], past_key_values=cache, **seen(i + 1, slots)).logits)
    return torch.cat(parts, dim=1), graphs.frame_count


SOFTMAX = [
    {"attention": "rope"},
    {"attention": "alibi"},
    {"attention": "coca-exact"},
    {"attention": "coca-slack"},
    {"attention": "coca-strict", "coca_activation": "softplus", "qk_norm": True, "qkv_bias": True},
    {"attention": MIXED},
    {"attention": MIXED, "rope_parameters": PER_QUERY},
    {"attention": ["coca-exact", "rope", "coca-slack"], "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"attention": [{"kind": "alibi", "window": 1}, {"kind": "coca", "window": 2}, {"kind": "rope", "window": 1}]},
    {"attention": [*MIXED[:2], "alibi"], "log_length": True},
    {"attention": "coca-slack", "log_length": True, "rope_parameters": PER_QUERY},
    {"attention": ["pope", "coca-exact", "coca-polar"], "log_length": "learned", "polar_activation": "relu"},
    {
        "attention": [{"kind": "pope", "window": 8}, {"kind": "coca", "form": "polar", "window": 8}, NOPE],
        "log_length": "step",
        "kv_shift": True,
    },
]
CONFIGURATIONS = [
    *SOFTMAX,
    {"attention": "cosformer", "cosformer_max_length": 300},
    {
        "attention": ["cosformer", {"kind": "coca", "rotary": False}, "rope"],
        "log_length": True,
        "cosformer_beyond": "decay",
    },
    {"attention": ["cosformer", LOCAL, "cosformer"], "cosformer_beyond": "decoupled", "qk_norm": True},
    {
        "attention": ["linear-coca", LOCAL, {"kind": "linear-coca", "rotary": False}],
        "rope_parameters": {"rope_type": "ntk", "factor": 4.0},
        "coca_activation": "softplus",
        "qk_norm": True,
    },
]


def name_of(options: dict) -> str:
    return "-".join(str(v.get("rope_type")) if isinstance(v, dict) else str(v)[:12] for v in options.values())
