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
from typing import Any

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
    ``damped``     (scalings, h, d/2): Σ min(⌈τ_j⌉, cap), the nearest tokens that are damped
    ``pairs``      pairs of query and key in the sums that are not weighted by attention
    =============  =====================================================================================

    Args:
        theta: (scalings, d/2) float64, the frequencies under each scaling, the model's own first.
        reaches: distances within which :meth:`crossings` are counted.
        cap: tokens up to which a zone is counted: the training length.
    """

    def __init__(self, theta: Tensor, reaches: Sequence[int], cap: int, heads: int, dtype: torch.dtype) -> None:
        self.theta, self.cap, self.heads = theta, cap, heads
        self.queries = self.pairs = 0
        pi = torch.tensor([math.pi], dtype=dtype, device=theta.device)
        self.past_pi = torch.nextafter(pi, 2 * pi)
        """The smallest angle greater than π: Θ_j = π itself is no anomaly."""
        angle = torch.stack([reach * row for row in theta for reach in reaches], dim=-1)  # of the distance: d/2 n
        # From these angles on, a key at this distance has crossed one more even, or odd, multiple of π.
        marks = torch.cat([CIRCLE - angle.remainder(CIRCLE), CIRCLE - (angle + math.pi).remainder(CIRCLE)], dim=-1)
        fixed = torch.cat((pi, self.past_pi)).expand(theta.shape[1], -1)
        self.edges = torch.cat((fixed, marks.to(dtype)), dim=1).sort(dim=1).values
        (scalings, pairs), weights = theta.shape, len(WEIGHTS)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=theta.device)

        self.crossed = zeros(heads, pairs, self.edges.shape[1] + 1)
        self.histogram = zeros(weights, heads, pairs, BINS)
        self.past, self.zone = zeros(weights, heads, pairs), zeros(scalings, weights, heads, pairs)
        self.damped = zeros(scalings, heads, pairs)

    def add(self, made: Factors, queries: Tensor) -> None:
        """Count the sampled queries (positions, rising) of one sequence."""
        rows = max(1, LOGITS_AT_ONCE // (self.heads * made.length))
        step = max(1, AT_ONCE // (self.heads * made.query.shape[-1]))
        for block in queries.split(rows):
            attention = torch.softmax(made.logits(block), dim=-1)
            for i, query in enumerate(block.tolist()):
                keys = torch.arange(made.first_key(query), query + 1, device=queries.device)
                for span in keys.split(step):
                    angle, _, marks = self._marked(made, query, span)
                    self._weigh(2, _bins(angle), marks, attention[:, i, span])
                stride = -(-keys.shape[0] // KEYS)
                spaced = keys[stride // 2 :: stride]
                for span in spaced.split(step):
                    self._plain(made, query, span)
                self.queries += 1
                self.pairs += spaced.shape[0]

    def _plain(self, made: Factors, query: int, keys: Tensor) -> None:
        """Count one query and a span of keys, each alike and by |q_j||k_j|."""
        angle, gap, marks = self._marked(made, query, keys)
        energy = made.key[:, keys].abs().repeat_interleave(made.groups, dim=0) * made.initial[:, query].abs()[:, None]
        bins = _bins(angle)
        self._weigh(0, bins, marks, None)
        self._weigh(1, bins, marks, energy)
        between = torch.searchsorted(self.edges, angle.permute(2, 0, 1).flatten(1).contiguous(), right=True)
        self.crossed += _counted(between.view(-1, *angle.shape[:2]).permute(1, 2, 0), None, self.crossed.shape[-1])
        self.damped += torch.stack(
            [(gap / row).ceil_().clamp_(max=self.cap).sum(1) for row in self.theta.to(gap.dtype)]
        )

    def _marked(self, made: Factors, query: int, keys: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return Θ_j, what is missing to 2π where Θ_j > π, and as 0 and 1: Θ_j > π, and the key in each zone."""
        angle = _angles(made, query, keys)
        past = (angle >= self.past_pi).to(angle.dtype)
        gap, distance = (CIRCLE - angle) * past, (query - keys)[:, None]
        return angle, gap, [past, *((gap > (distance * row).to(gap.dtype)).to(gap.dtype) for row in self.theta)]

    def _weigh(self, which: int, bins: Tensor, marks: list[Tensor], weight: Tensor | None) -> None:
        """Add bins and marks (h, keys, d/2) to the sums of one of WEIGHTS: None, (h, keys) or (h, keys, d/2)."""
        if weight is None:
            past, *zones = (mark.sum(1) for mark in marks)
        elif weight.ndim == 2:
            past, *zones = (torch.bmm(weight[:, None], mark)[:, 0] for mark in marks)
            weight = weight[..., None].expand_as(bins)
        else:
            past, *zones = ((mark * weight).sum(1) for mark in marks)
        self.histogram[which] += _counted(bins, weight, BINS)
        self.past[which] += past
        self.zone[:, which] += torch.stack(zones)

    @property
    def totals(self) -> Tensor:
        """(weights, h, d/2): what shares are divided by."""
        return self.histogram.sum(-1)

    def crossings(self, scaling: int, reach: int) -> tuple[Tensor, Tensor]:
        """Count crossings as the key moves from the query to `reach` tokens away, under one of the scalings.

        All angles between two edges cross alike, so the means over a census are exact.

        Returns:
            For each of BORDERS, head and pair (3, h, d/2): mean crossings per pair of query and key, and the share of
            pairs that cross at least once.
        """
        edges = self.edges.double()
        ends = edges.new_tensor([0.0, CIRCLE]).expand(edges.shape[0], -1)
        low, high = torch.cat((ends[:, :1], edges), dim=1), torch.cat((edges, ends[:, 1:]), dim=1)
        start = (low + high) / 2
        stop = start + reach * self.theta[scaling][:, None]
        odd = ((stop - math.pi) / CIRCLE).floor() - ((start - math.pi) / CIRCLE).floor()
        even = (stop / CIRCLE).floor()
        irregular = ((low >= self.past_pi.double()) & (even >= 1)).double()
        each = torch.stack((irregular, odd, even - irregular))[:, None]  # border 1 d/2 bins
        total = self.crossed.sum(-1).clamp(min=1.0)
        return (self.crossed * each).sum(-1) / total, (self.crossed * (each > 0)).sum(-1) / total

    def row(self, scalings: Sequence[str]) -> dict[str, Any]:
        """Take shares of initial angles in all, by head (h), by pair (d/2) and by both, under named scalings."""
        past, zone, damped, totals = self.past, self.zone, self.damped, self.totals
        weights, methods = list(enumerate(WEIGHTS)), list(enumerate(scalings))
        return {
            "queries": self.queries,
            "pairs": self.pairs,
            "histogram": {w: share(self.histogram[i].sum((0, 1)), totals[i].sum()) for i, w in weights},
            "past_pi": {w: share(past[i].sum(), totals[i].sum()) for i, w in weights},
            "past_pi_head": {w: share(past[i], totals[i], [1]) for i, w in weights},
            "past_pi_pair": {w: share(past[i], totals[i], [0]) for i, w in weights},
            "past_pi_head_pair": share(past[0], totals[0]),
            "zone": {name: {w: share(zone[k, i].sum(), totals[i].sum()) for i, w in weights} for k, name in methods},
            "zone_head": {name: share(zone[k, 2], totals[2], [1]) for k, name in methods},
            "damped": {name: share(damped[k].sum(), totals[0].sum()) for k, name in methods},
            "damped_pair": {name: share(damped[k], totals[0], [0]) for k, name in methods},
        }


def _angles(made: Factors, query: int, keys: Tensor) -> Tensor:
    """Compute Θ_j in 0 … 2π between one query and some keys: (h, keys, d/2)."""
    a = made.initial[:, query].unflatten(0, (-1, made.groups))[:, :, None]  # g r 1 j
    b = made.key[:, None, keys]  # g 1 k j
    across, along = a.imag * b.real - a.real * b.imag, a.real * b.real + a.imag * b.imag
    angle = torch.atan2(across, along).flatten(0, 1)
    return torch.where(angle < 0, angle + CIRCLE, angle)


def _bins(angle: Tensor) -> Tensor:
    return (angle * (BINS / CIRCLE)).long().clamp_(max=BINS - 1)


def _counted(cell: Tensor, weight: Tensor | None, bins: int) -> Tensor:
    """Sum weights, or count, by cell: (h, keys, d/2) → (h, d/2, bins) float64."""
    h, _, j = cell.shape
    cell = cell + torch.arange(h * j, device=cell.device).view(h, 1, j) * bins
    weights = None if weight is None else weight.flatten().double()
    return torch.bincount(cell.flatten(), weights, h * j * bins).view(h, j, bins).double()


def share(part: Tensor, whole: Tensor, dims: Sequence[int] = ()) -> Tensor:
    """Sum, then divide; 0 of 0 is 0.

    >>> share(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0])).tolist()
    [0.25, 0.0]
    """
    if dims:
        part, whole = part.sum(tuple(dims)), whole.sum(tuple(dims))
    return torch.where(whole > 0, part / whole, torch.zeros_like(part))
