"""Questions with one right answer: labels, asked tokens, and the likelier sentence of a minimal pair."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from farspan.data.sources import opened
from farspan.errors import require
from farspan.evaluation.conditions import in_shares
from farspan.evaluation.perplexity import token_losses
from farspan.modeling_farspan import FarspanForCausalLM, FarspanForSequenceClassification
from farspan.utils import Progress, share, silent

TOKENS_AT_ONCE = 2**16
Tell = Callable[[float], object]
"""Receive the share of the work that is done."""


def row_labels(model: FarspanForSequenceClassification, rows: Tensor, tell: Tell | None = None) -> dict[str, Any]:
    """Count right labels: rows (cases, n+1), the label last → ``cases, correct, accuracy, ci95``."""
    return _count(rows, lambda part: model(part[:, :-1]).logits.argmax(-1) == part[:, -1], model.device, tell)


def asked_tokens(model: FarspanForCausalLM, rows: Tensor, tell: Tell | None = None) -> dict[str, Any]:
    """Count right answers: rows (examples, 2n), tokens and then answers (0 = nothing asked) → the same fields."""

    def right(part: Tensor) -> Tensor:
        tokens, answers = part.chunk(2, dim=1)
        asked = answers > 0
        hidden = model.model(tokens, use_cache=False).last_hidden_state[asked]
        return model.lm_head(hidden).argmax(-1) == answers[asked]

    return _count(rows, right, model.device, tell)


@torch.no_grad()
def _count(rows: Tensor, right: Callable[[Tensor], Tensor], device: torch.device, tell: Tell | None) -> dict[str, Any]:
    cases = correct = done = 0
    for part in rows.split(max(1, TOKENS_AT_ONCE // rows.shape[1])):
        found = right(part.to(device))
        cases, correct, done = cases + found.numel(), correct + int(found.sum()), done + len(part)
        if tell is not None:
            tell(done / len(rows))
    return share(correct, cases)


# Minimal pairs


@dataclass(frozen=True)
class Pair:
    """Two sentences that differ in one point of grammar, their set (phenomenon) and its field."""

    good: str
    bad: str
    set: str = ""
    field: str = ""


def field_name(text: str) -> str:
    """Return a field in one spelling: BLiMP writes that of one set (principle_A_case_2) with a slash.

    >>> field_name("syntax/semantics")
    'syntax_semantics'
    """
    return text.replace("/", "_")


def read_pairs(path: str | Path) -> Iterator[Pair]:
    """Read JSON lines ``{"good", "bad"}`` with ``"set"`` and ``"field"`` if known; plain, .gz, .xz or .zst."""
    file, count = Path(path), 0
    require(file.is_file(), f"--pairs must be a JSONL file, got {str(path)!r}, which does not exist; check the path")
    with opened(file) as (stream, _):
        for number, line in enumerate(stream, 1):
            if line.strip():
                count += 1
                yield _pair(line, f"{file.name}:{number}")
    require(count > 0, f"--pairs must hold at least one pair, got none in {str(path)!r}; name another file")


def _pair(line: bytes, where: str) -> Pair:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    require(isinstance(record, dict), f"{where} must be one JSON object per line, got {line[:40]!r}; repair it")
    for key in ("good", "bad"):
        value = record.get(key)
        need = f"{where} must have a sentence under {key!r}, got {value!r}; write {{'good': …, 'bad': …}}"
        require(isinstance(value, str) and bool(value.strip()), need)
    return Pair(record["good"], record["bad"], str(record.get("set", "")), field_name(str(record.get("field", ""))))


@torch.no_grad()
def log_probabilities(
    model: FarspanForCausalLM,
    sentences: list[list[int]],
    start: int,
    *,
    tokens_at_once: int = 2**12,
    progress: Progress = silent,
) -> list[float]:
    """Compute log p of each token sequence after the token `start`; sequences of similar lengths form a batch."""
    device = next(model.parameters()).device

    def scores(group: list[int]) -> list[float]:
        rows = [torch.tensor([start, *sentences[number]]) for number in group]
        ids = pad_sequence(rows, batch_first=True, padding_value=start).to(device)
        # Padding is behind the sentence, where no earlier token sees it.
        losses = token_losses(model, model.model(ids[:, :-1], use_cache=False).last_hidden_state, ids[:, 1:])
        lengths = torch.tensor([len(row) - 1 for row in rows], device=device)
        padding = torch.arange(losses.shape[1], device=device) >= lengths[:, None]
        return (-losses.double().masked_fill(padding, 0.0).sum(1)).tolist()

    groups, found = _groups(sentences, tokens_at_once), [0.0] * len(sentences)
    for group, made in zip(groups, in_shares(scores, groups, progress, "sentences"), strict=True):
        for number, score in zip(group, made, strict=True):
            found[number] = score
    return found


def _groups(sentences: list[list[int]], tokens_at_once: int) -> list[list[int]]:
    """Batch the numbers of sequences by length: each batch, padded, has at most so many tokens, or one sequence."""
    groups: list[list[int]] = []
    for number in sorted(range(len(sentences)), key=lambda i: len(sentences[i])):
        if groups and (len(groups[-1]) + 1) * len(sentences[number]) <= tokens_at_once:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


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
    scores = log_probabilities(model, ids, start, progress=progress)
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
