"""Cross-entropy straight from hidden states: the logits of a whole batch never exist."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**26
"""Elements of the logits held at a time (256 MiB in float32)."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean loss of softmax(hidden·weightᵀ); both gradients are made on the way, a piece of the tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
        narrow = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        wide = torch.promote_types(torch.float32, weight.dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None  # a head may be frozen
        total = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], rows):
            piece = slice(start, start + rows)
            logits = (hidden[piece] @ narrow.T).to(wide)
            total += F.cross_entropy(logits, targets[piece], reduction="sum")
            error = torch.softmax(logits, dim=-1, out=logits)
            error[torch.arange(error.shape[0], device=error.device), targets[piece]] -= 1
            error = (error / targets.shape[0]).to(hidden.dtype)
            grad_hidden[piece] = error @ narrow
            if grad_weight is not None:
                grad_weight += error.T @ hidden[piece]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total / targets.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]  # wide, as the loss is: rounded to bf16 it would scale body and head differently
        head = None if grad_weight is None else (grad_weight * scale).to(grad_weight.dtype)
        return (grad_hidden * scale).to(grad_hidden.dtype), head, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(hidden·weightᵀ)[target]: (tokens, width), (vocabulary, width), (tokens) → scalar.

    Products run in hidden's dtype, sums in float32 or wider. Memory is one piece of the logits, not all of them.

    >>> loss = linear_cross_entropy(torch.zeros(3, 2), torch.ones(8, 2), torch.tensor([1, 2, 3]))
    >>> round(loss.item(), 4)  # ln 8: nothing known
    2.0794
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets)
