"""The census of initial angles (Eq. 3): how Θ_j is distributed, and how many of the nearest tokens it damps.

Streaming: one query and a span of its keys at a time, so memory does not grow with the square of the text. What is
weighted by attention looks at every key, for a few keys may hold all of it; the rest looks at evenly spaced keys of a
long text. Border crossings are read off a histogram whose edges include every threshold that will be asked about:
they are counted, not rounded to a bin.
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
KEYS = 1024
"""Evenly spaced keys a query for all that is not weighted by attention; all, where there are no more."""
AT_ONCE = 2**18
"""Angles held at a time: small enough for the cache of a core."""
LOGITS_AT_ONCE = 2**23
"""Scores held at a time, for the probabilities of a block of queries."""
TURN = 2 * math.pi


@dataclass(frozen=True)
class Grid:
    """Edges of a histogram of angles for each pair: (d/2, edges), rising; values beyond the last have a bin too."""

    edges: Tensor

    @classmethod
    def over(cls, thresholds: Tensor, dtype: torch.dtype) -> "Grid":
        """π, everything past π, and thresholds (d/2, any) in 0 … 2π."""
        half = torch.tensor([math.pi], dtype=dtype, device=thresholds.device)
        fixed = torch.cat((half, past_pi(dtype, thresholds.device))).expand(thresholds.shape[0], -1)
        return cls(torch.cat((fixed, thresholds.to(dtype)), dim=1).sort(dim=1).values)

    def count(self, angles: Tensor) -> Tensor:
        """Angles (h, any, d/2) in each bin: (h, d/2, bins) float64."""
        h, k, j = angles.shape
        bins = self.edges.shape[1] + 1
        rows = angles.permute(2, 0, 1).reshape(j, h * k).contiguous()
        found = torch.searchsorted(self.edges, rows, right=True).view(j, h, k)
        cell = found + torch.arange(h * j, device=angles.device).view(h, j).T[..., None] * bins
        return torch.bincount(cell.flatten(), minlength=h * j * bins).view(h, j, bins).double()

    def at_least(self, counts: Tensor, threshold: Tensor) -> Tensor:
        """Mass of angles ≥ threshold (d/2), which is an edge: counts (…, d/2, bins) → (…, d/2)."""
        at = torch.searchsorted(self.edges, threshold.to(self.edges.dtype)[:, None].contiguous())
        beyond = torch.arange(counts.shape[-1], device=counts.device) > at
        return (counts * beyond).sum(-1)


def past_pi(dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """The smallest angle greater than π, (1): Θ_j = π itself is no anomaly."""
    pi = torch.tensor([math.pi], dtype=dtype, device=device)
    return torch.nextafter(pi, 2 * pi)


@dataclass
class Census:
    """Sums over the sampled queries and the keys they see, for one layer; heads h, pairs d/2 in every tensor."""

    grid: Grid
    theta: Tensor
    """(laws, d/2) float64: the frequencies of each law, the model's own first."""
    cap: int
    """A zone is counted up to so many tokens: the training length."""
    heads: int
    queries: int = 0
    pairs: int = 0
    """Pairs of query and key that the unweighted sums hold."""
    crossed: Tensor = field(init=False)
    """(h, d/2, bins of the grid), unweighted."""
    histogram: Tensor = field(init=False)
    """(weights, h, d/2, BINS): mass in equal bins of 0 … 2π."""
    past: Tensor = field(init=False)
    """(weights, h, d/2): mass of Θ_j > π."""
    zone: Tensor = field(init=False)
    """(laws, weights, h, d/2): mass of pairs whose key stands among the τ_j nearest, so that its term is damped."""
    gap: Tensor = field(init=False)
    """Σ (2π - Θ) over Θ > π: (h, d/2); over θ_j and the count it is the mean τ_j."""
    damped: Tensor = field(init=False)
    """(laws, h, d/2): Σ min(⌈τ_j⌉, cap), the nearest tokens that are damped."""

    def __post_init__(self) -> None:
        (laws, pairs), weights, h = self.theta.shape, len(WEIGHTS), self.heads

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=self.theta.device)

        self.crossed, self.histogram = zeros(h, pairs, self.grid.edges.shape[1] + 1), zeros(weights, h, pairs, BINS)
        self.past, self.zone = zeros(weights, h, pairs), zeros(laws, weights, h, pairs)
        self.gap, self.damped = zeros(h, pairs), zeros(laws, h, pairs)

    def add(self, made: Factors, queries: Tensor) -> None:
        """Count the sampled queries (positions, rising) of one text."""
        rows = max(1, LOGITS_AT_ONCE // (self.heads * made.length))
        step = max(1, AT_ONCE // (self.heads * made.query.shape[-1]))
        for block in queries.split(rows):
            weights = torch.softmax(made.logits(block), dim=-1)
            for i, query in enumerate(block.tolist()):
                keys = torch.arange(made.first_key(query), query + 1, device=queries.device)
                for span in keys.split(step):
                    self._weighted(made, query, span, weights[:, i, span])
                stride = -(-keys.shape[0] // KEYS)
                spaced = keys[stride // 2 :: stride]
                for span in spaced.split(step):
                    self._plain(made, query, span)
                self.queries += 1
                self.pairs += spaced.shape[0]

    def _weighted(self, made: Factors, query: int, keys: Tensor, weights: Tensor) -> None:
        """One query and a span of keys, by attention: weights (h, keys)."""
        angle = self._angles(made, query, keys)
        self.histogram[2] += _histogram(angle, weights[..., None].expand_as(angle))
        past, gap = _gap(angle)
        self.past[2] += torch.bmm(weights[:, None], past)[:, 0]
        for law, theta in enumerate(self.theta):
            inside = gap > ((query - keys)[:, None] * theta).to(gap.dtype)
            self.zone[law, 2] += torch.bmm(weights[:, None], inside.to(gap.dtype))[:, 0]

    def _plain(self, made: Factors, query: int, keys: Tensor) -> None:
        """One query and a span of keys, each alike and by |q_j||k_j|."""
        angle = self._angles(made, query, keys)
        sizes = made.key[:, keys].abs().repeat_interleave(made.groups, dim=0)
        energy = sizes * made.initial[:, query].abs()[:, None]
        self.crossed += self.grid.count(angle)
        self.histogram[0] += _histogram(angle, None)
        self.histogram[1] += _histogram(angle, energy)
        past, gap = _gap(angle)
        self.past[0] += past.sum(1)
        self.past[1] += (past * energy).sum(1)
        self.gap += gap.sum(1)
        for law, theta in enumerate(self.theta):
            inside = (gap > ((query - keys)[:, None] * theta).to(gap.dtype)).to(gap.dtype)
            self.zone[law, 0] += inside.sum(1)
            self.zone[law, 1] += (inside * energy).sum(1)
            self.damped[law] += (gap / theta.to(gap.dtype)).ceil_().clamp_(max=self.cap).sum(1)

    @staticmethod
    def _angles(made: Factors, query: int, keys: Tensor) -> Tensor:
        """Θ_j in 0 … 2π between one query and some keys: (h, keys, d/2)."""
        a = made.initial[:, query].unflatten(0, (-1, made.groups))[:, :, None]  # g r 1 j
        b = made.key[:, None, keys]  # g 1 k j
        across, along = a.imag * b.real - a.real * b.imag, a.real * b.real + a.imag * b.imag
        angle = torch.atan2(across, along).flatten(0, 1)
        return torch.where(angle < 0, angle + TURN, angle)

    @property
    def totals(self) -> Tensor:
        """(weights, h, d/2): what shares are divided by."""
        return self.histogram.sum(-1)

    def mean_tau(self) -> Tensor:
        """Mean τ_j = (2π - Θ_j)/θ_j over the anomalous pairs of all heads, in tokens: (laws, d/2); 0 where none are."""
        return share(self.gap, self.past[0], [0]) / self.theta


def _gap(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Where Θ_j > π, as 0 and 1, and there what is missing to 2π, elsewhere 0."""
    past = (angle >= past_pi(angle.dtype, angle.device)).to(angle.dtype)
    return past, (TURN - angle) * past


def _histogram(angle: Tensor, weight: Tensor | None) -> Tensor:
    """(h, keys, d/2) → mass in equal bins (h, d/2, BINS), float64."""
    h, _, j = angle.shape
    cell = (angle * (BINS / TURN)).long().clamp_(max=BINS - 1)
    cell += torch.arange(h * j, device=angle.device).view(h, 1, j) * BINS
    weights = None if weight is None else weight.flatten().double()
    return torch.bincount(cell.flatten(), weights, h * j * BINS).view(h, j, BINS).double()


def share(part: Tensor, whole: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """Sum, then divide; 0 of 0 is 0.

    >>> share(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0])).tolist()
    [0.25, 0.0]
    """
    if dims:
        part, whole = part.sum(tuple(dims)), whole.sum(tuple(dims))
    return torch.where(whole > 0, part / whole, torch.zeros_like(part))
