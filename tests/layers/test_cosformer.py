"""The cosFormer layer: any chunking, constant memory, and refusals."""

import pytest
import torch

from farspan.layers import Attention, AttentionSpec, CosformerAttention, StateCache

OPTIONS = [
    {"max_length": 40},
    {"max_length": 5, "beyond": "decoupled"},
    {"max_length": 5, "beyond": "raised-cosine", "activation": "elu"},
    {"max_length": 5, "beyond": "decay", "qk_norm_eps": 1e-6, "qkv_bias": True},
    {"max_length": 5, "nope": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pieces", [[1] * 23, [7, 1, 15], [23]], ids=str)
@torch.no_grad()
def test_any_chunking_gives_the_same_output(options: dict, pieces: list[int]) -> None:
    layer = CosformerAttention(32, 4, num_key_heads=2, **options)
    x, cache, held = torch.randn(2, 23, 32), StateCache(), set()
    parts = []
    for piece in x.split(pieces, dim=1):
        parts.append(layer(piece, cache=cache))
        held.add(cache.nbytes)
    assert torch.allclose(torch.cat(parts, dim=1), layer(x), atol=1e-5)
    assert cache.get_seq_length() == 23
    assert len(held) == 1  # the first token costs what a million do


@torch.no_grad()
def test_rows_can_be_reordered() -> None:
    layer, x, cache = CosformerAttention(32, 4, max_length=40), torch.randn(2, 12, 32), StateCache()
    cache.reorder(torch.tensor([1, 0]))  # nothing to reorder yet
    layer(x[:, :8], cache=cache)
    cache.reorder(torch.tensor([1, 0]))
    assert torch.allclose(layer(x.flip(0)[:, 8:], cache=cache), layer(x).flip(0)[:, 8:], atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_every_weight_gets_a_gradient(options: dict, causal: bool) -> None:
    layer = CosformerAttention(32, 4, causal=causal, **options)
    layer(torch.randn(2, 9, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


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
    ],
)
def test_bad_layers_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_text_longer_than_m_is_refused_with_the_remedy() -> None:
    layer, cache = CosformerAttention(32, 4, max_length=10), StateCache()
    layer(torch.randn(1, 10, 32), cache=cache)
    with pytest.raises(ValueError, match=r"max_length is M = 10 and this text spans 11 positions.*choose beyond="):
        layer(torch.randn(1, 1, 32), cache=cache)
