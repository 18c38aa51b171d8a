"""Configurations, masks and positions that make no sense raise with one line that says which and why."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from farspan import FarspanConfig, FarspanForCausalLM, FarspanForMaskedLM
from farspan.convert import from_pretrained
from tests.models.small import make, tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 7, dtype=torch.long)},
            r"attention_mask must have shape \(1, 10\).* got \(1, 7\)",
        ),
        ({"attention_mask": torch.ones(2, 10, dtype=torch.long)}, r"attention_mask must have shape \(1, 10\)"),
        (
            {"attention_mask": torch.full((1, 10), 0.5)},
            "1 for real tokens and 0 for padding, got torch.float32 of other",
        ),
        ({"attention_mask": torch.ones(1, 1, 10, 10)}, r"got \(1, 1, 10, 10\); position_ids .* keep packed documents"),
        ({"attention_mask": torch.ones(1, 1, 10, 10).bool()}, r"got \(1, 1, 10, 10\); position_ids .* keep packed"),
        ({"output_attentions": True}, "attn_implementation 'farspan', which computes no weights; use .*'eager'"),
        ({"position_ids": torch.arange(10)}, r"position_ids must have shape \(1, 10\).* got \(10,\)"),
        ({"position_ids": torch.arange(9)[None]}, r"position_ids must have shape \(1, 10\)"),
    ],
)
def test_masks_and_positions_of_the_wrong_shape_raise(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(tokens(1, 10), **options)


@pytest.mark.parametrize(
    ("option", "hint"),
    [("form", r"it belongs to an attention: attention=\{'kind': 'coca', 'form': …\}"), ("foo", "see")],
)
def test_options_that_no_model_has_raise(option: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"options of preset 'tiny' must be a model's fields, got '{option}'; {hint}"):
        FarspanConfig.preset("tiny", **{option: 8})


def test_a_mask_that_forgets_the_cache_raises() -> None:
    model = make()
    cache = model(tokens(1, 10), use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"attention_mask must have shape \(1, 13\), cached tokens included, got \(1, 3\)"
    ):
        model(tokens(1, 3), attention_mask=torch.ones(1, 3, dtype=torch.long), past_key_values=cache)


def test_an_encoder_is_no_language_model(tmp_path: Path) -> None:
    """Its weights fit, but it would read what it predicts."""
    FarspanForMaskedLM(FarspanConfig.preset("tiny")).save_pretrained(tmp_path)
    for load in (FarspanForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained, from_pretrained):
        with pytest.raises(ValueError, match=r"config.causal must be True for FarspanForCausalLM, got False"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "coca-exat"}, "attention must be one of .* got 'coca-exat'; did you mean 'coca-exact'"),
        ({"attention": ["rope"]}, "one entry for each of the 3 layers, got 1"),
        ({"attention": [{"kind": "rope", "windw": 3}] * 3}, "did you mean 'window'"),
        ({"atention": "rope"}, "did you mean 'attention'"),
        ({"hidden_size": 30, "num_attention_heads": 2}, "head_dim must be even to form rotary pairs, got 15"),
        ({"hidden_size": 33}, "hidden_size must be a multiple of num_attention_heads = 4, got 33"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads = 4, got 3"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}}, "scaling factor must be at least 1, got 0.5"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type.* must be one of"),
        (
            {"attention": "cosformer", "log_length": True},
            "log_length needs a causal model with a softmax .*'cosformer'",
        ),
        ({"train_length": 1, "log_length": True}, "train_length ≥ 2, got .*train_length=1; leave it out"),
        ({"cosformer_beyond": "clip"}, "cosformer_beyond must be one of 'raise'"),
        ({"cosformer_activation": "exp"}, "cosformer_activation must be one of 'relu', 'elu'"),
        ({"cosformer_max_length": 0}, "cosformer_max_length must be 1 … 2147483647, got 0"),
        ({"attention": [{"kind": "cosformer", "window": 3}] * 3}, "window cannot be combined"),
        ({"learned_positions": -1}, "learned_positions must be 0 … 16777216, got -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be 1 … 4096, got 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be 1e-30 … 1.0, got nan"),
        ({"vocab_size": -5}, "vocab_size must be 1 … 16777216, got -5"),
        ({"vocab_size": 1e11}, "Field 'vocab_size' expected int, got float"),
        ({"num_attention_heads": True}, "Field 'num_attention_heads' expected int, got bool"),
        ({"initializer_range": math.nan}, "initializer_range must be 0.0 … 10.0, got nan"),
        ({"norm_eps": math.nan}, "rms_norm_eps must be .* got nan"),
        ({"num_labels": 99999999999}, "num_labels must be 1 … 1048576, got 99999999999"),
        ({"hidden_act": "swigloo"}, "hidden_act must be one of .*'silu'"),
        ({"torch_dtype": "float33"}, "dtype must be one of 'float16', .* got 'float33'; did you mean 'float32'"),
        ({"pad_token_id": 97}, "pad_token_id must be 0 … 96, got 97"),
        ({"eos_token_id": [3, 97]}, "eos_token_id must be 0 … 96, got 97"),
        ({"attn_implementation": "flash_attention_2"}, "must be one that is installed, got 'flash_attention_2'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "Missing required keys"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": math.nan}},
            "rope_parameters must give finite angles",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "must be one mapping for all layers"),
        (
            {"attention": "hybrid", "window": 0, "global_every": 2},
            "window must be a whole number of keys ≥ 1 or None, got 0",
        ),
        ({"attention": "hybrid", "global_every": 9}, "global_every must be 2 … 3, the number of layers, got 9"),
        ({"attention": "hybrid", "causal": False, "global_every": 2}, "attention 'hybrid' needs a causal model, got"),
        ({"attention": "rope", "window": 4}, "window can be given for a hybrid only, got attention 'rope'; elsewhere"),
        ({"attention": "hybrid-pop"}, "attention must be one of .* did you mean 'hybrid-pope'?"),
        ({"log_length": "lerned"}, "log_length must be one of False, True, 'learned', 'step', got 'lerned'"),
        (
            {"kv_shift": True},
            "kv_shift needs a global layer without positions, got attention 'coca-exact'; use a hybrid",
        ),
    ],
)
def test_bad_configurations_raise_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        make(**options)
    assert "\n" not in str(raised.value)


def test_empty_input_raises() -> None:
    with pytest.raises(ValueError, match="at least one token, got length 0"):
        make()(torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize(("options", "message"), [({}, "model.safetensors"), ({"use_safetensors": False}, "pickles")])
def test_a_pickle_is_not_read(options: dict, message: str, tmp_path: Path) -> None:
    model = make("rope")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises((OSError, ValueError), match=message) as caught:
        FarspanForCausalLM.from_pretrained(tmp_path, **options)
    assert "\n" not in str(caught.value)
