"""Caches: one set of numbers however a text comes, and no more bytes than promised."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from farspan import FarspanCache
from tests.models.small import CONFIGURATIONS, MIXED, PER_REQUEST, TIGHT, make, name_of, tokens


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, TIGHT)], ids=["fp32", "fp64"])
@torch.no_grad()
def test_prefill_equals_decode_equals_any_chunking(options: dict, dtype: torch.dtype, bound: float) -> None:
    """130 tokens at training length 8: dynamic NTK grows through four doublings on the way."""
    model, x = make(**options, dtype=dtype), tokens(2, 130)
    whole = model(x).logits
    for pieces in ([1] * 130, [7, 1, 9, 47, 66], [64, 66]):
        cache = FarspanCache(model.config)
        parts = [model(piece, past_key_values=cache).logits for piece in x.split(pieces, dim=1)]
        assert (torch.cat(parts, dim=1) - whole).abs().max() <= bound
    assert whole.std() > 0.05


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_right_padding_and_a_static_cache_give_the_same_logits(options: dict) -> None:
    model, x = make(**options), tokens(2, 30)
    mask = torch.ones_like(x)
    mask[1, 20:] = 0
    padded, alone = model(x, attention_mask=mask).logits, model(x[1:, :20]).logits
    assert (padded[1, :20] - alone[0]).abs().max() <= TIGHT
    cache = FarspanCache(model.config, max_length=40)
    parts = [model(piece, past_key_values=cache).logits for piece in x.split([18, 1, 1, 10], dim=1)]
    assert (torch.cat(parts, dim=1) - model(x).logits).abs().max() <= TIGHT


@pytest.mark.parametrize(
    "make_cache", [DynamicCache, lambda config: DynamicCache(config=config)], ids=["bare", "config"]
)
@torch.no_grad()
def test_plain_transformers_caches_work(make_cache) -> None:
    model, x = make(MIXED), tokens(1, 40)
    cache = make_cache(model.config) if make_cache is not DynamicCache else DynamicCache()
    parts = [model(piece, past_key_values=cache).logits for piece in x.split([25, 1, 14], dim=1)]
    assert (torch.cat(parts, dim=1) - model(x).logits).abs().max() <= TIGHT


@torch.no_grad()
def test_positions_given_with_a_cache_shift_the_whole_text() -> None:
    model, x = make("coca-slack"), tokens(1, 30)  # slack sees absolute positions
    want = model(x, position_ids=torch.arange(100, 130)[None]).logits
    cache, parts = FarspanCache(model.config), []
    for begin, end in ((0, 11), (11, 12), (12, 30)):
        positions = torch.arange(100 + begin, 100 + end)[None]
        parts.append(model(x[:, begin:end], position_ids=positions, past_key_values=cache).logits)
    assert (torch.cat(parts, dim=1) - want).abs().max() <= TIGHT


@torch.no_grad()
def test_right_padding_can_be_continued_without_windows_and_is_refused_with_them() -> None:
    mask = torch.ones(1, 23, dtype=torch.long)
    mask[0, 14:20] = 0
    x = tokens(1, 23)
    real = x[:, mask[0].bool()]
    for attention in ("coca-exact", "coca-slack", "rope", "alibi"):
        model = make(attention)
        cache = FarspanCache(model.config)
        model(x[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        continued = model(x[:, 20:], attention_mask=mask, past_key_values=cache).logits
        assert (continued - model(real).logits[:, -3:]).abs().max() <= TIGHT
    model = make(MIXED)
    cache = FarspanCache(model.config)
    model(x[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    with pytest.raises(ValueError, match="window layers cannot continue; pad on the left"):
        model(x[:, 20:], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_cache_bytes_are_three_quarters() -> None:
    held = {}
    for attention in ("rope", "coca-exact", "coca-slack", "coca-strict"):
        model = make(attention)
        held[attention] = model(tokens(1, 64), use_cache=True).past_key_values.nbytes
    assert {held[name] / held["rope"] for name in held if name != "rope"} == {0.75}
    rotated = make("coca-exact", cache_layout="rotated")
    assert rotated(tokens(1, 64), use_cache=True).past_key_values.nbytes == held["rope"]


@torch.no_grad()
def test_window_layers_keep_only_their_window() -> None:
    model = make(MIXED)
    cache = model(tokens(1, 64), use_cache=True).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [7, 64, 64]
    assert cache.layers[0].keys.untyped_storage().nbytes() == cache.layers[0].keys.nbytes  # not a view of the prompt


def test_a_rotated_cache_refuses_float16() -> None:
    model = make(cache_layout="rotated", dtype=torch.float16)
    with pytest.raises(ValueError, match="cache_layout 'rotated' cannot hold CoCA keys in float16"):
        model(tokens(1, 5), use_cache=True)
    half = make(dtype=torch.float16)
    x, cache = tokens(1, 30), FarspanCache(half.config)
    with torch.no_grad():
        parts = [half(piece, past_key_values=cache).logits for piece in x.split([20, 1, 9], dim=1)]
        assert (torch.cat(parts, dim=1) - half(x).logits).abs().max() <= 0.01


@torch.no_grad()
def test_per_request_holds_one_base_for_the_request() -> None:
    model, x = make("coca-exact", rope_parameters=PER_REQUEST), tokens(1, 40)
    fixed = model(x, rotary_length=64).logits
    cache = FarspanCache(model.config)
    parts = [model(p, past_key_values=cache, rotary_length=64).logits for p in x.split([20, 1, 19], dim=1)]
    assert (torch.cat(parts, dim=1) - fixed).abs().max() <= TIGHT
    assert (model(x).logits - fixed).abs().max() > 1e-3  # its own length gives another base
    assert (model(x, rotary_length=40).logits - model(x).logits).abs().max() <= TIGHT


def test_a_static_transformers_cache_works_too() -> None:
    model, x = make(MIXED), tokens(1, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        parts = [model(piece, past_key_values=cache).logits for piece in x.split([12, 1, 7], dim=1)]
    assert (torch.cat(parts, dim=1) - model(x).logits).abs().max() <= TIGHT
