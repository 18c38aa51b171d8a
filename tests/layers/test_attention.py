"""Layers: the same numbers in one piece, in chunks and token by token, with the cache each kind promises."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from farspan.cache import StaticWindowCache
from farspan.layers import (
    AlibiAttention,
    Attention,
    AttentionSpec,
    CocaAttention,
    CosformerAttention,
    LayerCache,
    LinearCocaAttention,
    RopeAttention,
    StateCache,
)
from farspan.ops import NTK, DynamicNTK, Rotary, linear_coca_attention_reference


def of_spec(hidden_size: int, num_heads: int, *, spec: str, window: int | None = None, **options: Any) -> Attention:
    return Attention(hidden_size, num_heads, replace(AttentionSpec.parse(spec), window=window), **options)


DYNAMIC = Rotary(8, scaling=DynamicNTK(4, 5))
NORMED: dict[str, Any] = {"qk_norm_eps": 1e-6, "qkv_bias": True}
SOFTMAX: dict[str, tuple[Callable[..., Attention], dict[str, Any]]] = {
    "rope": (RopeAttention, {}),
    "alibi": (AlibiAttention, {}),
    "coca-exact": (CocaAttention, {}),
    "coca-strict": (CocaAttention, {"form": "strict"}),
    "coca-slack": (CocaAttention, {"form": "slack"}),
    "coca nope": (CocaAttention, {"nope": True}),
    "coca softplus": (CocaAttention, {"coca_activation": "softplus"}),
    "coca normed": (CocaAttention, {**NORMED, "out_bias": True}),
    "coca dynamic": (CocaAttention, {"rotary": DYNAMIC}),
    "rope nope": (RopeAttention, {"nope": True}),
    "pope": (of_spec, {"spec": "pope"}),
    "coca polar": (of_spec, {"spec": "coca-polar"}),
    "rope dynamic": (RopeAttention, {"rotary": DYNAMIC}),
}
LINEAR: dict[str, tuple[Callable[..., Attention], dict[str, Any]]] = {
    "cosformer": (CosformerAttention, {"max_length": 40}),
    "decoupled": (CosformerAttention, {"max_length": 5, "beyond": "decoupled"}),
    "decoupled, elu": (CosformerAttention, {"max_length": 5, "beyond": "decoupled", "activation": "elu"}),
    "decay": (CosformerAttention, {"max_length": 5, "beyond": "decay", **NORMED}),
    "cosformer nope": (CosformerAttention, {"max_length": 5, "nope": True}),
    "linear-coca": (LinearCocaAttention, {}),
    "linear-coca ntk": (LinearCocaAttention, {"rotary": Rotary(8, scaling=NTK(4))}),
    "linear-coca softplus": (LinearCocaAttention, {"coca_activation": "softplus", **NORMED}),
    "linear-coca nope": (LinearCocaAttention, {"nope": True}),
}
LAYERS = {**SOFTMAX, **LINEAR}


def make(name: str, **options: Any) -> Attention:
    kind, own = LAYERS[name]
    return kind(32, 4, **own, **options)


@pytest.mark.parametrize(
    ("name", "window"), [*((n, w) for n in SOFTMAX for w in (None, 1, 6)), *((n, None) for n in LINEAR)]
)
@torch.no_grad()
def test_any_chunking_gives_the_same_output(name: str, window: int | None) -> None:
    """Also in a static window, whose newest token is always in the last slot, and again in the storage it leaves."""
    options = {} if name in LINEAR else {"window": window}
    layer, x = make(name, num_key_heads=2, **options).double(), torch.randn(2, 23, 32, dtype=torch.float64)
    static, held, storage = StaticWindowCache(window or 0), set(), set()
    left = torch.arange(23)[None] >= torch.tensor([[2], [0]])
    for mask in (None, left):
        whole, real = layer(x, attention_mask=mask), slice(None) if mask is None else mask
        for pieces in ([1] * 23, [7, 1, 15], [22, 1]) if mask is None else ([2, 1, 1, 3, 16], [15, 1, 7]):
            growing = StateCache() if name in LINEAR else LayerCache(window)
            for cache in (growing, static) if window else (growing,):
                parts, seen = [], 0
                for piece in x.split(pieces, dim=1):
                    seen += piece.shape[1]
                    parts.append(layer(piece, cache=cache, attention_mask=None if mask is None else mask[:, :seen]))
                    held.add(growing.nbytes)
                assert (torch.cat(parts, dim=1) - whole)[real].abs().max() <= 1e-10
                assert cache.get_seq_length() == 23
            storage.add(None if static.keys is None else static.keys.untyped_storage().data_ptr())
            static.reset()
    assert len(held) == 1 or name in SOFTMAX  # sums of one token take as many bytes as those of a million
    assert len(storage) == 1


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("window", [None, 9, 3])
@torch.no_grad()
def test_log_length_multiplies_the_scores_of_a_query_by_what_it_sees(name: str, window: int | None) -> None:
    layer = make(name, window=window, num_key_heads=2, log_length=5).double()
    plain = make(name, window=window, num_key_heads=2).double()
    plain.load_state_dict(layer.state_dict())
    x, cache = torch.randn(2, 23, 32, dtype=torch.float64), LayerCache(window)
    chunked = torch.cat([layer(piece, cache=cache) for piece in x.split([7, 1, 1, 14], dim=1)], dim=1)
    whole = layer(x)
    for i in range(23):
        seen = min(i + 1, window or 23)
        plain.scaling = 8**-0.5 * max(1.0, math.log(seen) / math.log(5))
        want = plain(x[:, : i + 1])[:, i]
        assert (whole[:, i] - want).abs().max() <= 1e-12
        assert (chunked[:, i] - want).abs().max() <= 1e-12


@pytest.mark.parametrize("name", [*SOFTMAX, "cosformer", "decay", "linear-coca"])
@torch.no_grad()
def test_padding_may_hold_nan(name: str) -> None:
    layer, x = make(name, num_key_heads=2), torch.randn(2, 12, 32)
    left, right = torch.arange(12)[None] >= torch.tensor([[0], [5]]), torch.arange(12)[None] < torch.tensor([[12], [5]])
    for keep in (left, right):
        want = layer(x, attention_mask=keep)
        got = layer(x.masked_fill(~keep[..., None], torch.nan), attention_mask=keep)
        assert torch.equal(got[keep], want[keep])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_weight_gets_a_gradient(name: str, causal: bool) -> None:
    layer = make(name, causal=causal)
    layer(torch.randn(2, 9, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_a_layer_takes_a_transformers_cache_layer() -> None:
    layer, x, cache = CocaAttention(32, 4), torch.randn(1, 12, 32), DynamicLayer()
    parts = [layer(piece, cache=cache) for piece in x.split(5, dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), layer(x), atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("coca-exact", LayerCache), ("cosformer", StateCache)])
@torch.no_grad()
def test_rows_of_a_cache_can_be_reordered_and_repeated(name: str, kind: type) -> None:
    layer, x, cache = make(name), torch.randn(2, 12, 32), kind()
    cache.reorder_cache(torch.tensor([1, 0]))  # nothing to reorder yet
    layer(x[:, :8], cache=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    x = x.flip(0)
    assert torch.allclose(layer(x[:, 8:10], cache=cache), layer(x)[:, 8:10], atol=1e-5)
    cache.batch_repeat_interleave(2)
    x = x.repeat_interleave(2, dim=0)
    assert torch.allclose(layer(x[:, 10:], cache=cache), layer(x)[:, 10:], atol=1e-5)


@torch.no_grad()
def test_a_window_is_cropped_before_it_is_full_or_while_the_past_is_recorded() -> None:
    layer, x, cache = CocaAttention(32, 4, window=4), torch.randn(2, 12, 32), LayerCache(window=4)
    whole = layer(x)
    layer(x[:, :3], cache=cache)
    cache.crop(-2)
    layer(x[:, 1:8], cache=cache)
    for full in (cache, StaticWindowCache(4)):
        full.crop(0)
        with pytest.raises(ValueError, match="cannot remove 2 tokens: this layer keeps only its window of 4"):
            full.crop(-2)
    cache.activate_past_recording()
    layer(x[:, 8:11], cache=cache)
    cache.crop(-2)  # tokens 9 and 10 were guesses
    assert cache.get_seq_length() == 9
    assert torch.allclose(layer(x[:, 9:], cache=cache), whole[:, 9:], atol=1e-5)
    with pytest.raises(ValueError, match="crop takes minus the number of tokens to remove, got 8"):
        cache.crop(8)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_mask_sizes_are_those_of_the_next_update(window: int | None) -> None:
    cache = LayerCache(window)
    for new in (3, 1, 1, 6, 2):
        length, offset = cache.get_mask_sizes(new)
        keys, _ = cache.update(torch.zeros(1, 1, new, 2), torch.zeros(1, 1, new, 2))
        assert (keys.shape[2], offset + length) == (length, cache.get_seq_length())


def test_strict_ties_the_pair_and_halves_the_projection() -> None:
    layer = CocaAttention(32, 4, form="strict")
    q, t, _ = layer.project(torch.randn(1, 3, 32))
    assert layer.q_proj.weight.shape == (16, 32)
    assert torch.equal(q[..., :4], q[..., 4:])
    assert t.shape == (1, 4, 3, 4)
    assert (t >= 0).all()


@pytest.mark.parametrize("name", [name for name in LINEAR if name.startswith("linear-coca")])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_linear_coca_is_the_definition_on_the_projections_of_exact_coca(name: str, causal: bool) -> None:
    layer = make(name, num_key_heads=2, causal=causal).double()
    coca = CocaAttention(32, 4, num_key_heads=2, **LINEAR[name][1]).double()
    coca.load_state_dict(layer.state_dict())
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    mask = torch.arange(23)[None] >= torch.tensor([[0], [6]])
    out = linear_coca_attention_reference(*coca.project(x), rotary=coca.rotary, causal=causal, padding_mask=mask)
    want = coca.o_proj(out.transpose(1, 2).flatten(2))
    assert (layer(x, attention_mask=mask) - want).abs().max() <= 1e-10


def test_re_weighting_prefers_what_is_near() -> None:
    """The same layer with and without: only the cosine tells a near key from a far one."""
    torch.manual_seed(1)
    layer, x = CosformerAttention(32, 4, max_length=30), torch.randn(1, 30, 32)
    x[:, 0], x[:, -1] = x[:, 0] + 5, x[:, 0]
    plain = CosformerAttention(32, 4, max_length=30, nope=True)
    plain.load_state_dict(layer.state_dict())
    assert (layer(x)[:, 0] - plain(x)[:, 0]).abs().max() <= 1e-6  # a first token sees only itself
    assert (layer(x)[:, -1] - plain(x)[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CocaAttention(30, 2), "head_dim must be even to form rotary pairs, got 15"),
        (lambda: CocaAttention(30, 4), "hidden_size must be a multiple of num_heads = 4, got 30"),
        (lambda: CocaAttention(32, 4, num_key_heads=3), "num_key_heads must divide num_heads = 4, got 3"),
        (lambda: CocaAttention(32, 4, window=0), "window must be a whole number of keys ≥ 1 or None, got 0"),
        (lambda: CocaAttention(32, 4, coca_activation="gelu"), "coca_activation must be one of"),
        (lambda: CocaAttention(32, 4, form="slak"), "did you mean 'slack'"),
        (lambda: CocaAttention(32, 4, log_length=1), "log_length must be None or a length ≥ 2, in a causal layer"),
        (lambda: RopeAttention(32, 4, log_length=5, causal=False), "got 5 for 'rope', causal=False; leave it out"),
        (lambda: CosformerAttention(32, 4, max_length=9, log_length=5), "got 5 for 'cosformer', causal=True"),
        (lambda: LinearCocaAttention(32, 4, rotary=DYNAMIC), "rotary must have fixed frequencies in a linear layer"),
        (lambda: Attention(32, 4, "ropee"), "attention must be one of .* did you mean 'rope'"),
        (lambda: Attention(32, 4, "cosformer"), "is a linear attention.* build CosformerAttention"),
        (lambda: Attention(32, 4, "linear-coca"), "is a linear attention.* LinearCocaAttention"),
        (lambda: AttentionSpec.parse({"kind": "coca", "frm": "exact"}), "did you mean 'form'"),
        (lambda: AttentionSpec.parse({"window": 4}), "attention needs a 'kind'"),
        (lambda: AttentionSpec.parse("linear-coc"), "did you mean 'linear-coca'"),
        (lambda: AttentionSpec("rope", "exact"), "form belongs to kind 'coca'"),
        (lambda: AttentionSpec("cosformer", window=4), "window cannot be combined with kind 'cosformer', got 4"),
        (lambda: AttentionSpec("linear-coca", window=4), "window cannot be combined with kind 'linear-coca', got 4"),
        (lambda: LayerCache(window=0), "window must be at least 1 or None, got 0"),
    ],
)
def test_bad_layers_raise(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_growing_cache_is_what_concatenation_gives_whatever_is_done_to_it() -> None:
    random, cache, kept = torch.Generator().manual_seed(0), LayerCache(), torch.empty(2, 2, 0, 3)
    for step in range(60):
        new = torch.randn(kept.shape[0], 2, int(torch.randint(1, 4, (), generator=random)), 3, generator=random)
        before = cache.keys
        held = before.clone() if before is not None else None
        keys, values = cache.update(new, 2 * new)
        kept = torch.cat((kept, new), dim=2)
        assert torch.equal(keys, kept)
        assert torch.equal(values, 2 * kept)
        if held is not None:
            assert torch.equal(before, held)  # what an earlier call returned stays what it was
        if step % 7 == 3:
            cache.crop(-2)
            kept = kept[:, :, :-2]
        if step % 11 == 5:
            rows = torch.tensor([1, 0, 1][: 2 + step % 2])
            cache.reorder_cache(rows)
            kept = kept[rows]


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4096])
def test_a_new_token_does_not_copy_a_large_cache(window: int | None) -> None:
    cache, addresses = LayerCache(window), set()
    cache.update(torch.randn(1, 2, 4100, 8), torch.randn(1, 2, 4100, 8))
    for _ in range(80):
        addresses.add(cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))[0].untyped_storage().data_ptr())
    assert len(addresses) <= 2


def test_a_cache_made_in_inference_mode_goes_on_outside_and_gradients_flow_through_one() -> None:
    cache = LayerCache()
    with torch.inference_mode():
        for _ in range(3):
            cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    new = torch.ones(1, 1, 1, 2)
    assert cache.update(new, new)[0].shape[2] == 7
    leaf = torch.ones(1, 1, 1, 2, requires_grad=True)
    keys, _ = cache.update(leaf, leaf)
    cache.update(2 * leaf, leaf)[0].sum().backward()
    assert keys.shape[2] == 8
    assert torch.equal(leaf.grad, torch.full_like(leaf, 3.0))


@pytest.mark.parametrize("tokens", [1, 2000])
def test_a_copied_or_changed_cache_keeps_its_own_tokens(tokens: int) -> None:
    """Buffers with spare capacity serve long caches; a copy must not write into those of the first."""
    with torch.no_grad():
        first, new = LayerCache(), torch.zeros(1, 1, 1, 4)
        for _ in range(2):
            first.update(torch.randn(1, 1, tokens, 4), torch.randn(1, 1, tokens, 4))
        second = copy.copy(first)
        ours, _ = first.update(new + 1, new)
        theirs, _ = second.update(new + 2, new)
        assert (ours[..., -1, :] == 1).all()
        assert (theirs[..., -1, :] == 2).all()
        assert first.keys is not None
        first.keys = first.keys * 0
        changed, _ = first.update(new + 3, new)
        assert (changed[..., :-1, :] == 0).all()
