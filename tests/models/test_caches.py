"""Caches and sums: the same logits however a sequence arrives, and no more bytes than promised."""

import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

from farspan import FarspanCache
from tests.models.small import (
    CONFIGURATIONS,
    LINEAR,
    LOCAL,
    MIXED,
    PER_QUERY,
    PER_REQUEST,
    TIGHT,
    chunked,
    make,
    name_of,
    tokens,
)


@pytest.mark.parametrize(
    ("options", "dtype", "bound"),
    [
        *((options, torch.float64, TIGHT) for options in CONFIGURATIONS),
        ({"attention": MIXED}, torch.float32, 1e-5),
        ({"attention": LINEAR, "cosformer_beyond": "decay"}, torch.float32, 1e-5),
        ({"attention": "coca-exact"}, torch.float16, 0.01),
    ],
    ids=lambda x: name_of(x) if isinstance(x, dict) else str(x),
)
@torch.no_grad()
def test_prefill_equals_decode_equals_any_chunking(options: dict, dtype: torch.dtype, bound: float) -> None:
    """66 tokens at training length 8: dynamic NTK grows through four doublings on the way."""
    model, x = make(**options, dtype=dtype), tokens(2, 66)
    whole = model(x).logits
    for pieces, length in (([1] * 66, None), ([7, 1, 9, 20, 29], None), ([18, 1, 1, 46], 70)):
        assert (chunked(model, x, pieces, length=length) - whole).abs().max() <= bound
    assert whole.std() > 0.05


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda config: DynamicCache(),
        lambda config: DynamicCache(config=config),
        lambda config: StaticCache(config=config, max_cache_len=48),
    ],
    ids=["bare", "config", "static"],
)
@torch.no_grad()
def test_plain_transformers_caches_work(make_cache) -> None:
    model, x = make(MIXED), tokens(1, 40)
    assert (chunked(model, x, [25, 1, 14], cache=make_cache(model.config)) - model(x).logits).abs().max() <= TIGHT


@pytest.mark.parametrize("attention", ["coca-slack", "rope", "alibi"])
@torch.no_grad()
def test_positions_given_with_a_cache_shift_the_whole_sequence(attention: str) -> None:
    """Slack depends on absolute positions; RoPE and ALiBi must agree in what the cache holds and what is added."""
    model, x = make(attention), tokens(1, 30)
    positions = torch.arange(100, 130)[None]
    want = model(x, position_ids=positions).logits
    assert (chunked(model, x, [11, 1, 18], positions=positions) - want).abs().max() <= TIGHT


@torch.no_grad()
def test_right_padding_can_be_continued_without_windows_and_raises_with_them() -> None:
    """Whatever it holds."""
    mask = torch.ones(1, 23, dtype=torch.long)
    mask[0, 14:20] = 0
    x = tokens(1, 23)
    for attention in ("coca-exact", "coca-slack", "rope", "alibi", "linear-coca"):
        model = make(attention)
        bad = model.model.embed_tokens(x).masked_fill(mask[..., None] == 0, torch.nan)
        want = model(x[:, mask[0].bool()]).logits[:, -3:]
        assert (chunked(model, x, [20, 3], mask)[:, 20:] - want).abs().max() <= TIGHT
        assert (chunked(model, bad, [20, 3], mask)[:, 20:] - want).abs().max() <= TIGHT
    with pytest.raises(ValueError, match="window layers cannot continue; pad on the left"):
        chunked(make(MIXED), x, [20, 3], mask)


@torch.no_grad()
def test_coca_keeps_three_quarters_of_the_bytes_of_rope_and_a_window_only_its_own() -> None:
    held = {}
    for attention in ("rope", "coca-exact", "coca-slack", "coca-strict"):
        held[attention] = make(attention)(tokens(1, 64), use_cache=True).past_key_values.nbytes
    assert {held[name] / held["rope"] for name in held if name != "rope"} == {0.75}
    cache = make(MIXED)(tokens(1, 64), use_cache=True).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [7, 64, 64]
    assert cache.layers[0].keys.untyped_storage().nbytes() == cache.layers[0].keys.nbytes  # not a view of the prompt


def test_a_model_in_training_makes_no_cache() -> None:
    model, x = make(), tokens(1, 5)
    assert model.train()(x, use_cache=True).past_key_values is None
    with torch.no_grad():
        assert model(x).past_key_values.get_seq_length() == 5
    assert model.eval()(x).past_key_values.get_seq_length() == 5
    cache = FarspanCache(model.config)
    assert model.train()(x, past_key_values=cache).past_key_values is cache  # a given one is used
    assert cache.get_seq_length() == 5


@torch.no_grad()
def test_per_request_holds_one_base_for_the_request() -> None:
    x = tokens(1, 40)
    for attention in ("coca-exact", "rope"):
        model = make(attention, rope_parameters=PER_REQUEST)
        fixed = model(x, rotary_length=64).logits
        assert (chunked(model, x, [20, 1, 19], rotary_length=64) - fixed).abs().max() <= TIGHT
        assert (model(x).logits - fixed).abs().max() > 1e-3  # its own length gives another base
        assert (model(x, rotary_length=40).logits - model(x).logits).abs().max() <= TIGHT


def test_a_cache_that_grew_with_frozen_keys_has_gradients() -> None:
    """An append in place would change what the backward pass of an earlier step needs."""
    model, x = make("coca-exact", hidden_size=64), tokens(1, 400)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    cache = FarspanCache(model.config)
    with torch.no_grad():
        model(x[:, :396], past_key_values=cache)
    loss = sum(model(x[:, i : i + 1], past_key_values=cache).logits.square().mean() for i in range(396, 399))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def test_a_kept_static_cache_serves_calls_outside_inference_mode_and_is_not_pickled() -> None:
    model, x = make(["coca-exact", "cosformer", "rope"], cosformer_beyond="decay"), tokens(1, 8)
    size = len(pickle.dumps(model))
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    with torch.inference_mode():
        inside = model.generate(x, **options)
    assert torch.equal(model.generate(x, **options), inside)
    assert len(pickle.dumps(model)) <= size + 2000


@torch.no_grad()
def test_a_compiled_model_continues_a_padded_sequence_in_a_growing_cache() -> None:
    """While it is traced, positions are tensors as for a static cache; the mask is of the new tokens all the same."""
    model, x = make("linear-coca", num_hidden_layers=1), tokens(2, 12)
    mask = (torch.arange(12)[None] >= torch.tensor([[0], [3]])).long()
    torch.compiler.reset()
    parts = chunked(torch.compile(model, backend="eager"), x, [9, 1, 2], mask)
    difference = parts - model(x, attention_mask=mask).logits
    assert difference[mask.bool()].abs().max() <= TIGHT


@pytest.mark.parametrize("attention", ["cosformer", "linear-coca"])
@torch.no_grad()
def test_sums_cannot_be_cropped_and_other_caches_cannot_hold_them(attention: str) -> None:
    model, x = make(attention), tokens(1, 8)
    cache = model(x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot remove 3 tokens: this layer keeps only the sums of a linear layer"):
        cache.crop(-3)
    with pytest.raises(ValueError, match=r"must be a FarspanCache .* got DynamicCache; build FarspanCache\(config\)"):
        model(x, past_key_values=DynamicCache())


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
