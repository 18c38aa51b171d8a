"""The census of initial angles (Eq. 3): how Θ_j is distributed, and how many of the nearest tokens it damps.

Streaming: one query and a span of its keys at a time, so memory does not grow with the square of the text. Whatever
depends on Θ_j alone is read off one histogram a head and pair, whose edges include every threshold that is asked about
later: those counts are exact, not rounded to a bin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farspan.analysis.factors import Factors

WEIGHTS = ("plain", "energy", "attention")
"""Every pair of query and key alike · by |q_j||k_j| · by the softmax's probability."""
BINS = 36
"""Bins of the histogram that is shown: 10° each."""
AT_ONCE = 2**18
"""Angles held at a time: small enough for the cache of a core."""
LOGITS_AT_ONCE = 2**23
"""Scores held at a time, for the probabilities of a block of queries."""
TURN = 2 * math.pi


@dataclass(frozen=True)
class Grid:
    """Edges of a histogram of angles for each pair: (d/2, edges), rising, from 0; values beyond the last have a bin too."""

    edges: Tensor

    @classmethod
    def over(cls, thresholds: Tensor, dtype: torch.dtype) -> "Grid":
        """The shown bins, everything past π, and thresholds (d/2, any) in 0 … 2π."""
        pairs, device = thresholds.shape[0], thresholds.device
        shown = torch.arange(BINS, dtype=torch.float64, device=device) * (TURN / BINS)
        half = torch.tensor([math.pi], dtype=dtype, device=device)
        fixed = torch.cat((shown.to(dtype), half, past_pi(dtype, device)))
        return cls(torch.cat((fixed.expand(pairs, -1), thresholds.to(dtype)), dim=1).sort(dim=1).values)

    def bins(self, angles: Tensor) -> Tensor:
        """The bin of each angle, (…, d/2) → (…, d/2)."""
        rows = angles.flatten(0, -2).T.contiguous()
        return torch.searchsorted(self.edges, rows, right=True).T.view(angles.shape)

    def at_least(self, counts: Tensor, threshold: Tensor) -> Tensor:
        """Mass of angles ≥ threshold (d/2), which is an edge: counts (…, d/2, bins) → (…, d/2)."""
        at = torch.searchsorted(self.edges, threshold.to(self.edges.dtype)[:, None].contiguous())
        beyond = torch.arange(counts.shape[-1], device=counts.device) > at
        return (counts * beyond).sum(-1)

    def shown(self, counts: Tensor) -> Tensor:
        """The histogram of :data:`BINS` equal bins: (…, d/2, bins) → (…, d/2, BINS)."""
        marks = torch.arange(BINS, dtype=torch.float64, device=counts.device) * (TURN / BINS)
        above = [self.at_least(counts, mark.expand(self.edges.shape[0])) for mark in marks]
        above.append(torch.zeros_like(above[0]))
        return -torch.stack(above, dim=-1).diff(dim=-1)


def past_pi(dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """The smallest angle greater than π, (1): Θ_j = π itself is no anomaly."""
    pi = torch.tensor([math.pi], dtype=dtype, device=device)
    return torch.nextafter(pi, 2 * pi)


@dataclass
class Census:
    """Sums over the sampled queries and all keys they see, for one layer; heads h, pairs d/2 in every tensor."""

    grid: Grid
    theta: Tensor
    """(laws, d/2) float64: the frequencies of each law, the model's own first."""
    cap: int
    """A zone is counted up to so many tokens: the training length."""
    heads: int
    queries: int = 0
    pairs: int = 0
    """Pairs of query and key."""
    counts: Tensor = field(init=False)
    """(weights, h, d/2, bins)."""
    gap: Tensor = field(init=False)
    """Σ (2π - Θ) over Θ > π: (h, d/2); over θ_j and the count it is the mean τ_j."""
    zone: Tensor = field(init=False)
    """(laws, weights, h, d/2): mass of pairs whose key stands among the τ_j nearest, so that its term is damped."""
    damped: Tensor = field(init=False)
    """(laws, h, d/2): Σ min(⌈τ_j⌉, cap), the nearest tokens that are damped."""

    def __post_init__(self) -> None:
        laws, pairs = self.theta.shape
        zeros = {"dtype": torch.float64, "device": self.theta.device}
        self.counts = torch.zeros(len(WEIGHTS), self.heads, pairs, self.grid.edges.shape[1] + 1, **zeros)  # type: ignore[arg-type]
        self.gap = torch.zeros(self.heads, pairs, **zeros)  # type: ignore[arg-type]
        self.zone = torch.zeros(laws, len(WEIGHTS), self.heads, pairs, **zeros)  # type: ignore[arg-type]
        self.damped = torch.zeros(laws, self.heads, pairs, **zeros)  # type: ignore[arg-type]

    def add(self, made: Factors, queries: Tensor) -> None:
        """Count the sampled queries (positions, rising) of one text."""
        rows = max(1, LOGITS_AT_ONCE // (self.heads * made.length))
        for block in queries.split(rows):
            weights = torch.softmax(made.logits(block), dim=-1)
            for i, query in enumerate(block.tolist()):
                first = made.first_key(query)
                step = max(1, AT_ONCE // (self.heads * made.query.shape[-1]))
                for low in range(first, query + 1, step):
                    high = min(low + step, query + 1)
                    self._count(made, query, low, high, weights[:, i, low:high])
                self.queries += 1
                self.pairs += query + 1 - first

    def _count(self, made: Factors, query: int, low: int, high: int, weights: Tensor) -> None:
        """One query and keys low … high-1; weights (h, keys)."""
        a = made.initial[:, query].unflatten(0, (-1, made.groups))[:, :, None]  # g r 1 j
        b = made.key[:, None, low:high]  # g 1 k j
        angle = torch.atan2(a.imag * b.real - a.real * b.imag, a.real * b.real + a.imag * b.imag).flatten(0, 1)
        angle = torch.where(angle < 0, angle + TURN, angle)  # h k j: Θ_j in 0 … 2π
        energy = (a.abs() * b.abs()).flatten(0, 1)
        spread = weights[..., None].expand_as(angle)
        self._histogram(angle, energy, spread)
        gap = torch.where(angle >= past_pi(angle.dtype, angle.device), TURN - angle, 0.0)
        self.gap += gap.sum(1, dtype=torch.float64)
        distance = torch.arange(query - low, query - high, -1, device=angle.device)[:, None]
        for law, theta in enumerate(self.theta):
            inside = (gap > (distance * theta).to(gap.dtype)).to(gap.dtype)
            self.zone[law, 0] += inside.sum(1, dtype=torch.float64)
            self.zone[law, 1] += (inside * energy).sum(1, dtype=torch.float64)
            self.zone[law, 2] += torch.einsum("hk,hkj->hj", weights, inside)
            tau = (gap / theta.to(gap.dtype)).ceil().clamp(max=self.cap)
            self.damped[law] += tau.sum(1, dtype=torch.float64)

    def _histogram(self, angle: Tensor, energy: Tensor, spread: Tensor) -> None:
        h, _, j = angle.shape
        bins = self.counts.shape[-1]
        cell = torch.arange(h * j, device=angle.device).view(h, 1, j) * bins + self.grid.bins(angle)
        flat, size = cell.flatten(), h * j * bins
        self.counts[0] += torch.bincount(flat, minlength=size).view(h, j, bins)
        for i, weight in enumerate((energy, spread), 1):
            self.counts[i] += torch.bincount(flat, weight.flatten().double(), size).view(h, j, bins)

    @property
    def totals(self) -> Tensor:
        """(weights, h, d/2): what shares are divided by."""
        return self.counts.sum(-1)

    def past(self) -> Tensor:
        """Mass of Θ_j > π: (weights, h, d/2)."""
        return self.grid.at_least(self.counts, past_pi(self.grid.edges.dtype).expand(self.grid.edges.shape[0]))

    def histogram(self) -> Tensor:
        """Mass in :data:`BINS` equal bins of 0 … 2π: (weights, h, d/2, BINS)."""
        return self.grid.shown(self.counts)

    def mean_tau(self) -> Tensor:
        """Mean τ_j = (2π - Θ_j)/θ_j over the anomalous pairs, in tokens: (laws, h, d/2); 0 where there are none."""
        return self.gap / self.past()[0].clamp(min=1) / self.theta[:, None, :]


def share(part: Tensor, whole: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """Sum, then divide; 0 of 0 is 0.

    >>> share(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0])).tolist()
    [0.25, 0.0]
    """
    if dims:
        part, whole = part.sum(tuple(dims)), whole.sum(tuple(dims))
    return torch.where(whole > 0, part / whole, torch.zeros_like(part))
