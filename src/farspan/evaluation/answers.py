"""Questions with one right answer: (model, rows) → how many it gets right, with the interval of that share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farspan.intervals import share
from farspan.modeling_farspan import FarspanForCausalLM, FarspanForSequenceClassification

TOKENS_AT_ONCE = 2**16


def row_labels(
    model: FarspanForSequenceClassification, rows: Tensor, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """rows (cases, n+1), the label last → ``cases, correct, accuracy, ci95``."""
    return _count(rows, lambda part: model(part[:, :-1]).logits.argmax(-1) == part[:, -1], model.device, progress)


def asked_tokens(
    model: FarspanForCausalLM, rows: Tensor, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """rows (examples, 2n), tokens and then answers (0 = nothing asked) → the same; a case is one answer."""

    def right(part: Tensor) -> Tensor:
        tokens, answers = part.chunk(2, dim=1)
        asked = answers > 0
        hidden = model.model(tokens, use_cache=False).last_hidden_state[asked]
        return model.lm_head(hidden).argmax(-1) == answers[asked]

    return _count(rows, right, model.device, progress)


@torch.no_grad()
def _count(
    rows: Tensor,
    right: Callable[[Tensor], Tensor],
    device: torch.device,
    progress: Callable[[float], None] | None,
) -> dict[str, Any]:
    cases = correct = done = 0
    for part in rows.split(max(1, TOKENS_AT_ONCE // rows.shape[1])):
        found = right(part.to(device))
        cases, correct, done = cases + found.numel(), correct + int(found.sum()), done + len(part)
        if progress is not None:
            progress(done / len(rows))
    return share(correct, cases)
