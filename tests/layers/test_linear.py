"""Linear layers: any chunking, constant memory, the definition on exact CoCA's projections, and what raises."""

from collections.abc import Callable

import pytest
import torch

from farspan.layers import (
    Attention,
    AttentionSpec,
    CocaAttention,
    CosformerAttention,
    LinearCocaAttention,
    StateCache,
)
from farspan.ops import NTK, DynamicNTK, Rotary, linear_coca_attention_reference

COCA = [
    {},
    {"rotary": Rotary(8, scaling=NTK(4))},
    {"coca_activation": "softplus", "qk_norm_eps": 1e-6, "qkv_bias": True},
    {"nope": True},
]
LAYERS: dict[str, Callable[..., Attention]] = {
    "cosformer": lambda **o: CosformerAttention(32, 4, max_length=40, **o),
    "decoupled": lambda **o: CosformerAttention(32, 4, max_length=5, beyond="decoupled", **o),
    "decoupled, elu": lambda **o: CosformerAttention(32, 4, max_length=5, beyond="decoupled", activation="elu", **o),
    "decay": lambda **o: CosformerAttention(32, 4, max_length=5, beyond="decay", qk_norm_eps=1e-6, qkv_bias=True, **o),
    "cosformer nope": lambda **o: CosformerAttention(32, 4, max_length=5, nope=True, **o),
    "linear-coca": lambda **o: LinearCocaAttention(32, 4, **o),
    "linear-coca ntk": lambda **o: LinearCocaAttention(32, 4, **COCA[1], **o),
    "linear-coca softplus": lambda **o: LinearCocaAttention(32, 4, **COCA[2], **o),
    "linear-coca nope": lambda **o: LinearCocaAttention(32, 4, nope=True, **o),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_any_chunking_gives_the_same_output(name: str) -> None:
    layer, x = LAYERS[name](num_key_heads=2).double(), torch.randn(2, 23, 32, dtype=torch.float64)
    whole, held = layer(x), set()
    for pieces in ([1] * 23, [7, 1, 15]):
        cache, parts = StateCache(), []
        for piece in x.split(pieces, dim=1):
            parts.append(layer(piece, cache=cache))
            held.add(cache.nbytes)
        assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-10
        assert cache.get_seq_length() == 23
    assert len(held) == 1  # the first token takes as many bytes as a million


@pytest.mark.parametrize("name", ["cosformer", "decay", "linear-coca"])
@torch.no_grad()
def test_padding_may_hold_nan(name: str) -> None:
    layer, x = LAYERS[name](num_key_heads=2), torch.randn(2, 12, 32)
    for keep in (
        torch.arange(12)[None] >= torch.tensor([[0], [5]]),
        torch.arange(12)[None] < torch.tensor([[12], [5]]),
    ):
        want = layer(x, padding_mask=keep)
        got = layer(x.masked_fill(~keep[..., None], torch.nan), padding_mask=keep)
        assert torch.equal(got[keep], want[keep])


@torch.no_grad()
def test_rows_can_be_reordered_and_repeated() -> None:
    layer, x, cache = LAYERS["cosformer"](), torch.randn(2, 12, 32), StateCache()
    cache.reorder_cache(torch.tensor([1, 0]))  # nothing to reorder yet
    layer(x[:, :8], cache=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    x = x.flip(0)
    assert torch.allclose(layer(x[:, 8:10], cache=cache), layer(x)[:, 8:10], atol=1e-5)
    cache.batch_repeat_interleave(2)
    x = x.repeat_interleave(2, dim=0)
    assert torch.allclose(layer(x[:, 10:], cache=cache), layer(x)[:, 10:], atol=1e-5)


@pytest.mark.parametrize("options", COCA, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_linear_coca_is_the_definition_on_the_projections_of_exact_coca(options: dict, causal: bool) -> None:
    layer = LinearCocaAttention(32, 4, num_key_heads=2, causal=causal, **options).double()
    coca = CocaAttention(32, 4, num_key_heads=2, **options).double()
    coca.load_state_dict(layer.state_dict())
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    mask = torch.arange(23)[None] >= torch.tensor([[0], [6]])
    out = linear_coca_attention_reference(*coca.project(x), rotary=coca.rotary, causal=causal, padding_mask=mask)
    want = coca.o_proj(out.transpose(1, 2).flatten(2))
    assert (layer(x, padding_mask=mask) - want).abs().max() <= 1e-10


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_weight_gets_a_gradient(name: str, causal: bool) -> None:
    layer = LAYERS[name](causal=causal)
    layer(torch.randn(2, 9, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_gradients_stay_finite_at_large_activations(dtype: torch.dtype, activation: str) -> None:
    layer = LinearCocaAttention(64, 4, coca_activation=activation).to(dtype)
    for weight in (layer.q_proj.weight, layer.t_proj.weight):
        torch.nn.init.normal_(weight, std=2.0)  # q and t of size 16
    out = layer(torch.randn(2, 40, 64).to(dtype))
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


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
        (lambda: CosformerAttention(32, 4, max_length=0), "max_length must be at least 1, got 0"),
        (lambda: CosformerAttention(32, 4, max_length=8, beyond="clamp"), "beyond must be one of 'raise'"),
        (lambda: CosformerAttention(32, 4, max_length=8, activation="exp"), "activation must be one of"),
        (lambda: Attention(32, 4, "cosformer"), "is a linear attention.* build CosformerAttention"),
        (lambda: AttentionSpec("cosformer", window=4), "window cannot be combined with kind 'cosformer', got 4"),
        (lambda: AttentionSpec("cosformer", form="exact"), "form belongs to kind 'coca'"),
        (
            lambda: LinearCocaAttention(32, 4, rotary=Rotary(8, scaling=DynamicNTK(4, 8))),
            "rotary must have fixed frequencies in a linear layer, got dynamic NTK",
        ),
        (lambda: Attention(32, 4, "linear-coca"), "is a linear attention.* LinearCocaAttention"),
        (lambda: AttentionSpec("linear-coca", window=4), "window cannot be combined with kind 'linear-coca', got 4"),
        (lambda: AttentionSpec.parse("linear-coc"), "did you mean 'linear-coca'"),
    ],
)
def test_bad_layers_raise(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sequence_longer_than_m_raises_with_the_remedy() -> None:
    layer, cache = CosformerAttention(32, 4, max_length=10), StateCache()
    layer(torch.randn(1, 10, 32), cache=cache)
    with pytest.raises(ValueError, match=r"max_length is M = 10 and the sequence spans 11 positions.*beyond="):
        layer(torch.randn(1, 1, 32), cache=cache)


def test_a_spec_keeps_its_name() -> None:
    spec = AttentionSpec.parse("linear-coca")
    assert (spec.kind, spec.form, spec.name) == ("linear-coca", None, "linear-coca")
    assert AttentionSpec.parse(spec.to_dict()) == spec
