"""Scores that grow with the logarithm of the length: unchanged inside the training length, alike in all layers."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from farspan.layers import Attention
from tests.models.small import TIGHT, make, tokens


@torch.no_grad()
def test_log_length_can_be_set_on_a_finished_model_and_changes_nothing_inside_its_training(tmp_path: Path) -> None:
    model, x = make("coca-exact"), tokens(1, 30)
    plain = model(x).logits
    model.set_log_length(True)
    sharp = model(x).logits
    assert (sharp[:, :8] - plain[:, :8]).abs().max() <= TIGHT
    assert (sharp[:, 8:] - plain[:, 8:]).abs().amax(-1).min() > 1e-4
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(loaded(x).logits, sharp)
    model.set_log_length(False)
    assert torch.equal(model(x).logits, plain)
    with pytest.raises(ValueError, match="log_length needs a causal model with a softmax"):
        make("cosformer").set_log_length(True)


@torch.no_grad()
def test_log_length_in_a_model_is_that_of_its_layers_whatever_else_is_in_the_batch() -> None:
    """Layers of two kinds, each query by itself; then the same sequence after padding, and packed behind another."""
    model, x = make(["rope", "coca-slack"], num_hidden_layers=2, log_length=True), tokens(1, 20)
    hidden = model.model.embed_tokens(x)
    for block in model.model.layers:
        mine = block.self_attn
        plain = Attention(32, 4, mine.spec, num_key_heads=2).double()
        plain.load_state_dict(mine.state_dict())
        read, rows = block.input_layernorm(hidden), []
        for i in range(20):
            plain.scaling = mine.scaling * max(1.0, math.log(i + 1) / math.log(8))
            rows.append(plain(read[:, : i + 1])[:, i])
        hidden = hidden + torch.stack(rows, dim=1)
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    want = model.lm_head(model.model.norm(hidden))
    assert (model(x).logits - want).abs().max() <= TIGHT
    both, mask = torch.cat((tokens(1, 15), x), dim=1), torch.ones(1, 35, dtype=torch.long)
    mask[:, :15] = 0
    assert (model(both, attention_mask=mask).logits[:, 15:] - want).abs().max() <= TIGHT
    positions = torch.cat((torch.arange(15), torch.arange(20)))[None]
    assert (model(both, position_ids=positions, use_cache=False).logits[:, 15:] - want).abs().max() <= TIGHT
