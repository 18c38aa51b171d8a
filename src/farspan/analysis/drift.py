"""Past the window: what a head's attention, scores and norms become as the text outgrows the training length.

A length L is looked at through the queries of the last half window before it, so that every length has as many, and
the training length itself is the point of comparison.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from farspan.analysis.factors import Factors

FIRST = 4
"""Tokens at the start of the text whose attention is counted: where attention sinks sit."""
PER_HEAD = ("entropy", "even", "first", "far")
"""Entropy in nats · entropy over that of even attention · mass on the first tokens · mass past the training length."""
PER_LAYER = ("logit_mean", "logit_spread", "logit_top", "query_norm", "key_norm", "hidden_norm")
"""Scores as the softmax sees them (mean, standard deviation and largest of a query), and norms of a token's vectors."""
LOGITS_AT_ONCE = 2**21
"""Scores held at a time, in float64 and in several copies."""
LARGEST = 32
"""Lengths go up to so many training lengths."""


def lengths(train_length: int, longest: int) -> list[int]:
    """The training length and its doublings that the text reaches, up to 32 times.

    >>> lengths(64, 300)
    [64, 128, 256]
    """
    ladder = [train_length << k for k in range(LARGEST.bit_length())]
    return [length for length in ladder if length <= longest]


def band(length: int, train_length: int) -> tuple[int, int]:
    """The queries through which a length is looked at: positions first … last+1."""
    return length - max(1, train_length // 2), length


@dataclass
class Drift:
    """Sums for one layer at one length."""

    heads: int
    train_length: int
    queries: int = 0
    head_sums: Tensor = field(init=False)
    """(PER_HEAD, h)."""
    layer_sums: Tensor = field(init=False)
    """The three of the logits, summed over queries and heads; then the norms, summed over tokens."""

    def __post_init__(self) -> None:
        self.head_sums = torch.zeros(len(PER_HEAD), self.heads, dtype=torch.float64)
        self.layer_sums = torch.zeros(len(PER_LAYER), dtype=torch.float64)

    def add(self, made: Factors, queries: Tensor, hidden_norms: Tensor) -> None:
        """Sampled queries of one text (positions, rising), and the norms of the residual (tokens of the band)."""
        for block in queries.split(max(1, LOGITS_AT_ONCE // (self.heads * made.length))):
            self._attention(made, block)
        low, high = int(queries[0]), int(queries[-1]) + 1
        norms = [made.query[:, low:high].abs(), made.key[:, low:high].abs()]
        each = [x.double().square().sum(-1).sqrt().mean() for x in norms]  # of A and B: for RoPE |q| and |k|
        self.layer_sums[3:] += torch.stack([*each, hidden_norms.double().mean()]).cpu() * queries.shape[0]
        self.queries += queries.shape[0]

    def _attention(self, made: Factors, queries: Tensor) -> None:
        logits = made.logits(queries).double()
        seen = logits.isfinite()
        count = seen.sum(-1)[0].double()  # n: an int's logarithm would be float32
        p = torch.softmax(logits, dim=-1)
        entropy = -torch.xlogy(p, p).sum(-1)  # h n
        even = torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)
        distance = queries[:, None] - torch.arange(made.length, device=queries.device)
        far = (p * (distance >= self.train_length)).sum(-1)
        self.head_sums += torch.stack([x.sum(-1) for x in (entropy, even, p[..., :FIRST].sum(-1), far)]).cpu()
        plain = torch.where(seen, logits, 0.0)
        mean = plain.sum(-1) / count
        spread = ((plain - mean[..., None]).square() * seen).sum(-1).div(count).sqrt()
        top = logits.amax(-1)
        self.layer_sums[:3] += torch.stack([x.mean(0).sum() for x in (mean, spread, top)]).cpu()

    def per_head(self) -> dict[str, Tensor]:
        """Means over queries, (h) each."""
        return dict(zip(PER_HEAD, self.head_sums / max(1, self.queries), strict=True))

    def per_layer(self) -> dict[str, float]:
        """Means over queries, heads and tokens."""
        return dict(zip(PER_LAYER, (self.layer_sums / max(1, self.queries)).tolist(), strict=True))
