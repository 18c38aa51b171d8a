"""A CoCA layer that decodes on the half-width kernel gives what it gives without, from t as it is cached."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.layers import CocaAttention, LayerCache, RopeAttention
from farspan.ops import DynamicNTK, Rotary, coca, device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PER_QUERY, PER_REQUEST = (Rotary(8, scaling=DynamicNTK(4, 6, mode)) for mode in ("per_query", "per_request"))


def pair(**options: Any) -> tuple[CocaAttention, CocaAttention]:
    """Make a layer without the kernel, and one with it."""
    layers = [CocaAttention(32, 4, decode_backend=backend, **options).to(DEVICE) for backend in ("sdpa", "triton")]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers[0], layers[1]


def read(layer: CocaAttention, x: Tensor, pieces: list[int], window: int | None = None) -> Tensor:
    cache = LayerCache(window)
    return torch.cat([layer(piece, cache=cache) for piece in x.split(pieces, dim=1)], dim=1)[:, pieces[0] :]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"form": "slack", "num_key_heads": 2, "rotary": PER_QUERY},
        {"form": "strict", "rotary": PER_REQUEST, "coca_activation": "softplus"},
        {"nope": True, "window": 5},
        {"window": 12, "qk_norm_eps": 1e-6},
    ],
    ids=str,
)
@torch.no_grad()
def test_steps_on_the_kernel_equal_steps_without(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num_key_heads": 1, **options}
    without, kernel = pair(**options)
    x = torch.randn(2, 14, 32, device=DEVICE)
    want = read(without, x, [10, 1, 3], options.get("window"))
    rotated, features = [], coca.coca_features
    monkeypatch.setattr(
        coca, "coca_features", lambda q, t, *a, **o: rotated.append(t.shape[2]) or features(q, t, *a, **o)
    )
    got = read(kernel, x, [10, 1, 3], options.get("window"))
    assert 0 < (got - want).abs().max() <= 1e-5
    assert max(rotated, default=0) <= 10  # the prompt's keys may be rotated, but no cached ones again


@torch.no_grad()
def test_padding_and_positions_are_kept() -> None:
    without, kernel = pair(form="slack", num_key_heads=1)
    x = torch.randn(2, 7, 32, device=DEVICE)
    keep = torch.arange(7, device=DEVICE)[None] >= torch.tensor([[0], [3]], device=DEVICE)
    positions = torch.arange(7, device=DEVICE) * 2 + torch.tensor([[0], [500]], device=DEVICE)
    for options in ({"padding_mask": keep}, {"positions": positions}, {"positions": 30}):
        want, got = without(x, **options), kernel(x, **options)
        assert 0 < (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("form", ["exact", "slack"])
@torch.no_grad()
def test_bfloat16_error_is_at_most_twice_that_without_the_kernel(form: str) -> None:
    without, kernel = (layer.bfloat16() for layer in pair(form=form, num_key_heads=1))
    x = torch.randn(2, 40, 32, device=DEVICE, dtype=torch.bfloat16)
    truth = CocaAttention(32, 4, form=form, num_key_heads=1).double().to(DEVICE)
    truth.load_state_dict(without.state_dict())
    theirs, ours = ((read(layer, x, [38, 1, 1]) - truth(x.double())[:, 38:]).abs() for layer in (without, kernel))
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()


def test_gradients_and_other_kinds_go_on_as_before() -> None:
    without, kernel = pair(num_key_heads=1)
    x = torch.randn(1, 3, 32, device=DEVICE)
    assert torch.equal(without(x), kernel(x))
    kernel(x).sum().backward()
    with torch.no_grad():
        assert not torch.equal(without(x), kernel(x))
        documents = torch.tensor([[0, 0, 1]], device=DEVICE)
        assert torch.equal(*(layer(x, documents=documents) for layer in (without, kernel)))
        rope = RopeAttention(32, 4, decode_backend="triton").to(DEVICE)
        assert rope(x).shape == (1, 3, 32)


def test_frozen_weights_decode_on_the_kernel_in_grad_mode_too() -> None:
    """Grad mode alone asks for no gradient; an input or a weight that requires one does."""
    without, kernel = (layer.requires_grad_(False) for layer in pair(num_key_heads=1))
    x = torch.randn(1, 3, 32, device=DEVICE)
    assert not torch.equal(without(x), kernel(x))
    assert torch.equal(without(x), kernel(x.clone().requires_grad_()))
    kernel.t_proj.requires_grad_()
    assert torch.equal(without(x), kernel(x))


@torch.no_grad()
def test_a_cpu_without_the_interpreter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"backend='triton' needs CUDA tensors, got cpu"):
        CocaAttention(32, 4, decode_backend="triton")(torch.randn(1, 3, 32))
