"""Losses straight from hidden states: the logits of a batch never exist all at once.

torch 2.13's own `linear_cross_entropy` does not serve: it knows no divergence from a teacher, and under bfloat16
products it rounds loss and head gradient to bfloat16, where this module sums both in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 2**26
"""Elements of the logits held at a time (256 MiB in float32)."""
Judge = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""Logits (rows, vocabulary), free to be overwritten, and which tokens they are → summed loss, its gradient by them."""


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, judge: Judge) -> Tensor:
        rows, tokens = max(1, LOGITS_AT_ONCE // weight.shape[0]), hidden.shape[0]
        narrow = weight.to(hidden.dtype)
        wide = torch.promote_types(torch.float32, weight.dtype)
        grad_hidden, total = torch.empty_like(hidden), hidden.new_zeros((), dtype=wide)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None  # a head may be frozen
        for start in range(0, tokens, rows):
            piece = slice(start, start + rows)
            loss, error = judge(hidden[piece] @ narrow.T, piece)
            total += loss
            error = (error / tokens).to(hidden.dtype)
            grad_hidden[piece] = error @ narrow
            if grad_weight is not None:
                grad_weight += error.T @ hidden[piece]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total / tokens

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]  # wide, as the loss is: rounded to bf16 it would scale body and head differently
        head = None if grad_weight is None else (grad_weight * scale).to(grad_weight.dtype)
        return (grad_hidden * scale).to(grad_hidden.dtype), head, None


def linear_loss(hidden: Tensor, weight: Tensor, judge: Judge) -> Tensor:
    """Mean over tokens of what `judge` makes of hidden·weightᵀ: (tokens, width), (vocabulary, width) → scalar.

    Both gradients are computed in the forward pass, a piece of the tokens at a time: memory is one piece of the logits.
    Products run in hidden's dtype, sums in float32 or wider.
    """
    return _FromLogits.apply(hidden, weight, judge)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(hidden·weightᵀ)[target]: (tokens, width), (vocabulary, width), (tokens) → scalar.

    >>> loss = linear_cross_entropy(torch.zeros(3, 2), torch.ones(8, 2), torch.tensor([1, 2, 3]))
    >>> round(loss.item(), 4)  # ln 8: nothing known
    2.0794
    """
    wide = torch.promote_types(torch.float32, weight.dtype)

    def judge(logits: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        logits, right = logits.to(wide), targets[piece]
        loss = F.cross_entropy(logits, right, reduction="sum")
        error = torch.softmax(logits, dim=-1, out=logits)
        error[torch.arange(error.shape[0], device=error.device), right] -= 1
        return loss, error

    return linear_loss(hidden, weight, judge)
