"""Random configurations: each is a model with finite outputs, or a ValueError of one line."""

import random
import warnings
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from farspan import FarspanConfig, FarspanForCausalLM, FarspanForMaskedLM
from farspan.layers import HYBRIDS, NAMES

NAN, INF = float("nan"), float("inf")
BAD = [0, -1, -5, 2**70, 10**11, NAN, INF, -INF, "4", None, [], {}, True, 1.5]
"""Wrong for most fields, or far too much."""
GOOD: dict[str, list[Any]] = {
    "vocab_size": [1, 11, 97],
    "hidden_size": [2, 12, 32],
    "intermediate_size": [1, 7],
    "num_hidden_layers": [1, 2, 4],
    "num_attention_heads": [1, 2, 3],
    "num_key_value_heads": [1, 2, None],
    "head_dim": [2, 3, 4, 8, None],
    "attention": [*NAMES, *HYBRIDS, ["rope", {"kind": "coca", "window": 2}], {"kind": "pope", "rotary": False}, ["x"]],
    "coca_activation": ["relu", "softplus", "gelu"],
    "cosformer_max_length": [1, 64, None],
    "cosformer_beyond": ["raise", "decay", "decoupled"],
    "cosformer_activation": ["relu", "elu"],
    "causal": [True, False],
    "learned_positions": [0, 64],
    "train_length": [1, 2, 8, 64],
    "max_position_embeddings": [1, 64],
    "log_length": [True, False, "learned", "step", "x"],
    "polar_phase": [True, False],
    "polar_activation": ["relu", "softplus"],
    "kv_shift": [True, False],
    "qkv_bias": [True, False],
    "qk_norm": [True, False],
    "hidden_act": [*ACT2FN, "unknown"],
    "rms_norm_eps": [1e-30, 1e-6, 1.0, 1e-46],
    "initializer_range": [0.0, 0.02, 10.0, 1e30],
    "tie_word_embeddings": [True, False],
    "pad_token_id": [0, 10, 97, None],
    "bos_token_id": [0, 96, 10**6],
    "eos_token_id": [3, [0, 1], [0, 10**6], [None], ["a"]],
    "dtype": ["float32", "float16", "unknown", "nn", "int8", torch.float32],
    "attn_implementation": ["farspan", "eager", "sdpa", "flash_attention_2", "unknown"],
    "window": [1, 4],
    "global_every": [2, 3],
    "layer_types": [["full_attention"]],
    "sliding_window": [None, 4],
    "windw": [3],
}
ROPE: dict[str, list[Any]] = {
    "rope_type": ["default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"],
    "factor": [1.0, 4.0, 0.5],
    "rope_theta": [10_000.0, 1.0],
    "original_max_position_embeddings": [8, 64],
    "mode": ["per_query", "per_request"],
    "beta_fast": [32.0],
    "beta_slow": [1.0],
    "attention_factor": [1.0],
    "low_freq_factor": [1.0],
    "high_freq_factor": [4.0],
    "partial_rotary_factor": [1.0, 0.5],
    "full_attention": [{"rope_theta": 5.0}],
}


def draw(rng: random.Random, pool: dict[str, list[Any]], fields: int) -> dict[str, Any]:
    names = rng.sample(list(pool), fields)
    return {name: rng.choice(BAD) if rng.random() < 0.15 else rng.choice(pool[name]) for name in names}


def check(seed: int) -> bool:
    """Make and run the model of a random configuration; return whether it was one."""
    rng = random.Random(seed)
    options = draw(rng, GOOD, rng.randint(1, 5))
    if rng.random() < 0.4:
        options["rope_parameters"] = {"rope_type": rng.choice(ROPE["rope_type"]), **draw(rng, ROPE, rng.randint(0, 4))}
    small = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 2}
    kind = FarspanForMaskedLM if options.get("causal") is False else FarspanForCausalLM
    message = ""
    try:
        torch.manual_seed(seed)
        model = kind(FarspanConfig(**{**small, "num_attention_heads": 2, "train_length": 8, **options})).eval()
        ids, mask = torch.zeros(2, 6, dtype=torch.long), torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
        with torch.no_grad():
            assert model(ids, attention_mask=mask).logits.isfinite().all(), options
    except ValueError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1, options
    return not message


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_a_random_configuration_is_a_model_or_one_line(first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good = sum(check(seed) for seed in range(first, first + 50))
    assert 5 < good < 45
