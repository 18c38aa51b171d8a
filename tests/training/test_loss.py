"""The fused loss is cross-entropy, gradients included, and holds only a piece of the logits."""

import pytest
import torch
import torch.nn.functional as F

from farspan.training import loss as room
from farspan.training.loss import linear_cross_entropy


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_loss_and_gradients_equal_plain_cross_entropy(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOGITS_AT_ONCE", 31 * (50 // pieces + 1))
    hidden = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 31, (50,))
    ours, plain = linear_cross_entropy(hidden, weight, targets), F.cross_entropy(hidden @ weight.T, targets)
    assert (ours - plain).abs() <= 1e-12
    for a, b in zip(
        torch.autograd.grad(3 * ours, (hidden, weight)), torch.autograd.grad(3 * plain, (hidden, weight)), strict=True
    ):
        assert (a - b).abs().max() <= 1e-12


def test_a_frozen_head_gets_no_gradient_and_none_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(31, 16)
    targets = torch.randint(0, 31, (50,))
    made, original = [], torch.zeros_like
    monkeypatch.setattr(room.torch, "zeros_like", lambda x, **k: (made.append(x.shape), original(x, **k))[1])
    loss = linear_cross_entropy(hidden, weight, targets)
    assert weight.shape not in made
    (ours,) = torch.autograd.grad(loss, hidden)
    (plain,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), hidden)
    assert (ours - plain).abs().max() <= 1e-6
    linear_cross_entropy(hidden, weight.requires_grad_(), targets)
    assert weight.shape in made


def test_bfloat16_loss_is_close_to_float32() -> None:
    hidden, weight, targets = torch.randn(200, 32), torch.randn(97, 32) * 0.1, torch.randint(0, 97, (200,))
    exact = F.cross_entropy(hidden @ weight.T, targets)
    assert linear_cross_entropy(hidden.bfloat16(), weight, targets) == pytest.approx(float(exact), rel=5e-3)


def test_all_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOGITS_AT_ONCE", 31 * 10)
    sizes = []
    original = F.cross_entropy
    monkeypatch.setattr(room.F, "cross_entropy", lambda x, *a, **k: (sizes.append(x.shape[0]), original(x, *a, **k))[1])
    linear_cross_entropy(torch.randn(45, 8), torch.randn(31, 8), torch.randint(0, 31, (45,)))
    assert sizes == [10, 10, 10, 10, 5]
