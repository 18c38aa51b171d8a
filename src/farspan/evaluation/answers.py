"""Retrieval: (model, tokenizer) → how many hidden answers come back, by task, length and depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from farspan.checkpoints.sources import quiet
from farspan.data.passkey import Tokenizer, make_cases
from farspan.data.retrieval import COUNTS, TASKS, retrieval_case
from farspan.evaluation.conditions import in_shares
from farspan.evaluation.losses import CHUNK
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.utils import Progress, share, silent

DEPTHS = 5
"""Bins of a needle's depth."""


def retrieval(
    model: FarspanForCausalLM,
    tokenizer: Tokenizer,
    *,
    task: str,
    length: int,
    cases: int = 100,
    tokens_at_once: int = 2**17,
    seed: int = 0,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Return rows ``task, length, depth, cases, correct, accuracy, ci95, recall``: one for all depths, one per fifth.

    A case is correct if its greedy continuation holds all of its answers; `recall` is the mean share of them. The tasks
    are those of :mod:`farspan.data.retrieval`. Prompts are batched up to `tokens_at_once` tokens.

    >>> from farspan import FarspanConfig
    >>> from farspan.data import load_tokenizer
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1, vocab_size=257)).eval()
    >>> rows = retrieval(model, load_tokenizer("bytes"), task="abcdigits", length=128, cases=5)
    >>> [(row["depth"], row["cases"]) for row in rows][:2]
    [(None, 5), (0.1, 1)]
    """
    random = np.random.default_rng([seed, length, TASKS.index(task)])
    depths = (random.permutation(cases) + random.random(cases)) / cases
    made = [retrieval_case(tokenizer, task, length, random, float(depth)) for depth in depths]
    new = 8 + max(len(tokenizer.encode(" ".join(case.answers))) for case in made)
    name = f"{task} in {length:,} tokens"
    texts = continuations(model, tokenizer, [case.prompt for case in made], new, tokens_at_once, progress, name)
    groups: dict[float | None, list[float]] = {None: []}
    for case, text in zip(made, texts, strict=True):
        found = sum(answer in text for answer in case.answers) / len(case.answers)
        groups[None].append(found)
        if task not in COUNTS:
            groups.setdefault((min(DEPTHS - 1, int(case.depth * DEPTHS)) + 0.5) / DEPTHS, []).append(found)
    return [
        {"task": task, "length": length, "depth": depth, **share(sum(one == 1 for one in group), len(group))}
        | {"recall": sum(group) / len(group)}
        for depth, group in sorted(groups.items(), key=lambda item: item[0] or 0.0)
    ]


def passkey(
    model: FarspanForCausalLM,
    tokenizer: Tokenizer,
    *,
    length: int,
    cases: int = 100,
    new_tokens: int = 64,
    tokens_at_once: int = 2**17,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return a row of the CoCA paper's passkey table (App. B), as :func:`retrieval` does for all depths, and details.

    A case is correct if the number is in the decoded continuation. Near means within the training length of the end,
    as in the paper's Fig. 4.

    >>> from farspan import FarspanConfig
    >>> from farspan.data import load_tokenizer
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1, vocab_size=257)).eval()
    >>> row = passkey(model, load_tokenizer("bytes"), length=256, cases=2, new_tokens=5)
    >>> row["cases"], row["correct"]  # it has learned nothing yet
    (2, 0)
    """
    made, name = make_cases(tokenizer, length, cases, seed), f"passkey in {length:,} tokens"
    texts = continuations(model, tokenizer, [case.prompt for case in made], new_tokens, tokens_at_once, progress, name)
    outcomes = [(case.distance, str(case.key) in text) for case, text in zip(made, texts, strict=True)]
    near, far = (
        [right for distance, right in outcomes if (distance <= model.config.train_length) == close]
        for close in (True, False)
    )
    return {
        "task": "passkey",
        "length": length,
        "depth": None,
        **share(sum(near) + sum(far), len(outcomes)),
        "near": share(sum(near), len(near)),
        "far": share(sum(far), len(far)),
        "outcomes": [{"distance": distance, "right": right} for distance, right in outcomes],
    }


@torch.no_grad()
def continuations(
    model: FarspanForCausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    new_tokens: int,
    tokens_at_once: int,
    progress: Progress,
    name: str,
) -> list[str]:
    """Decode the greedy continuation of each prompt; all prompts have one length."""
    length, size = len(prompts[0]), max(1, tokens_at_once // len(prompts[0]))
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    options["prefill_chunk_size"] = min(CHUNK, length)

    def continued(part: Sequence[list[int]]) -> list[str]:
        ids = torch.tensor(part, device=next(model.parameters()).device)
        with quiet():  # transformers warns past the training length, which is the task here
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[misc]
        return [tokenizer.decode(row) for row in out[:, length:].tolist()]

    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [text for batch in in_shares(continued, batches, progress, name) for text in batch]
