"""Hybrids and what global layers without positions add: length temperatures, shifted keys, and layouts by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from farspan import FarspanConfig, FarspanForCausalLM, FarspanForSequenceClassification
from farspan.layers import HYBRIDS, Attention
from farspan.ops import rope_attention
from tests.models.small import NOPE, TIGHT, make, tokens


def make_hybrid(name: str) -> FarspanForCausalLM:
    window = {} if name == "hybrid-cosformer" else {"window": 8}
    return make(name, num_hidden_layers=4, global_every=2, **window)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_configuration_holds_the_list_of_layers(name: str, tmp_path: Path) -> None:
    model = make_hybrid(name)
    local, everywhere = model.config.attention_specs[:2]
    assert local.name == HYBRIDS[name]
    assert local.window == (None if local.linear else 8)
    assert (everywhere.kind, everywhere.window, everywhere.rotary) == ("rope", None, False)
    assert model.config.log_length is True
    model.save_pretrained(tmp_path)
    again = FarspanForCausalLM.from_pretrained(tmp_path)
    assert again.config.attention_specs == model.config.attention_specs
    ids = tokens(1, 1000)  # far past training
    with torch.no_grad():
        logits = model(ids).logits
        assert logits.isfinite().all()
        assert torch.equal(again(ids).logits, logits)


@pytest.mark.parametrize("name", ["hybrid-rope", "hybrid-pope"])
def test_compiled_graphs_serve_all_lengths(name: str) -> None:
    """On a CPU one block of queries has its own graph, as have lengths that fill their blocks."""
    model, graphs = make_hybrid(name), []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (70, 300, 128, 5, 64):
            ids = tokens(2, n)
            assert torch.allclose(compiled(ids, use_cache=False).logits, model(ids).logits, atol=1e-5)
    assert len(graphs) <= 4


def test_an_encoder_cannot_be_a_hybrid() -> None:
    with pytest.raises(ValueError, match="log_length, which hybrids have, needs a causal model"):
        FarspanForSequenceClassification(FarspanConfig.preset("tiny", attention="hybrid"))
    with pytest.raises(ValueError, match="window must be left out of 'hybrid-cosformer', got 8"):
        FarspanConfig.preset("tiny", attention="hybrid-cosformer", window=8)


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


FORMS: dict[bool | str, Callable[[int, Tensor], Tensor]] = {
    True: lambda n, _: torch.full((1,), max(1.0, math.log(n) / math.log(8)), dtype=torch.float64),
    "step": lambda n, _: torch.full((1,), 1 + 0.1 * math.log(1 + (n - 1) // 8), dtype=torch.float64),
    "learned": lambda n, scale: scale * math.log(n),
}
"""What the scores of the n-th token are multiplied by, for training length 8; scores of CoCA by its square."""


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_log_length_in_a_model_is_that_of_its_layers_whatever_else_is_in_the_batch(form: bool | str) -> None:
    """Layers of three kinds, each query by itself; then the same sequence after padding, and packed behind another."""
    model, x = make(["rope", "coca-slack", "pope"], log_length=form), tokens(1, 20)
    hidden = model.model.embed_tokens(x)
    for block in model.model.layers:
        mine = block.self_attn
        plain = Attention(32, 4, mine.spec, num_key_heads=2).double()
        plain.load_state_dict(mine.state_dict(), strict=False)
        read, rows, given = block.input_layernorm(hidden), [], plain.project
        for i in range(20):
            scale = mine.length_scale
            gain = FORMS[form](i + 1, scale if scale is None or mine.spec.kind != "coca" else scale**2)
            gain = gain.sqrt() if mine.spec.kind == "coca" else gain  # of second degree in the query
            gain = gain * (scale.sign() if scale is not None and mine.spec.kind == "coca" else 1)

            def project(part: Tensor, gain: Tensor = gain, given: Any = given) -> tuple[Tensor, ...]:
                q, k, v = given(part)
                return q * gain[None, :, None, None], k, v

            plain.project = project
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


def test_a_learned_scale_starts_as_one_at_the_length_of_training_and_is_trained(tmp_path: Path) -> None:
    config = FarspanConfig.preset("tiny", attention="hybrid-rope", global_every=2, log_length="learned")
    model, x = FarspanForCausalLM(config), tokens(1, 20)
    scales = [block.self_attn.length_scale for block in model.model.layers]
    assert [scale is None for scale in scales] == [True, False] * 2  # windows have none
    assert torch.allclose(scales[1] * math.log(64), torch.ones(4))
    model(x, labels=x).loss.backward()
    assert all(scale.grad.abs().min() > 0 for scale in scales[1::2])
    torch.nn.init.normal_(scales[1])
    model.save_pretrained(tmp_path)
    assert torch.equal(FarspanForCausalLM.from_pretrained(tmp_path)(x).logits, model.eval()(x).logits)
    with pytest.raises(ValueError, match="'learned' belongs to the weights, so 'learned' cannot become True"):
        model.set_log_length(True)


@torch.no_grad()
def test_shifted_keys_and_values_are_mixed_with_those_of_the_token_before() -> None:
    model = make([{"kind": "rope", "window": 4}, NOPE], num_hidden_layers=2, kv_shift=True, qkv_bias=True)
    layer, hidden = model.model.layers[1].self_attn, torch.randn(1, 9, 32, dtype=torch.float64)
    q, k, v = layer.project(hidden)
    shares = layer.shift.view(2, 2, 1, 1)
    k, v = (y + a * (F.pad(y, (0, 0, 1, 0))[:, :, :-1] - y) for y, a in zip((k, v), shares, strict=True))
    want = rope_attention(q, k, v, rotary=None).transpose(1, 2).flatten(2) @ layer.o_proj.weight.T
    assert (layer(hidden) - want).abs().max() <= TIGHT
    assert model.model.layers[0].self_attn.shift is None


def test_phases_and_the_activation_of_magnitudes_can_be_chosen() -> None:
    x, found = tokens(1, 12), []
    for options in ({}, {"polar_phase": False}, {"polar_activation": "relu"}):
        torch.manual_seed(0)
        model = make(["pope", "coca-polar", "rope"], **options)
        assert any("phase" in name for name in model.state_dict()) == options.get("polar_phase", True)
        found.append(model(x).logits)
    assert (found[0] - found[1]).abs().max() > 1e-3 < (found[0] - found[2]).abs().max()
