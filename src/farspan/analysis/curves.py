"""Score against distance, and attention against length, for one layer each."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan.analysis.factors import Factors, frequencies

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
QUERIES = 2048
"""Queries per distance and sequence."""
PRODUCTS_AT_ONCE = 2**21
LOGITS_AT_ONCE = 2**21
"""Scores held at a time, in float64 and in several copies."""
FIRST = 4
"""Tokens at the start whose attention is counted: attention sinks are there."""
PER_HEAD = ("entropy", "even", "first", "far", "logit_top")
"""Entropy in nats · entropy over that of even attention · mass on the first tokens · mass past the training length ·
the largest score of a query."""
LARGEST = 32
"""Lengths go up to so many training lengths."""


def distances(length: int) -> list[int]:
    """Return 0, 1, 2, 3 and then steps of about √2 up to the last distance in a sequence.

    >>> distances(40)
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 39]
    """
    steps = {round(2 ** (k / 2)) for k in range(2, 64)}
    return sorted(s for s in {0, 1, 2, 3, length - 1} | steps if s < length)


class Decay:
    """Scores a(s) at chosen distances s.

    One distance is one diagonal of the score matrix: the queries along it (all of them, or evenly spaced ones) give
    means and quantiles in O(N) memory.
    """

    def __init__(self, at: list[int]) -> None:
        self.at = at
        self.values: list[list[Tensor]] = [[torch.empty(0)] for _ in at]  # logits a(s)·scale

    def add(self, made: Factors, count: int = QUERIES) -> None:
        """Add at most so many queries of one sequence, evenly spaced, at every distance that it has."""
        heads, _, pairs = made.query.shape
        for i, s in enumerate(self.at):
            if s < (made.length if made.window is None else min(made.length, made.window)):
                queries = torch.arange(s, made.length, -(-(made.length - s) // count), device=made.query.device)
                for block in queries.split(max(1, PRODUCTS_AT_ONCE // (heads * pairs))):
                    self._diagonal(made, i, s, block)

    def _diagonal(self, made: Factors, i: int, s: int, queries: Tensor) -> None:
        theta = frequencies(made.rotary, made.length, queries)
        key = made.key[:, queries - s].repeat_interleave(made.groups, dim=0).to(torch.complex128)
        h = made.query[:, queries].to(torch.complex128) * key.conj()  # h n j
        wave = torch.polar(torch.ones_like(theta), s * theta)
        score = (h * wave).real.sum(-1)
        if made.echo is not None:
            sigma = (2 * queries - s)[:, None] * theta
            echo = made.echo[:, queries].to(torch.complex128) * key
            score = score + (echo * torch.polar(torch.ones_like(sigma), sigma)).real.sum(-1)
        self.values[i].append((score * made.scale).flatten().to(made.query.real.dtype).cpu())

    def row(self) -> dict[str, Any]:
        """Return by distance: samples, mean and quantiles (interpolated linearly); NaN for none."""
        values = [torch.cat(parts).double() for parts in self.values]
        samples, nothing = [x.numel() for x in values], np.full(len(QUANTILES), np.nan)
        # numpy's quantile, as torch's stops at 16 million values
        quantiles = np.stack([np.quantile(x, QUANTILES) if len(x) else nothing for x in values], axis=-1)
        return {
            "distance": self.at,
            "samples": samples,
            "mean": torch.stack([x.mean() for x in values]),
            "quantiles": {f"{q:g}": torch.from_numpy(row) for q, row in zip(QUANTILES, quantiles, strict=True)},
        }


def lengths(train_length: int, longest: int) -> list[int]:
    """Return the training length and its doublings that the sequence reaches, up to 32 times.

    >>> lengths(64, 300)
    [64, 128, 256]
    """
    return [n for n in (train_length << k for k in range(LARGEST.bit_length())) if n <= longest]


def band(length: int, train_length: int) -> tuple[int, int]:
    """Return the positions first … last+1 of the queries that stand for a length: its last half window.

    Every length has as many, and the training length is the point of comparison.
    """
    return length - max(1, train_length // 2), length


class Drift:
    """What attention and scores of one layer become at one length; sums over sampled queries."""

    def __init__(self, heads: int, train_length: int) -> None:
        self.train_length, self.queries = train_length, 0
        self.sums = torch.zeros(len(PER_HEAD), heads, dtype=torch.float64)

    def add(self, made: Factors, queries: Tensor) -> None:
        """Add sampled queries of one sequence (positions, rising)."""
        for block in queries.split(max(1, LOGITS_AT_ONCE // (made.query.shape[0] * made.length))):
            logits = made.logits(block).double()
            count = logits.isfinite().sum(-1)[0].double()  # n: the logarithm of an int would be float32
            p = torch.softmax(logits, dim=-1)
            entropy = -torch.xlogy(p, p).sum(-1)  # h n
            even = torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)
            distance = block[:, None] - torch.arange(made.length, device=block.device)
            far = (p * (distance >= self.train_length)).sum(-1)
            found = (entropy, even, p[..., :FIRST].sum(-1), far, logits.amax(-1))
            self.sums += torch.stack([x.sum(-1) for x in found]).cpu()
        self.queries += queries.shape[0]

    def row(self) -> dict[str, Any]:
        """Return means over queries, (h) each; of the largest score also over heads."""
        means = dict(zip(PER_HEAD, self.sums / self.queries, strict=True))
        return {"queries": self.queries, **means, "logit_top": means["logit_top"].mean()}
