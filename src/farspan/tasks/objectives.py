"""Rows of a table → the loss: a label for the whole row, or answers at some of its tokens."""

import torch.nn.functional as F
from torch import Tensor, nn

from farspan.modeling_farspan import FarspanForCausalLM, FarspanForMaskedLM, FarspanForSequenceClassification
from farspan.ops.device import product_dtype
from farspan.training.loss import linear_cross_entropy


class RowLabel(nn.Module):
    """rows (b, n+1), the label last → mean cross-entropy."""

    def __init__(self, model: FarspanForSequenceClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self.model(rows[:, :-1]).logits.float(), rows[:, -1])


class AskedTokens(nn.Module):
    """rows (b, 2n), tokens and then answers (0 = nothing asked) → mean cross-entropy over all that is asked."""

    def __init__(self, model: FarspanForMaskedLM | FarspanForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        tokens, answers = rows.chunk(2, dim=1)
        asked = answers > 0
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state[asked]
        return linear_cross_entropy(hidden.to(product_dtype(hidden)), self.model.lm_head.weight, answers[asked])
