"""Minimal pairs: of two sentences that differ in one point of grammar, the right one should be the likelier."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farspan.data.streams import opened
from farspan.errors import require
from farspan.evaluation.perplexity import token_losses
from farspan.intervals import share
from farspan.modeling_farspan import FarspanForCausalLM


@dataclass(frozen=True)
class Pair:
    """Two sentences, the set (phenomenon) they belong to and its field."""

    good: str
    bad: str
    set: str = ""
    field: str = ""


def field_name(text: str) -> str:
    """A field in one spelling: BLiMP writes that of one set (principle_A_case_2) with a slash, of 13 others without.

    >>> field_name("syntax/semantics")
    'syntax_semantics'
    """
    return text.replace("/", "_")


def read_pairs(path: str | Path) -> Iterator[Pair]:
    """Pairs from JSON lines ``{"good", "bad"}`` with ``"set"`` and ``"field"`` if known; plain, .gz, .xz or .zst.

    A field that is spelt in two ways is one field: see :func:`field_name`.
    """
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
    except ValueError as error:
        raise ValueError(f"{where} must be one JSON object a line, got {line[:40]!r} ({error}); repair it") from error
    require(isinstance(record, dict), f"{where} must be one JSON object a line, got {line[:40]!r}; repair it")
    for key in ("good", "bad"):
        value = record.get(key)
        require(
            isinstance(value, str) and bool(value.strip()),
            f"{where} must have a sentence under {key!r}, got {value!r}; write {{'good': …, 'bad': …}}",
        )
    return Pair(record["good"], record["bad"], str(record.get("set", "")), field_name(str(record.get("field", ""))))


@torch.no_grad()
def log_probabilities(
    model: FarspanForCausalLM, sentences: list[list[int]], start: int, *, tokens_at_once: int = 2**12
) -> Iterator[dict[int, float]]:
    """Number → log p of each token sequence after the token `start`, a batch of similar lengths at a time."""
    device = next(model.parameters()).device
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    while order:
        size = next(
            (k for k in range(1, len(order)) if (k + 1) * len(sentences[order[k]]) > tokens_at_once), len(order)
        )
        group, order = order[:size], order[size:]
        longest = len(sentences[group[-1]])
        ids = torch.full((size, longest + 1), start)
        for row, number in enumerate(group):
            ids[row, 1 : len(sentences[number]) + 1] = torch.tensor(sentences[number])
        ids = ids.to(device)
        # Padding stands behind the sentence, where no earlier token sees it.
        losses = token_losses(model, model.model(ids[:, :-1], use_cache=False).last_hidden_state, ids[:, 1:])
        lengths = torch.tensor([len(sentences[number]) for number in group], device=device)
        real = torch.arange(longest, device=device)[None] < lengths[:, None]
        yield dict(zip(group, _sums(losses, real), strict=True))


def _sums(losses: Tensor, real: Tensor) -> list[float]:
    return (-losses.double().masked_fill(~real, 0.0).sum(1)).tolist()


def minimal_pairs(
    model: FarspanForCausalLM,
    pairs: Iterable[Pair],
    encode: Callable[[str], list[int]],
    *,
    start: int,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows ``kind, set, field, cases, correct, accuracy, ci95``: all pairs first, then each field, then each set.

    A pair is right when the good sentence has the strictly higher probability, summed over its tokens.

    Args:
        encode: sentence → token ids, without special tokens.
        start: the token before each sentence.
        progress: called with the number of sentences done after each batch.
    """
    made = list(pairs)
    ids = [encode(text) for pair in made for text in (pair.good, pair.bad)]
    scores: dict[int, float] = {}
    for batch in log_probabilities(model, ids, start):
        scores |= batch
        if progress is not None:
            progress(len(batch))
    right = [scores[2 * i] > scores[2 * i + 1] for i in range(len(made))]
    groups: dict[tuple[str, str, str], list[bool]] = {("all", "", ""): right}
    for kind in ("field", "set"):
        for pair, ok in zip(made, right, strict=True):
            if getattr(pair, kind):
                groups.setdefault((kind, pair.set if kind == "set" else "", pair.field), []).append(ok)
    return [
        {"kind": kind, "set": name, "field": field, **share(sum(outcomes), len(outcomes))}
        for (kind, name, field), outcomes in groups.items()
    ]
