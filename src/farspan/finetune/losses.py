"""Divergence from a teacher straight from hidden states: neither model's logits of a whole batch ever exist."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from farspan.errors import require
from farspan.training.loss import linear_loss


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
    theirs, head = teacher_hidden.detach(), teacher_weight.detach().to(teacher_hidden.dtype)
    error_of = _compiled() if compile else soft_error

    def judge(logits: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        return error_of(logits, theirs[piece] @ head.T, targets[piece], divergence, cross_entropy)

    return linear_loss(hidden, weight, judge)
