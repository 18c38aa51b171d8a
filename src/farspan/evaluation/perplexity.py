"""Perplexity of a causal model on long texts: (model, tokens) → sums, divided only at the end."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.errors import require
from farspan.evaluation.windows import Window, windows
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM

LOGITS_AT_ONCE = 2**26
"""Elements of the logits held at a time (256 MiB in float32)."""


@dataclass
class Tally:
    """Losses summed over tokens, and over windows for the convention that averages windows."""

    nll: float = 0.0
    tokens: int = 0
    window_means: float = 0.0
    windows: int = 0

    def add(self, nll: float, tokens: int) -> None:
        self.nll += nll
        self.tokens += tokens
        self.window_means += nll / tokens
        self.windows += 1

    def perplexity(self, mode: str) -> float:
        """exp of the mean loss, in the mode's sense of mean."""
        mean = self.window_means / self.windows if mode == "yarn" else self.nll / self.tokens
        return math.exp(min(mean, 700.0))


@torch.no_grad()
def perplexity(
    model: FarspanForCausalLM,
    texts: Sequence[Tensor],
    *,
    length: int,
    stride: int = 512,
    mode: str = "sliding",
    tokens_at_once: int = 2**16,
    chunk: int = 8192,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float | int | str]:
    """One row of a perplexity table: ``length, stride, mode, nll, tokens, texts, ppl``.

    Args:
        texts: token sequences (n,), each at least `length` long.
        length: window length; for mode "truncated" the training length.
        tokens_at_once: windows are batched up to this many tokens.
        chunk: longer windows are read in pieces of this many tokens through a cache, to bound memory.
        progress: called with the number of tokens read after each batch.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1)).eval()
    >>> row = perplexity(model, [torch.arange(64)], length=32, stride=16)
    >>> row["tokens"], row["ppl"] > 1
    (63, True)
    """
    require(len(texts) > 0, "texts must hold at least one token sequence, got none")
    for text in texts:
        require(
            text.shape[0] >= length,
            f"window length {length} is longer than a text of {text.shape[0]} tokens; choose a shorter window",
        )
    stride = min(stride, length)
    tally = Tally()
    for batch in window_batches(texts, length, stride, mode, max(1, tokens_at_once // length)):
        losses = window_losses(model, batch, chunk)
        for loss in losses:
            tally.add(float(loss.double().sum()), loss.numel())
        if progress is not None:
            progress(sum(window.end - window.begin for _, window in batch))
    return {
        "length": length,
        "stride": length if mode == "disjoint" else stride,
        "mode": mode,
        "nll": tally.nll,
        "tokens": tally.tokens,
        "texts": len(texts),
        "ppl": tally.perplexity(mode),
    }


def tokens_read(texts: Sequence[Tensor], length: int, stride: int, mode: str) -> int:
    """How many tokens :func:`perplexity` will tell its `progress`, all in all."""
    stride = min(stride, length)
    return sum(w.end - w.begin for text in texts for w in windows(text.shape[0], length, stride, mode))


def window_batches(
    texts: Sequence[Tensor], length: int, stride: int, mode: str, size: int
) -> Iterator[list[tuple[Tensor, Window]]]:
    """Yield windows of equal shape together; the last, shorter ones of a sequence come by themselves."""
    pending: dict[tuple[int, int], list[tuple[Tensor, Window]]] = {}
    for text in texts:
        for window in windows(text.shape[0], length, stride, mode):
            shape = (window.end - window.begin, window.end - window.score_from)
            group = pending.setdefault(shape, [])
            group.append((text, window))
            if len(group) == size:
                yield pending.pop(shape)
    yield from pending.values()


def window_losses(model: FarspanForCausalLM, batch: list[tuple[Tensor, Window]], chunk: int) -> Tensor:
    """Compute the losses (b, scored) of equally shaped windows."""
    device = next(model.parameters()).device
    ids = torch.stack([text[window.begin : window.end] for text, window in batch]).to(device)
    window = batch[0][1]
    total, scored = window.end - window.begin, window.end - window.score_from
    inputs, first = ids[:, :-1], total - scored - 1  # the token at first+1 is the first scored one
    if inputs.shape[1] <= chunk:
        hidden = model.model(inputs, use_cache=False, rotary_length=total).last_hidden_state
        return token_losses(model, hidden[:, first:], ids[:, first + 1 :])
    cache, losses = FarspanCache(model.config), []
    for begin in range(0, inputs.shape[1], chunk):
        piece = inputs[:, begin : begin + chunk]
        hidden = model.model(piece, past_key_values=cache, rotary_length=total).last_hidden_state
        skip = max(0, first - begin)
        if skip < piece.shape[1]:
            targets = ids[:, begin + skip + 1 : begin + piece.shape[1] + 1]
            losses.append(token_losses(model, hidden[:, skip:], targets))
    return torch.cat(losses, dim=1)


def token_losses(model: FarspanForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target, (b, n) float32, without holding all logits at once."""
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    pieces = [
        F.cross_entropy(model.lm_head(h).float(), t, reduction="none")
        for h, t in zip(flat.split(rows), wanted.split(rows), strict=True)
    ]
    return torch.cat(pieces).view_as(targets)
