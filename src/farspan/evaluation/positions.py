"""Loss by position: (model, sequences) → what context far behind is worth, on the same tokens."""

from collections.abc import Callable, Sequence
from itertools import count, pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan.errors import require
from farspan.evaluation.perplexity import window_batches, window_losses
from farspan.evaluation.windows import Window, truncation_control
from farspan.modeling_farspan import FarspanForCausalLM

BLOCK = 512
"""Neighbouring tokens are not independent: intervals draw blocks of so many."""


@torch.no_grad()
def loss_by_position(
    model: FarspanForCausalLM,
    sequences: Sequence[Tensor],
    *,
    tokens_at_once: int = 2**16,
    chunk: int = 8192,
    draws: int = 1000,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Compute the loss in bins of positions that double from the training length, and the gain over a cut context.

    Return rows ``start, stop, nll, tokens, control_nll, gain, gain_ci95``.

    Each sequence (n,) is read once, from its first token. `nll` is the summed loss of tokens start … stop-1, all with
    their whole past. `control_nll` is that of the same tokens with the context cut to the training length (at least ¾
    of it). `gain` is the mean difference per token, positive where the far context helps; its interval comes from a
    paired bootstrap over blocks of 512 tokens.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1)).eval()
    >>> [(row["start"], row["stop"]) for row in loss_by_position(model, [torch.arange(200)])]
    [(1, 64), (64, 128), (128, 200)]
    """
    require(len(sequences) > 0, "sequences must hold at least one sequence, got none")
    longest, (length, stride, mode) = max(map(len, sequences)), truncation_control(model.config.train_length)
    edges = [1, *takewhile(lambda edge: edge < longest, (length << i for i in count())), longest]
    blocks: list[list[tuple[float, float, int]]] = [[] for _ in edges[1:]]
    for ids in sequences:
        require(len(ids) >= 2, f"a sequence must have at least 2 tokens, got {len(ids)}")
        whole = window_losses(model, [(ids, Window(0, len(ids), 1))], chunk)[0].double().cpu().numpy()
        cut = np.empty_like(whole)
        for batch in window_batches([ids], length, stride, mode, max(1, tokens_at_once // length)):
            for (_, window), losses in zip(batch, window_losses(model, batch, chunk).cpu(), strict=True):
                cut[window.score_from - 1 : window.end - 1] = losses.numpy()
        for found, (start, stop) in zip(blocks, pairwise(edges), strict=True):
            for low in range(start - 1, min(stop - 1, len(whole)), BLOCK):  # token i has the loss at i - 1
                part = slice(low, min(low + BLOCK, stop - 1))
                found.append((float(whole[part].sum()), float(cut[part].sum()), len(whole[part])))
        if progress is not None:
            progress(len(ids))
    random, rows = np.random.default_rng(seed), []
    for found, (start, stop) in zip(blocks, pairwise(edges), strict=True):
        sums = np.array(found)
        nll, control, tokens = sums.sum(0)
        drawn = sums[random.integers(len(sums), size=(draws, len(sums)))].sum(1)
        low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / drawn[:, 2], (0.025, 0.975))
        row = {"start": start, "stop": stop, "nll": nll, "tokens": int(tokens), "control_nll": control}
        rows.append(row | {"gain": (control - nll) / tokens, "gain_ci95": [low, high]})
    return rows
