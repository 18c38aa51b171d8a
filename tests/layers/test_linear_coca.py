"""The linear CoCA layer: the op on exact CoCA's projections, any chunking, constant memory, and refusals."""

import pytest
import torch

from farspan.layers import Attention, AttentionSpec, CocaAttention, LinearCocaAttention, StateCache
from farspan.ops import NTK, DynamicNTK, Rotary, linear_coca_attention_reference

OPTIONS = [
    {},
    {"rotary": Rotary(8, scaling=NTK(4))},
    {"coca_activation": "softplus", "qk_norm_eps": 1e-6, "qkv_bias": True},
    {"nope": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pieces", [[1] * 23, [7, 1, 15], [23]], ids=str)
@torch.no_grad()
def test_any_chunking_gives_the_same_output(options: dict, pieces: list[int]) -> None:
    layer = LinearCocaAttention(32, 4, num_key_heads=2, **options).double()
    x, cache, held = torch.randn(2, 23, 32, dtype=torch.float64), StateCache(), set()
    parts = []
    for piece in x.split(pieces, dim=1):
        parts.append(layer(piece, cache=cache))
        held.add(cache.nbytes)
    assert (torch.cat(parts, dim=1) - layer(x)).abs().max() <= 1e-10
    assert cache.get_seq_length() == 23
    assert len(held) == 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_the_layer_is_the_definition_on_the_projections_of_exact_coca(options: dict, causal: bool) -> None:
    layer = LinearCocaAttention(32, 4, num_key_heads=2, causal=causal, **options).double()
    coca = CocaAttention(32, 4, num_key_heads=2, **options).double()
    coca.load_state_dict(layer.state_dict())
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    mask = torch.arange(23)[None] >= torch.tensor([[0], [6]])
    out = linear_coca_attention_reference(*coca.project(x), rotary=coca.rotary, causal=causal, padding_mask=mask)
    want = coca.o_proj(out.transpose(1, 2).flatten(2))
    assert (layer(x, padding_mask=mask) - want).abs().max() <= 1e-10


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_every_weight_gets_a_gradient(options: dict, causal: bool) -> None:
    layer = LinearCocaAttention(32, 4, causal=causal, **options)
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LinearCocaAttention(32, 4, rotary=Rotary(8, scaling=DynamicNTK(4, 8))),
            "rotary must have fixed frequencies in a linear layer, got dynamic NTK",
        ),
        (lambda: Attention(32, 4, "linear-coca"), "is a linear attention.* LinearCocaAttention"),
        (lambda: AttentionSpec("linear-coca", window=4), "window cannot be combined with kind 'linear-coca', got 4"),
        (lambda: AttentionSpec("linear-coca", form="exact"), "form belongs to kind 'coca'"),
        (lambda: AttentionSpec.parse("linear-coc"), "did you mean 'linear-coca'"),
    ],
)
def test_bad_layers_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_spec_keeps_its_name() -> None:
    spec = AttentionSpec.parse("linear-coca")
    assert (spec.kind, spec.form, spec.name, spec.linear, spec.collinear) == (
        "linear-coca",
        None,
        "linear-coca",
        True,
        True,
    )
    assert AttentionSpec.parse(spec.to_dict()) == spec
