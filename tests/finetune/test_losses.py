"""The fused divergence is torch's, gradients included, and holds only a piece of the logits."""

import pytest
import torch
import torch.nn.functional as F

from farspan.finetune import losses as room
from farspan.finetune.losses import linear_distillation
from farspan.training import loss as shared


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Student of width 16 and teacher of width 12 over 31 tokens, at 50 places."""
    hidden, weight = (torch.randn(n, 16, dtype=dtype, requires_grad=True) for n in (50, 31))
    return hidden, weight, torch.randn(50, 12, dtype=dtype), torch.randn(31, 12, dtype=dtype), torch.randint(31, (50,))


def plain(hidden, weight, teacher_hidden, teacher_weight, targets, divergence, cross_entropy):
    ours, theirs = F.log_softmax(hidden @ weight.T, -1), F.log_softmax(teacher_hidden @ teacher_weight.T, -1)
    kl = F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    return divergence * kl + cross_entropy * F.nll_loss(ours, targets)


@pytest.mark.parametrize("pieces", [1, 7, 1000])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, 0.4)])
def test_loss_and_gradients_equal_torch_s_kl_div(
    pieces: int, weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOGITS_AT_ONCE", 31 * (50 // pieces + 1))
    tensors = inputs()
    ours = linear_distillation(*tensors, divergence=weights[0], cross_entropy=weights[1])
    goal = plain(*tensors, *weights)
    assert (ours - goal).abs() <= 1e-12
    leaves = tensors[:2]
    for a, b in zip(torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * goal, leaves), strict=True):
        assert (a - b).abs().max() <= 1e-12


def test_a_frozen_head_gets_no_gradient_and_changes_nothing_else() -> None:
    hidden, weight, *others = inputs()
    free = torch.autograd.grad(linear_distillation(hidden, weight, *others), hidden)[0]
    held = torch.autograd.grad(linear_distillation(hidden, weight.detach(), *others), hidden)[0]
    assert torch.equal(free, held)


def test_bfloat16_is_close_to_float32() -> None:
    hidden, weight, theirs, head, targets = (x.detach() for x in inputs(torch.float32))
    exact = plain(hidden, weight, theirs, head, targets, 1.0, 0.0)
    assert linear_distillation(hidden.bfloat16(), weight, theirs.bfloat16(), head, targets) == pytest.approx(
        float(exact), rel=2e-2
    )


def test_a_scaled_bfloat16_loss_scales_body_and_head_alike() -> None:
    hidden, weight, *others = (x.detach() for x in inputs(torch.bfloat16))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_distillation(*leaves, *others)
    whole = torch.autograd.grad(loss, leaves, retain_graph=True)
    for third, one in zip(torch.autograd.grad(loss / 3, leaves), whole, strict=True):
        assert torch.equal(third, (one.float() / 3).bfloat16())  # bfloat16's own 1/3 is 0.334


def test_all_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LOGITS_AT_ONCE", 31 * 20)
    sizes, original = [], room.soft_error
    monkeypatch.setattr(room, "soft_error", lambda x, *a: (sizes.append(x.shape[0]), original(x, *a))[1])
    linear_distillation(*inputs())
    assert sizes == [20, 20, 10]


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    hidden, weight, theirs, head, targets = inputs()
    with pytest.raises(ValueError, match=r"student's vocabulary of 31 tokens, got 30; distil from"):
        linear_distillation(hidden, weight, theirs, head[:30], targets)
