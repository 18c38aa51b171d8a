"""Passkey retrieval: (model, tokenizer) → how many of the hidden numbers come back (CoCA paper, App. B)."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from farspan.data.passkey import Tokenizer, make_cases
from farspan.intervals import share
from farspan.modeling_farspan import FarspanForCausalLM


@torch.no_grad()
def passkey(
    model: FarspanForCausalLM,
    tokenizer: Tokenizer,
    *,
    length: int,
    cases: int = 100,
    near: int | None = None,
    new_tokens: int = 64,
    tokens_at_once: int = 2**17,
    chunk: int = 8192,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """One row of a passkey table: ``length, cases, correct, accuracy, ci95``, the near/far split and each case.

    A case is right when the number stands in the decoded continuation. Near means within `near` tokens of the end (the
    paper's Fig. 4 takes the training length, the default). Prompts are batched up to `tokens_at_once` tokens, and read
    in pieces of `chunk` tokens, to bound memory.

    >>> from farspan import FarspanConfig
    >>> from farspan.data import load_tokenizer
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1, vocab_size=257)).eval()
    >>> row = passkey(model, load_tokenizer("bytes"), length=256, cases=2, new_tokens=5)
    >>> row["cases"], row["correct"]  # it has learned nothing yet
    (2, 0)
    """
    near = model.config.train_length if near is None else near
    made = make_cases(tokenizer, length, cases, seed)
    device = next(model.parameters()).device
    size = max(1, tokens_at_once // length)
    right: list[bool] = []
    for start in range(0, cases, size):
        group = made[start : start + size]
        prompts = torch.tensor([case.prompt for case in group], device=device)
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        settings["prefill_chunk_size"] = min(chunk, length)
        with _without_reminder():
            out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)  # type: ignore[misc]
        for case, row in zip(group, out[:, length:].tolist(), strict=True):
            right.append(str(case.key) in tokenizer.decode(row))
        if progress is not None:
            progress(len(group))
    outcomes = [(case.distance, ok) for case, ok in zip(made, right, strict=True)]
    close = [ok for distance, ok in outcomes if distance <= near]
    away = [ok for distance, ok in outcomes if distance > near]
    return {
        "length": length,
        **share(sum(right), len(right)),
        "near": share(sum(close), len(close)),
        "far": share(sum(away), len(away)),
        "outcomes": [{"distance": distance, "right": ok} for distance, ok in outcomes],
    }


@contextmanager
def _without_reminder() -> Iterator[None]:
    """transformers reminds whoever generates past the training length that he does: here that is the task."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")

    def is_other(record: logging.LogRecord) -> bool:
        return "exceeded the model's predefined maximum length" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
