"""Perplexity: the conventions mean what they say, and batching, chunking and sums change nothing."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farspan.evaluation.losses import loss_by_position, perplexity, truncation_control, windows
from tests.models.small import PER_QUERY, PER_REQUEST, make, tokens


def texts(*lengths: int) -> list[torch.Tensor]:
    return [tokens(n) for n in lengths]


def by_hand(model, text: torch.Tensor, target: int, context: int) -> float:
    """-log p of one token given the `context` tokens before it, alone."""
    logits = model(text[None, target - context : target], use_cache=False).logits[0, -1]
    return float(F.cross_entropy(logits, text[target]))


def test_sliding_scores_every_token_once_with_the_longest_context() -> None:
    for tokens_in_text in (8, 9, 17, 40):
        for length, stride in ((4, 2), (8, 3), (8, 8), (5, 1)):
            if tokens_in_text < length:
                continue
            cut = list(windows(tokens_in_text, length, stride))
            scored = [t for w in cut for t in range(w.score_from, w.end)]
            without_context = set(range(0, tokens_in_text, stride)) if stride == length else {0}
            assert scored == [t for t in range(tokens_in_text) if t not in without_context]
            assert all(w.end - w.begin <= length for w in cut)
            assert all(w.score_from - w.begin >= length - stride for w in cut[1:-1])


@torch.no_grad()
def test_sliding_perplexity_is_the_sum_of_conditional_losses() -> None:
    model, (text,) = make(), texts(20)
    row = perplexity(model, [text], length=8, stride=3)
    total = 0.0
    for window in windows(20, 8, 3):
        for target in range(window.score_from, window.end):
            total += by_hand(model, text, target, target - window.begin)
    assert row["nll"] == pytest.approx(total, rel=1e-6)
    assert row["tokens"] == 19
    assert row["ppl"] == pytest.approx(math.exp(total / 19), rel=1e-6)


def test_the_control_scores_the_same_tokens_with_at_most_the_training_length() -> None:
    scored = [t for w in windows(100, *truncation_control(16)) for t in range(w.score_from, w.end)]
    assert scored == list(range(1, 100))
    assert all(w.end - w.begin <= 16 for w in windows(100, *truncation_control(16)))
    assert all(w.score_from - w.begin >= 12 for w in list(windows(100, *truncation_control(16)))[1:])
    assert list(windows(4, *truncation_control(2)))  # a quarter of it is no whole token


@pytest.mark.parametrize("rope", [None, PER_QUERY, PER_REQUEST], ids=["plain", "per_query", "per_request"])
@torch.no_grad()
def test_batching_and_chunking_change_nothing(rope: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, books = make(rope_parameters=rope), texts(64, 75, 64)
    want = perplexity(model, books, length=32, stride=8, tokens_at_once=1)
    for tokens_at_once, chunk in ((10_000, 10_000), (96, 7), (1, 16)):
        monkeypatch.setattr("farspan.evaluation.losses.CHUNK", chunk)
        row = perplexity(model, books, length=32, stride=8, tokens_at_once=tokens_at_once)
        assert row["nll"] == pytest.approx(want["nll"], rel=1e-7)
        assert row["tokens"] == want["tokens"] == 63 + 74 + 63


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 32}, "window length 32 is longer than a sequence of 20 tokens"),
        ({"length": 8, "stride": 0}, "stride must be at least 1, got 0"),
        ({"length": 1}, "windows of at least 2 tokens, got 1 texts and length 1"),
        ({"length": 8, "texts": []}, "perplexity needs texts, .* got 0 texts"),
    ],
)
def test_bad_windows_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        perplexity(make(), **{"texts": texts(20), **options})
    with pytest.raises(ValueError, match="sequences must hold at least one, got none"):
        loss_by_position(make(), [])
