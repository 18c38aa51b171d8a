"""Minimal pairs: which of two sentences is the likelier."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from farspan.data.sources import json_lines
from farspan.errors import require
from farspan.evaluation.conditions import in_shares
from farspan.evaluation.losses import token_losses
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.utils import Progress, share, silent

AT_ONCE = 2**12
"""Tokens of sentences, padded, in one batch."""


@dataclass(frozen=True)
class Pair:
    """Two sentences that differ in one point of grammar, their set (phenomenon) and its field."""

    good: str
    bad: str
    set: str = ""
    field: str = ""


def read_pairs(path: str | Path) -> Iterator[Pair]:
    """Read JSON lines ``{"good", "bad"}`` with ``"set"`` and ``"field"`` if known; plain, .gz, .xz or .zst."""
    for where, record in json_lines(path, "--pairs"):
        for key in ("good", "bad"):
            value = record.get(key)
            need = f"{where} must have a sentence under {key!r}, got {value!r}; write {{'good': …, 'bad': …}}"
            require(isinstance(value, str) and bool(value.strip()), need)
        # BLiMP writes the field of one set (principle_A_case_2) with a slash.
        field = str(record.get("field", "")).replace("/", "_")
        yield Pair(record["good"], record["bad"], str(record.get("set", "")), field)


@torch.no_grad()
def log_probabilities(
    model: FarspanForCausalLM, sentences: list[list[int]], start: int, progress: Progress = silent
) -> list[float]:
    """Compute log p of each token sequence after the token `start`; sequences of similar lengths form a batch."""
    device = next(model.parameters()).device
    groups: list[list[int]] = []  # numbers of sequences
    for number in sorted(range(len(sentences)), key=lambda i: len(sentences[i])):
        if groups and (len(groups[-1]) + 1) * len(sentences[number]) <= AT_ONCE:
            groups[-1].append(number)
        else:
            groups.append([number])

    def scores(group: list[int]) -> list[float]:
        rows = [torch.tensor([start, *sentences[number]]) for number in group]
        ids = pad_sequence(rows, batch_first=True, padding_value=start).to(device)
        # Padding is behind the sentence, where no earlier token sees it.
        losses = token_losses(model, model.model(ids[:, :-1], use_cache=False).last_hidden_state, ids[:, 1:])
        lengths = torch.tensor([len(row) - 1 for row in rows], device=device)
        padding = torch.arange(losses.shape[1], device=device) >= lengths[:, None]
        return (-losses.double().masked_fill(padding, 0.0).sum(1)).tolist()

    found = [0.0] * len(sentences)
    for group, made in zip(groups, in_shares(scores, groups, progress, "sentences"), strict=True):
        for number, score in zip(group, made, strict=True):
            found[number] = score
    return found


def minimal_pairs(
    model: FarspanForCausalLM,
    pairs: Iterable[Pair],
    encode: Callable[[str], list[int]],
    *,
    start: int,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Return rows ``kind, set, field, cases, correct, accuracy, ci95``: all pairs first, then each field, each set.

    A pair is right when the good sentence has the strictly higher probability, summed over its tokens.

    Args:
        encode: sentence → token ids, without special tokens.
        start: the token before each sentence.
    """
    made = list(pairs)
    ids = [encode(text) for pair in made for text in (pair.good, pair.bad)]
    scores = log_probabilities(model, ids, start, progress)
    groups: dict[tuple[str, str, str], list[bool]] = {}
    for kind in ("all", "field", "set"):
        for number, pair in enumerate(made):
            if kind == "all" or getattr(pair, kind):
                key = (kind, pair.set if kind == "set" else "", "" if kind == "all" else pair.field)
                groups.setdefault(key, []).append(scores[2 * number] > scores[2 * number + 1])
    return [
        {"kind": kind, "set": name, "field": field, **share(sum(outcomes), len(outcomes))}
        for (kind, name, field), outcomes in groups.items()
    ]
