"""Fused losses are torch's, gradients included, and hold only a piece of the logits: cross-entropy and divergence."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.finetune import objectives
from farspan.finetune.objectives import linear_distillation
from farspan.training import loss as losses
from farspan.training.loss import linear_cross_entropy

Loss = Callable[..., Tensor]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Student of width 16 and teacher of width 12 over 31 tokens, for 50 positions."""
    hidden, weight = (torch.randn(n, 16, dtype=dtype, requires_grad=True) for n in (50, 31))
    return hidden, weight, torch.randn(50, 12, dtype=dtype), torch.randn(31, 12, dtype=dtype), torch.randint(31, (50,))


def fused(divergence: float, cross_entropy: float) -> Loss:
    if divergence == 0:
        return lambda hidden, weight, _, __, targets: cross_entropy * linear_cross_entropy(hidden, weight, targets)
    return lambda *tensors: linear_distillation(*tensors, divergence=divergence, cross_entropy=cross_entropy)


def plain(divergence: float, cross_entropy: float) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, theirs: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        ours, goal = F.log_softmax(hidden @ weight.T, -1), F.log_softmax(theirs @ head.T, -1)
        kl = F.kl_div(ours, goal, log_target=True, reduction="batchmean")
        return divergence * kl + cross_entropy * F.nll_loss(ours, targets)

    return loss


WEIGHTS = [(0.0, 1.0), (1.0, 0.0), (0.7, 0.4)]


@pytest.mark.parametrize("pieces", [1, 7, 1000])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_loss_and_gradients_equal_torchs(
    pieces: int, weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 31 * (50 // pieces + 1))
    tensors = inputs()
    ours, goal = fused(*weights)(*tensors), plain(*weights)(*tensors)
    torch.testing.assert_close(ours, goal, atol=1e-12, rtol=0)
    gradients = (torch.autograd.grad(3 * loss, tensors[:2]) for loss in (ours, goal))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_frozen_head_gets_no_gradient_and_changes_nothing_else(
    weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, *others = inputs()
    free = torch.autograd.grad(fused(*weights)(hidden, weight, *others), hidden)
    made, zeros = list[torch.Size](), torch.zeros_like
    monkeypatch.setattr(losses.torch, "zeros_like", lambda x, **k: (made.append(x.shape), zeros(x, **k))[1])
    held = torch.autograd.grad(fused(*weights)(hidden, weight.detach(), *others), hidden)
    assert weight.shape not in made
    assert torch.equal(*free, *held)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_bfloat16_is_close_to_float32_and_scales_body_and_head_alike(weights: tuple[float, float]) -> None:
    tensors = [x.detach() for x in inputs(torch.float32)]
    narrow = [x.bfloat16() if x.is_floating_point() else x for x in tensors]
    leaves = [x.requires_grad_() for x in narrow[:2]]
    loss = fused(*weights)(*leaves, *narrow[2:])
    assert float(loss.detach()) == pytest.approx(float(plain(*weights)(*tensors)), rel=2e-2)
    one = torch.autograd.grad(loss, leaves, retain_graph=True)
    for third, gradient in zip(torch.autograd.grad(loss / 3, leaves), one, strict=True):
        if weights[0]:
            assert torch.equal(third, (gradient.float() / 3).bfloat16())  # bfloat16's own 1/3 is 0.334


def test_all_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 31 * 20)
    sizes, entropy, error = list[int](), F.cross_entropy, objectives.soft_error
    monkeypatch.setattr(losses.F, "cross_entropy", lambda x, *a, **k: (sizes.append(len(x)), entropy(x, *a, **k))[1])
    fused(0.0, 1.0)(*inputs())
    linear_distillation(*inputs(), error_of=lambda x, *a: (sizes.append(len(x)), error(x, *a))[1])
    assert sizes == [20, 20, 10] * 2
