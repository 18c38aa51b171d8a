"""Linear CoCA in the model: frequencies from the configuration, sums of constant size, encoders, and refusals."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from farspan import FarspanCache, FarspanForMaskedLM, FarspanForSequenceClassification
from farspan.models.linear import FarspanLinearCocaAttention
from farspan.ops import NTK, Linear
from tests.models.small import LOCAL, PER_QUERY, PER_REQUEST, TIGHT, make, tokens


@torch.no_grad()
def test_a_compiled_model_continues_a_padded_text_in_a_growing_cache() -> None:
    """While it is traced, positions are tensors as for a static cache; the mask is of the new tokens all the same."""
    model, x = make("linear-coca", num_hidden_layers=1), tokens(2, 12)
    mask = (torch.arange(12)[None] >= torch.tensor([[0], [3]])).long()
    torch.compiler.reset()
    compiled, cache, parts, seen = torch.compile(model, backend="eager"), FarspanCache(model.config), [], 0
    for piece in x.split([9, 1, 2], dim=1):
        seen += piece.shape[1]
        parts.append(compiled(piece, attention_mask=mask[:, :seen], past_key_values=cache).logits)
    difference = torch.cat(parts, dim=1) - model(x, attention_mask=mask).logits
    assert difference[mask.bool()].abs().max() <= TIGHT


@torch.no_grad()
def test_frequencies_follow_the_configuration() -> None:
    model, x = make(["linear-coca", "rope", {"kind": "linear-coca", "rotary": False}]), tokens(1, 40)
    before = model(x)
    cache = model(x, use_cache=True).past_key_values
    model.set_rope_parameters(rope_type="ntk", factor=4.0)
    scalings = [layer.self_attn.rotary and layer.self_attn.rotary.scaling for layer in model.model.layers]
    assert scalings == [NTK(4.0), NTK(4.0), None]
    stretched = make(model.config.attention, rope_parameters={"rope_type": "ntk", "factor": 4.0})
    stretched.load_state_dict(model.state_dict())
    assert torch.equal(model(x).logits, stretched(x).logits)
    assert (model(x).logits - before.logits).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"state was made by .* and cannot continue as .*NTK"):
        model(tokens(1, 1), past_key_values=cache)
    model.set_rope_parameters(rope_type="linear", factor=2.0)
    assert model.model.layers[0].self_attn.rotary.scaling == Linear(2.0)


@pytest.mark.parametrize("law", [PER_QUERY, PER_REQUEST], ids=["per_query", "per_request"])
def test_dynamic_ntk_is_refused_before_anything_changes(law: dict) -> None:
    message = r"linear-coca layers need fixed frequencies, got DynamicNTK.*use rope_type 'ntk'"
    with pytest.raises(ValueError, match=message):
        make(["rope", "rope", "linear-coca"], rope_parameters=law)
    model = make("linear-coca")
    with pytest.raises(ValueError, match=message):
        model.set_rope_parameters(**law)
    assert model.config.rotary().scaling is None
    make([LOCAL, LOCAL, {"kind": "linear-coca", "rotary": False}], rope_parameters=law)  # has no angles


@pytest.mark.parametrize("kind", [FarspanForMaskedLM, FarspanForSequenceClassification])
@torch.no_grad()
def test_encoders_look_both_ways_and_ignore_padding(kind: type) -> None:
    model, x = kind(make("linear-coca").config).double().eval(), tokens(1, 20)
    alone = model(x).logits[0]
    for left, right in ((6, 0), (0, 6), (3, 3)):
        padded = torch.nn.functional.pad(x, (left, right), value=5)
        mask = torch.nn.functional.pad(torch.ones_like(x), (left, right))
        batch = model(padded.repeat(2, 1), attention_mask=torch.cat((mask, torch.ones_like(mask)))).logits[0]
        got = batch[left : left + 20] if kind is FarspanForMaskedLM else batch
        assert (got - alone).abs().max() <= TIGHT
    y = x.clone()
    y[0, -1] = y[0, -1] % 96 + 1
    hidden = [model.model(t).last_hidden_state[0, 0] for t in (x, y)]
    assert (hidden[0] - hidden[1]).abs().max() > 1e-5


@torch.no_grad()
def test_what_cannot_be_done_is_refused() -> None:
    model, x = make("linear-coca"), tokens(1, 10)
    cache = model(x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="a linear layer cannot forget 3 tokens, they are summed"):
        cache.crop(-3)
    with pytest.raises(ValueError, match=r"must be a FarspanCache where there are linear layers, got DynamicCache"):
        model(x, past_key_values=DynamicCache())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation 'sdpa' cannot run linear CoCA; use 'farspan'"):
        model(x)


def test_save_and_load(tmp_path) -> None:
    model, x = make("linear-coca", rope_parameters={"rope_type": "yarn", "factor": 4.0}), tokens(2, 20)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).double().eval()
    assert isinstance(loaded.model.layers[0].self_attn, FarspanLinearCocaAttention)
    assert torch.allclose(loaded(x).logits, model(x).logits, atol=1e-12)
