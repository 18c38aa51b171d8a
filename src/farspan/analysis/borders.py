"""Where a rotating term changes direction (Fig. 3, Fig. 7, Eq. 25), and how often within a reach of tokens.

As the key moves away, the relative angle runs from Θ_j to Θ_j + Sθ_j without a jump. On the way the term
|q_j||k_j| cos(·) turns round at borders of three kinds:

=========  ==========================================  ===================================================
``-q``     angle π, 3π, …: falling becomes rising       regular, every 2π
``q``      angle 2π, 4π, …: rising becomes falling      regular, every 2π
``k``      the first passage of 2π when Θ_j > π         irregular: it ends the stretch that began at k_j, of
                                                        τ_j tokens, different for each pair, head and token
=========  ==========================================  ===================================================

The number of crossings within S is a constant plus whether Θ_j lies in an arc, so its mean over a census is exact.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.analysis.census import TURN, Census, Grid, past_pi

BORDERS = ("k", "-q", "q")


@dataclass(frozen=True)
class Arcs:
    """A reach of S tokens under θ (d/2): the turns every pair makes, and thresholds on Θ_j for one crossing more."""

    turns: Tensor
    """⌊Sθ/2π⌋."""
    aligned: Tensor
    """From here on Θ passes one more multiple of 2π; in 0 … 2π."""
    opposed: Tensor
    """The same for odd multiples of π, where the arc starts (see :func:`crossings`)."""
    regular: Tensor
    """From here on Θ > π reaches 2π at all."""

    @classmethod
    def within(cls, reach: int, theta: Tensor) -> "Arcs":
        angle = reach * theta
        aligned = TURN - angle.remainder(TURN)
        opposed = torch.where(aligned > math.pi, aligned - math.pi, aligned + math.pi)
        return cls(torch.floor(angle / TURN), aligned, opposed, (TURN - angle).clamp(min=0.0))

    @property
    def thresholds(self) -> Tensor:
        """(d/2, 3)."""
        return torch.stack((self.aligned, self.opposed, self.regular), dim=-1)


def reach_grid(theta: Tensor, reaches: tuple[int, ...], dtype: torch.dtype) -> Grid:
    """A census grid that can count crossings within each of the reaches under each law: theta (laws, d/2)."""
    marks = [Arcs.within(reach, row).thresholds for row in theta for reach in reaches]
    return Grid.over(torch.cat(marks, dim=-1), dtype)


@dataclass(frozen=True)
class Crossings:
    """For each border of :data:`BORDERS`, head and pair: (3, h, d/2)."""

    mean: Tensor
    """Crossings on the way of one pair of query and key, on average."""
    ever: Tensor
    """Share of pairs that cross at least once."""


def crossings(census: Census, law: int, reach: int) -> Crossings:
    """Crossings as the key moves from the query itself to `reach` tokens away, under one of the census's laws.

    The reach must be among those the census's grid was made for.
    """
    arcs, grid, counts = Arcs.within(reach, census.theta[law]), census.grid, census.crossed
    dtype, whole = grid.edges.dtype, counts.sum(-1)
    beyond = past_pi(dtype, whole.device).expand_as(arcs.turns)
    pi = torch.full_like(beyond, math.pi)

    def mass(threshold: Tensor) -> Tensor:
        return grid.at_least(counts, threshold)

    irregular = mass(torch.maximum(arcs.regular.to(dtype), beyond))
    past, once_more = mass(beyond), mass(arcs.aligned)
    late = mass(torch.maximum(arcs.aligned.to(dtype), beyond))  # Θ > π that passes 2π more often than by leaving
    # (Θ - π) mod 2π ≥ aligned: an arc that ends at π, or one that ends at 2π and goes on from 0 to π.
    arc = mass(arcs.opposed) - mass(pi)
    opposed = torch.where(arcs.aligned > math.pi, arc, arc + whole)
    never, once = arcs.turns == 0, arcs.turns == 1
    ever = torch.where(never, once_more - late, torch.where(once, whole - past + late, whole))
    full, total = arcs.turns * whole, whole.clamp(min=1.0)
    return Crossings(
        torch.stack((irregular, full + opposed, full + once_more - irregular)) / total,
        torch.stack((irregular, torch.where(never, opposed, whole), ever)) / total,
    )
