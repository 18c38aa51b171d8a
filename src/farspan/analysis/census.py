"""The census of initial angles (Eq. 3): how Θ_j is distributed, what it damps, and which borders it crosses.

Streaming: one query and a span of its keys at a time, so memory does not grow with the square of the sequence. What is
weighted by attention reads every key, for a few keys may hold all of it; the rest reads evenly spaced keys of a long
sequence. Border crossings are read off a histogram whose edges include every threshold that will be asked about: they
are counted, not rounded to a bin.

As the key moves away, the relative angle runs from Θ_j to Θ_j + Sθ_j. On the way the term |q_j||k_j| cos(·) changes
direction (Fig. 3, Fig. 7, Eq. 25) at borders of three kinds:

=========  ==========================================  ===================================================
``-q``     angle π, 3π, …: falling becomes rising       regular, every 2π
``q``      angle 2π, 4π, …: rising becomes falling      regular, every 2π
``k``      the first passage of 2π when Θ_j > π         irregular: it ends the stretch that began at k_j, of
                                                        τ_j tokens, different for each pair, head and token
=========  ==========================================  ===================================================
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farspan.analysis.factors import Factors

WEIGHTS = ("plain", "energy", "attention")
"""Every pair of query and key alike · by |q_j||k_j| · by the softmax's probability."""
BORDERS = ("k", "-q", "q")
BINS = 36
"""Bins of the histogram that is shown: 10° each."""
KEYS = 1024
"""Evenly spaced keys per query for all that is not weighted by attention; all, if there are no more."""
AT_ONCE = 2**18
"""Angles held at a time: small enough for the cache of a core."""
LOGITS_AT_ONCE = 2**23
"""Scores held at a time, for the probabilities of a block of queries."""
CIRCLE = 2 * math.pi


class Census:
    """Sums over the sampled queries and the keys they see, for one layer; heads h and pairs d/2 in every tensor.

    =============  =====================================================================================
    ``crossed``    (h, d/2, bins between `edges`), unweighted
    ``histogram``  (weights, h, d/2, BINS): mass in equal bins of 0 … 2π
    ``past``       (weights, h, d/2): mass of Θ_j > π
    ``zone``       (scalings, weights, h, d/2): mass of pairs whose key is among the τ_j nearest, hence damped
    ``gap``        (h, d/2): Σ (2π - Θ) over Θ > π; over θ_j and the count it is the mean τ_j
    ``damped``     (scalings, h, d/2): Σ min(⌈τ_j⌉, cap), the nearest tokens that are damped
    ``pairs``      pairs of query and key in the sums that are not weighted by attention
    =============  =====================================================================================

    Args:
        theta: (scalings, d/2) float64, the frequencies under each scaling, the model's own first.
        reaches: distances within which :func:`crossings` can be counted.
        cap: tokens up to which a zone is counted: the training length.
    """

    def __init__(self, theta: Tensor, reaches: Sequence[int], cap: int, heads: int, dtype: torch.dtype) -> None:
        self.theta, self.cap, self.heads = theta, cap, heads
        self.queries = self.pairs = 0
        marks = [x for row in theta for reach in reaches for x in _thresholds(reach, row)]
        pi = torch.tensor([math.pi], dtype=dtype, device=theta.device)
        fixed = torch.cat((pi, past_pi(dtype, theta.device))).expand(theta.shape[1], -1)
        self.edges = torch.cat((fixed, torch.stack(marks, dim=-1).to(dtype)), dim=1).sort(dim=1).values
        (scalings, pairs), weights = theta.shape, len(WEIGHTS)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=theta.device)

        self.crossed = zeros(heads, pairs, self.edges.shape[1] + 1)
        self.histogram = zeros(weights, heads, pairs, BINS)
        self.past, self.zone = zeros(weights, heads, pairs), zeros(scalings, weights, heads, pairs)
        self.gap, self.damped = zeros(heads, pairs), zeros(scalings, heads, pairs)

    def add(self, made: Factors, queries: Tensor) -> None:
        """Count the sampled queries (positions, rising) of one sequence."""
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
        """Count one query and a span of keys by attention: weights (h, keys)."""
        angle = _angles(made, query, keys)
        self.histogram[2] += _histogram(angle, weights[..., None].expand_as(angle))
        past, gap = _gap(angle)
        self.past[2] += torch.bmm(weights[:, None], past)[:, 0]
        for i, theta in enumerate(self.theta):
            inside = gap > ((query - keys)[:, None] * theta).to(gap.dtype)
            self.zone[i, 2] += torch.bmm(weights[:, None], inside.to(gap.dtype))[:, 0]

    def _plain(self, made: Factors, query: int, keys: Tensor) -> None:
        """Count one query and a span of keys, each alike and by |q_j||k_j|."""
        angle = _angles(made, query, keys)
        energy = made.key[:, keys].abs().repeat_interleave(made.groups, dim=0) * made.initial[:, query].abs()[:, None]
        self.crossed += self._crossed(angle)
        self.histogram[0] += _histogram(angle, None)
        self.histogram[1] += _histogram(angle, energy)
        past, gap = _gap(angle)
        self.past[0] += past.sum(1)
        self.past[1] += (past * energy).sum(1)
        self.gap += gap.sum(1)
        for i, theta in enumerate(self.theta):
            inside = (gap > ((query - keys)[:, None] * theta).to(gap.dtype)).to(gap.dtype)
            self.zone[i, 0] += inside.sum(1)
            self.zone[i, 1] += (inside * energy).sum(1)
            self.damped[i] += (gap / theta.to(gap.dtype)).ceil_().clamp_(max=self.cap).sum(1)

    def _crossed(self, angle: Tensor) -> Tensor:
        """Count angles (h, keys, d/2) between the edges: (h, d/2, bins) float64."""
        h, k, j = angle.shape
        bins = self.edges.shape[1] + 1
        rows = angle.permute(2, 0, 1).reshape(j, h * k).contiguous()
        found = torch.searchsorted(self.edges, rows, right=True).view(j, h, k)
        cell = found + torch.arange(h * j, device=angle.device).view(h, j).T[..., None] * bins
        return torch.bincount(cell.flatten(), minlength=h * j * bins).view(h, j, bins).double()

    def at_least(self, threshold: Tensor) -> Tensor:
        """Return how many angles are ≥ threshold (d/2), which must be an edge: (h, d/2)."""
        at = torch.searchsorted(self.edges, threshold.to(self.edges.dtype)[:, None].contiguous())
        beyond = torch.arange(self.crossed.shape[-1], device=self.crossed.device) > at
        return (self.crossed * beyond).sum(-1)

    @property
    def totals(self) -> Tensor:
        """(weights, h, d/2): what shares are divided by."""
        return self.histogram.sum(-1)

    def mean_tau(self) -> Tensor:
        """Return the mean τ_j = (2π - Θ_j)/θ_j over the anomalous pairs of all heads, in tokens: (scalings, d/2)."""
        return share(self.gap, self.past[0], [0]) / self.theta


def past_pi(dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
    """Return the smallest angle greater than π, (1): Θ_j = π itself is no anomaly."""
    pi = torch.tensor([math.pi], dtype=dtype, device=device)
    return torch.nextafter(pi, 2 * pi)


def _angles(made: Factors, query: int, keys: Tensor) -> Tensor:
    """Compute Θ_j in 0 … 2π between one query and some keys: (h, keys, d/2)."""
    a = made.initial[:, query].unflatten(0, (-1, made.groups))[:, :, None]  # g r 1 j
    b = made.key[:, None, keys]  # g 1 k j
    across, along = a.imag * b.real - a.real * b.imag, a.real * b.real + a.imag * b.imag
    angle = torch.atan2(across, along).flatten(0, 1)
    return torch.where(angle < 0, angle + CIRCLE, angle)


def _gap(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return where Θ_j > π, as 0 and 1, and what is missing to 2π there, 0 elsewhere."""
    past = (angle >= past_pi(angle.dtype, angle.device)).to(angle.dtype)
    return past, (CIRCLE - angle) * past


def _histogram(angle: Tensor, weight: Tensor | None) -> Tensor:
    """(h, keys, d/2) → mass in equal bins (h, d/2, BINS), float64."""
    h, _, j = angle.shape
    cell = (angle * (BINS / CIRCLE)).long().clamp_(max=BINS - 1)
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


def _thresholds(reach: int, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return from which angles (d/2) on a reach crosses one more even multiple of π, one more odd one, and 2π."""
    angle = reach * theta
    aligned = CIRCLE - angle.remainder(CIRCLE)
    opposed = torch.where(aligned > math.pi, aligned - math.pi, aligned + math.pi)
    return aligned, opposed, (CIRCLE - angle).clamp(min=0.0)


def crossings(census: Census, scaling: int, reach: int) -> tuple[Tensor, Tensor]:
    """Count crossings as the key moves from the query to `reach` tokens away, under one of the census's scalings.

    The number within S tokens is a constant plus whether Θ_j lies in an arc, so its mean over a census is exact.

    Returns:
        For each of BORDERS, head and pair (3, h, d/2): mean crossings per pair of query and key, and the share of
        pairs that cross at least once.
    """
    theta = census.theta[scaling]
    aligned, opposed, regular = _thresholds(reach, theta)
    dtype, total = census.edges.dtype, census.crossed.sum(-1)
    circles, beyond = torch.floor(reach * theta / CIRCLE), past_pi(dtype, theta.device).expand_as(theta)
    irregular = census.at_least(torch.maximum(regular.to(dtype), beyond))
    past, once_more = census.at_least(beyond), census.at_least(aligned)
    # Θ > π that passes 2π more often than by leaving.
    late = census.at_least(torch.maximum(aligned.to(dtype), beyond))
    # (Θ - π) mod 2π ≥ aligned: an arc that ends at π, or one that ends at 2π and goes on from 0 to π.
    arc = census.at_least(opposed) - census.at_least(torch.full_like(beyond, math.pi))
    odd = torch.where(aligned > math.pi, arc, arc + total)
    never, once = circles == 0, circles == 1
    ever = torch.where(never, once_more - late, torch.where(once, total - past + late, total))
    full, count = circles * total, total.clamp(min=1.0)
    return (
        torch.stack((irregular, full + odd, full + once_more - irregular)) / count,
        torch.stack((irregular, torch.where(never, odd, total), ever)) / count,
    )
