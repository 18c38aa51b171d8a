"""Linear attention in the model: sums of constant size, any cache, gradients, and what raises."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from farspan import FarspanCache
from farspan.ops import NTK
from tests.models.small import LOCAL, PER_QUERY, PER_REQUEST, TIGHT, chunked, make, tokens


@pytest.mark.parametrize(
    ("attention", "options", "parts", "sums"),
    [
        ("cosformer", {"cosformer_beyond": "decoupled"}, 2, 1),  # its denominator is not rotated
        ("cosformer", {"cosformer_beyond": "decay"}, 3, 3),
        ("linear-coca", {}, 1, 0.5),  # a feature has half the width, rotated two
    ],
)
@torch.no_grad()
def test_generation_holds_the_same_bytes_however_far_it_has_come(
    attention: str, options: dict[str, Any], parts: int, sums: float
) -> None:
    """At position 1,000 and, in a sequence that begins at 999,000, at position 1,000,000."""
    model, x = make(attention, **options), tokens(1, 6)
    held = []
    for begin in (1_000, 1_000_000):
        cache = FarspanCache(model.config)
        for i in range(0, 30, 6):
            positions = torch.arange(begin + i, begin + i + 6)[None]
            logits = model(x, position_ids=positions, past_key_values=cache).logits
            held.append(cache.nbytes)
        assert logits.isfinite().all()
    assert set(held) == {8 * 3 * 2 * (parts * 8 * 8 + sums * 8)}  # float64, layers, key heads, Σ φ⊗v and Σ ψ


@torch.no_grad()
def test_a_compiled_model_continues_a_padded_sequence_in_a_growing_cache() -> None:
    """While it is traced, positions are tensors as for a static cache; the mask is of the new tokens all the same."""
    model, x = make("linear-coca", num_hidden_layers=1), tokens(2, 12)
    mask = (torch.arange(12)[None] >= torch.tensor([[0], [3]])).long()
    torch.compiler.reset()
    parts = chunked(torch.compile(model, backend="eager"), x, [9, 1, 2], mask)
    difference = parts - model(x, attention_mask=mask).logits
    assert difference[mask.bool()].abs().max() <= TIGHT


@torch.no_grad()
def test_a_model_past_its_m_names_the_remedy() -> None:
    model = make("cosformer")  # M is the length of training, 8
    model(tokens(1, 8))
    with pytest.raises(ValueError, match=r"max_length is M = 8 and the sequence spans 9 positions.*beyond="):
        model(tokens(1, 9))
    for cache in ("dynamic", "static"):
        with pytest.raises(ValueError, match="max_length is M = 8"):
            model.generate(tokens(1, 5), max_new_tokens=8, do_sample=False, pad_token_id=0, cache_implementation=cache)
    assert model.generate(tokens(1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 9)


@pytest.mark.parametrize("attention", ["cosformer", "linear-coca"])
@torch.no_grad()
def test_sums_cannot_be_cropped_and_other_caches_cannot_hold_them(attention: str) -> None:
    model, x = make(attention), tokens(1, 8)
    cache = model(x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot remove 3 tokens: this layer keeps only the sums of a linear layer"):
        cache.crop(-3)
    with pytest.raises(ValueError, match=r"must be a FarspanCache .* got DynamicCache; build FarspanCache\(config\)"):
        model(x, past_key_values=DynamicCache())


@torch.no_grad()
def test_frequencies_follow_the_configuration() -> None:
    model, x = make(["linear-coca", "rope", {"kind": "linear-coca", "rotary": False}]), tokens(1, 40)
    before = model(x)
    cache = model(x, use_cache=True).past_key_values
    model.set_rope_parameters(rope_type="ntk", factor=4.0)
    scalings = [layer.self_attn.rotary and layer.self_attn.rotary.scaling for layer in model.model.layers]
    assert scalings == [NTK(4.0), NTK(4.0), None]
    assert (model(x).logits - before.logits).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"state was made by .* and cannot continue as .*NTK"):
        model(tokens(1, 1), past_key_values=cache)


@pytest.mark.parametrize("scaling", [PER_QUERY, PER_REQUEST], ids=["per_query", "per_request"])
def test_dynamic_ntk_raises_before_anything_changes(scaling: dict) -> None:
    message = r"linear-coca layers need fixed frequencies, got DynamicNTK.*use rope_type 'ntk'"
    with pytest.raises(ValueError, match=message):
        make(["rope", "rope", "linear-coca"], rope_parameters=scaling)
    model = make("linear-coca")
    with pytest.raises(ValueError, match=message):
        model.set_rope_parameters(**scaling)
    assert model.config.rotary().scaling is None
    make([LOCAL, LOCAL, {"kind": "linear-coca", "rotary": False}], rope_parameters=scaling)  # has no angles
