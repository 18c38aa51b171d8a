"""Divergence from a teacher straight from hidden states: neither model's logits of a whole batch ever exist."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from farspan.errors import require
from farspan.training.loss import LOGITS_AT_ONCE


def soft_error(
    ours: Tensor, theirs: Tensor, targets: Tensor, divergence: float, cross_entropy: float
) -> tuple[Tensor, Tensor]:
    """Summed loss of a piece of logits (rows, vocabulary), and its gradient by `ours`, both in float32 or wider.

    With p the teacher's probabilities, q the student's and y the true token, the gradient of
    divergence·KL(p ‖ q) - cross_entropy·log q_y by the logits of q is divergence·(q - p) + cross_entropy·(q - y).
    """
    wide = torch.promote_types(torch.float32, ours.dtype)
    log_q, log_p = ours.to(wide).log_softmax(-1), theirs.to(wide).log_softmax(-1)
    p = log_p.exp()
    loss = divergence * (p * (log_p - log_q)).sum()
    error = (divergence + cross_entropy) * log_q.exp() - divergence * p
    if cross_entropy:
        index = targets[:, None]
        loss = loss - cross_entropy * log_q.gather(1, index).sum()
        true = index == torch.arange(error.shape[1], device=error.device)  # fuses, which a scatter does not
        error = torch.where(true, error - cross_entropy, error)
    return loss, error


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """One pass over the logits instead of a dozen."""
    return torch.compile(soft_error, dynamic=False)


class _LinearDistillation(torch.autograd.Function):
    """The mean over tokens of :func:`soft_error`; gradients are made on the way, a piece of the tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        weights: tuple[float, float],
        compile: bool,
    ) -> Tensor:
        rows, tokens = max(1, LOGITS_AT_ONCE // weight.shape[0]), hidden.shape[0]
        ours, theirs = weight.to(hidden.dtype), teacher_weight.to(teacher_hidden.dtype)
        wide = torch.promote_types(torch.float32, weight.dtype)
        grad_hidden, total = torch.empty_like(hidden), hidden.new_zeros((), dtype=wide)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None  # a head may be frozen
        error_of = _compiled() if compile else soft_error
        for start in range(0, tokens, rows):
            piece = slice(start, start + rows)
            loss, error = error_of(hidden[piece] @ ours.T, teacher_hidden[piece] @ theirs.T, targets[piece], *weights)
            total += loss
            error = (error / tokens).to(hidden.dtype)
            grad_hidden[piece] = error @ ours
            if grad_weight is not None:
                grad_weight += error.T @ hidden[piece]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total / tokens

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        head = None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype)
        return (grad_hidden * scale).to(grad_hidden.dtype), head, None, None, None, None, None


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    *,
    divergence: float = 1.0,
    cross_entropy: float = 0.0,
    compile: bool = False,
) -> Tensor:
    """Mean over tokens of divergence · KL(teacher ‖ student) + cross_entropy · -log student[target].

    Args:
        hidden, teacher_hidden: last hidden states (tokens, width) of each; products run in their dtypes.
        weight, teacher_weight: heads (vocabulary, width); widths may differ, the vocabulary may not.
        targets: (tokens).
        compile: fuse what is done to the logits; worth it on a GPU.

    No gradient goes to the teacher. Memory is one piece of each model's logits, not all of them.

    >>> h, w, y = torch.randn(3, 2), torch.randn(8, 2), torch.tensor([1, 2, 3])
    >>> round(linear_distillation(h, w, h, w, y).item(), 6)  # nothing to learn from oneself
    0.0
    """
    require(
        weight.shape[0] == teacher_weight.shape[0],
        f"teacher must have the student's vocabulary of {weight.shape[0]} tokens, got {teacher_weight.shape[0]}; "
        "distil from the model it was converted from",
    )
    return _LinearDistillation.apply(
        hidden, weight, teacher_hidden.detach(), teacher_weight.detach(), targets, (divergence, cross_entropy), compile
    )
