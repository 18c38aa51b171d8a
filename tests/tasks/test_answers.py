"""Answers are counted one by one, whatever the batches."""

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM, FarspanForSequenceClassification
from farspan.tasks import task
from farspan.tasks.task import AskedTokens, RowLabel, count_right

CONFIG = FarspanConfig.preset("tiny", attention="cosformer", num_hidden_layers=1, vocab_size=20, num_labels=4)


def test_labels_are_counted_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = FarspanForSequenceClassification(CONFIG).eval(), torch.randint(1, 20, (13, 9))
    said = model(tokens).logits.argmax(-1)
    labels = torch.where(torch.arange(13) < 5, said, (said + 1) % 4)
    rows = torch.cat([tokens, labels[:, None]], dim=1)
    told: list[float] = []
    for at_once in (1, 40, 10_000):
        monkeypatch.setattr(task, "TOKENS_AT_ONCE", at_once)
        found = count_right(RowLabel(model), rows, lambda done, total, *_, **__: told.append(done / total))
        assert (found["cases"], found["correct"], found["accuracy"]) == (13, 5, 5 / 13)
        assert told[-1] == 1.0
    assert found["ci95"][0] < 5 / 13 < found["ci95"][1]


def test_only_what_is_asked_is_counted() -> None:
    model, tokens = FarspanForCausalLM(CONFIG).eval(), torch.randint(1, 20, (6, 8))
    model.lm_head.weight.data[0] = 0  # 0 is no answer
    said = model(tokens).logits[..., 1:].argmax(-1) + 1
    said = torch.where(model(tokens).logits.argmax(-1) == 0, 0, said)
    wrong = 1 + said % 19
    asked = torch.zeros_like(tokens)
    asked[:, 3], asked[:, 5] = said[:, 3], wrong[:, 5]
    right = int((said[:, 3] > 0).sum())
    found = count_right(AskedTokens(model), torch.cat([tokens, asked], dim=1))
    assert (found["correct"], found["cases"]) == (right, right + 6)


def test_where_nothing_is_asked_no_share_is_right_or_wrong() -> None:
    rows = torch.cat([torch.randint(1, 20, (2, 8)), torch.zeros(2, 8, dtype=torch.long)], dim=1)
    found = count_right(AskedTokens(FarspanForCausalLM(CONFIG).eval()), rows)
    assert found == {"cases": 0, "correct": 0, "accuracy": None, "ci95": None}
