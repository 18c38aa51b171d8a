"""Losses on long texts: perplexity by window length, loss by position, and bits per byte.

A sequence is cut into sliding windows (Press et al. 2022; the CoCA paper takes stride 512). Each token is scored once,
with the longest context that its window allows::

    window 4, stride 2        tokens  0 1 2 3 4 5 6 7      . = context only, ■ = scored (token 0 has none)
                                      . ■ ■ ■
                                          . . ■ ■
                                              . . ■ ■

With stride = window the first token of a window has no context and is left out. The truncation control scores the same
tokens with the context cut to the training length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.errors import require
from farspan.evaluation.conditions import in_shares
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM
from farspan.utils import Progress, silent

AT_ONCE = 2**16
"""Tokens of windows in one batch."""
LOGITS_AT_ONCE = 2**26
"""Elements of the logits held at a time (256 MiB in float32)."""
CHUNK = 8192
"""Longer windows are read in pieces of so many tokens through a cache, to bound memory."""
BLOCK = 512
"""Neighbouring tokens are not independent: bootstrap intervals draw blocks of so many."""
DRAWS = 1000


# Windows


class Window(NamedTuple):
    """Tokens begin … end-1 are read; those from `score_from` on are scored."""

    begin: int
    end: int
    score_from: int


def windows(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Cut a sequence of so many tokens into windows.

    >>> [tuple(w) for w in windows(8, 4, 2)]
    [(0, 4, 1), (2, 6, 4), (4, 8, 6)]
    """
    scored = 1
    for begin in range(0, tokens, stride):
        end = min(begin + length, tokens)
        first = max(scored, begin + 1)
        if first < end:
            yield Window(begin, end, first)
        scored = end
        if end == tokens:
            return


def truncation_control(trained: int) -> tuple[int, int]:
    """Return length and stride of the control: no context past the training length, and at least ¾ of it.

    >>> truncation_control(512)
    (512, 128)
    """
    return trained, max(1, trained // 4)


Batch = list[tuple[Tensor, Window]]


def window_batches(texts: Sequence[Tensor], length: int, stride: int, tokens_at_once: int = AT_ONCE) -> Iterator[Batch]:
    """Yield windows of equal shape together; the last, shorter ones of a sequence come by themselves."""
    size, pending = max(1, tokens_at_once // length), dict[tuple[int, int], Batch]()
    for text in texts:
        for window in windows(len(text), length, stride):
            shape = (window.end - window.begin, window.end - window.score_from)
            group = pending.setdefault(shape, [])
            group.append((text, window))
            if len(group) == size:
                yield pending.pop(shape)
    yield from pending.values()


def window_losses(model: FarspanForCausalLM, batch: Batch) -> Tensor:
    """Compute the losses (b, scored) of equally shaped windows."""
    device = next(model.parameters()).device
    ids = torch.stack([text[window.begin : window.end] for text, window in batch]).to(device)
    window = batch[0][1]
    total, scored = window.end - window.begin, window.end - window.score_from
    inputs, first = ids[:, :-1], total - scored - 1  # the token at first+1 is the first scored one
    if inputs.shape[1] <= CHUNK:
        hidden = model.model(inputs, use_cache=False, rotary_length=total).last_hidden_state
        return token_losses(model, hidden[:, first:], ids[:, first + 1 :])
    cache, losses = FarspanCache(model.config), []
    for begin in range(0, inputs.shape[1], CHUNK):
        piece = inputs[:, begin : begin + CHUNK]
        hidden = model.model(piece, past_key_values=cache, rotary_length=total).last_hidden_state
        skip = max(0, first - begin)
        if skip < piece.shape[1]:
            targets = ids[:, begin + skip + 1 : begin + piece.shape[1] + 1]
            losses.append(token_losses(model, hidden[:, skip:], targets))
    return torch.cat(losses, dim=1)


def token_losses(model: FarspanForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """Compute -log p of each target, (b, n) float32, without holding all logits at once."""
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    pieces = [
        F.cross_entropy(model.lm_head(h).float(), t, reduction="none")
        for h, t in zip(flat.split(rows), wanted.split(rows), strict=True)
    ]
    return torch.cat(pieces).view_as(targets)


# Measures


def _sums(model: FarspanForCausalLM, batch: Batch) -> list[tuple[float, int]]:
    """Sum the losses of each window, and count them."""
    return [(float(loss.double().sum()), loss.numel()) for loss in window_losses(model, batch)]


def _total(sums: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Add losses and counts in this order, so that the sum does not depend on the number of processes."""
    return sum((nll for nll, _ in sums), 0.0), sum(tokens for _, tokens in sums)


@torch.no_grad()
def perplexity(
    model: FarspanForCausalLM,
    texts: Sequence[Tensor],
    *,
    length: int,
    stride: int = 512,
    tokens_at_once: int = AT_ONCE,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return a row of a perplexity table: ``length, stride, mode, nll, tokens, texts, ppl``.

    Args:
        texts: one token sequence (n,) or more, each at least `length` long.
        length: window length, at least 2.
        tokens_at_once: windows are batched up to this many tokens.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1)).eval()
    >>> row = perplexity(model, [torch.arange(64)], length=32, stride=16)
    >>> row["tokens"], row["ppl"] > 1
    (63, True)
    """
    require(
        len(texts) > 0 and length >= 2,
        f"perplexity needs texts, and windows of at least 2 tokens, got {len(texts)} texts and length {length}",
    )
    require(stride >= 1, f"stride must be at least 1, got {stride}; the paper uses 512")
    shortest, stride = min(map(len, texts)), min(stride, length)
    require(
        shortest >= length,
        f"window length {length} is longer than a sequence of {shortest} tokens; choose a shorter window",
    )
    batches = list(window_batches(texts, length, stride, tokens_at_once))
    made = in_shares(lambda batch: _sums(model, batch), batches, progress, f"windows of {length:,} tokens")
    nll, tokens = _total([one for batch in made for one in batch])
    row = {"length": length, "stride": stride, "mode": "sliding", "nll": nll, "tokens": tokens, "texts": len(texts)}
    return {**row, "ppl": math.exp(min(nll / tokens, 700.0))}


@torch.no_grad()
def loss_by_position(
    model: FarspanForCausalLM, sequences: Sequence[Tensor], *, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Compute the loss in bins of positions that double from the training length, and the gain over a cut context.

    Return rows ``start, stop, nll, tokens, control_nll, gain, gain_ci95``.

    Each sequence (n,) is read once, from its first token. `nll` is the summed loss of tokens start … stop-1, all with
    their complete past. `control_nll` is that of the same tokens with the context cut to the training length (at least
    ¾ of it). `gain` is the mean difference per token, positive where the far context helps; its interval comes from a
    paired bootstrap over blocks of 512 tokens, and is None for a single block.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1)).eval()
    >>> [(row["start"], row["stop"]) for row in loss_by_position(model, [torch.arange(200)])]
    [(1, 64), (64, 128), (128, 200)]
    """
    require(len(sequences) > 0, "sequences must hold at least one, got none; name longer texts")
    longest, (length, stride) = max(map(len, sequences)), truncation_control(model.config.train_length)
    edges = [1, *takewhile(lambda edge: edge < longest, (length << i for i in count())), longest]

    def blocks(ids: Tensor) -> list[list[tuple[float, float, int]]]:
        """Sum the losses of a sequence, with all context and with a cut one, over blocks of each bin."""
        full = window_losses(model, [(ids, Window(0, len(ids), 1))])[0].double().cpu().numpy()
        cut = np.empty_like(full)
        for batch in window_batches([ids], length, stride):
            for (_, window), losses in zip(batch, window_losses(model, batch).cpu(), strict=True):
                cut[window.score_from - 1 : window.end - 1] = losses.numpy()
        parts = [
            [slice(low, min(low + BLOCK, stop - 1)) for low in range(start - 1, min(stop - 1, len(full)), BLOCK)]
            for start, stop in pairwise(edges)  # token i has the loss at i - 1
        ]
        return [[(float(full[p].sum()), float(cut[p].sum()), len(full[p])) for p in bin_] for bin_ in parts]

    made = in_shares(blocks, sequences, progress, "loss by position")
    rows = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        sums = np.array([block for sequence in made for block in sequence[number]])
        nll, control, tokens = (float(total) for total in sums.sum(0))
        row: dict[str, Any] = {"start": start, "stop": stop, "nll": nll, "tokens": int(tokens), "control_nll": control}
        rows.append(row | {"gain": (control - nll) / tokens, "gain_ci95": _gain_interval(sums)})
    return rows


def _gain_interval(sums: Any) -> list[float] | None:
    """Bootstrap the mean gain per token: blocks (n, 3) of loss, loss with a cut context, and tokens, drawn as one."""
    from scipy.stats import bootstrap  # type: ignore[import-untyped]

    if len(sums) < 2:
        return None

    def gain(nll: Any, control: Any, tokens: Any, axis: int) -> Any:
        return (control.sum(axis) - nll.sum(axis)) / tokens.sum(axis)

    how: dict[str, Any] = {"paired": True, "vectorized": True, "method": "percentile", "batch": 64}
    drawn = bootstrap(tuple(sums.T), gain, n_resamples=DRAWS, rng=np.random.default_rng(0), **how)
    return [float(end) for end in drawn.confidence_interval]


@torch.no_grad()
def bits_per_byte(
    model: FarspanForCausalLM,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    *,
    start: int,
    length: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return a row ``length, stride, nll, tokens, bytes, texts, bits_per_byte``.

    Every byte counts once: the token `start` comes before each text, so that its first token is scored too. Texts are
    read in windows of `length` tokens, each half over the one before.

    Args:
        encode: text → token ids, without special tokens.
    """
    stride, size = length // 2, sum(len(text.encode()) for text in texts)

    def losses(text: str) -> tuple[float, int]:
        ids = torch.tensor([start, *encode(text)])
        window = min(length, len(ids))
        batches = window_batches([ids], window, min(stride, len(ids) - 1, window))
        return _total([one for batch in batches for one in _sums(model, batch)])

    nll, tokens = _total(in_shares(losses, texts, progress, "bits per byte"))
    row = {"length": length, "stride": stride, "nll": nll, "tokens": tokens, "bytes": size, "texts": len(texts)}
    return {**row, "bits_per_byte": nll / math.log(2) / size}
