"""Slack CoCA under the microscope: how much of its score depends on where the text starts, and its hidden angle.

Per pair, slack = t/2·{(a+b)² cosΔ - (b²-a²) sinΔ} + t/2·{(a-b)² cosΣ + (b²-a²) sinΣ}: the first brace turns with the
distance, the second with the sum of the positions. The first has an angle of its own at distance 0, so that "Θ_j = 0"
is true of slack's vectors but not of its score.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from farspan.analysis.factors import Factors

LOGITS_AT_ONCE = 2**22


@dataclass
class Microscope:
    """Sums for one slack layer."""

    heads: int
    shift: int
    """Tokens by which the text is moved to see what its start matters: the training length."""
    queries: int = 0
    squares: Tensor = field(init=False)
    """Σ score² of the relative part, of the absolute part: (2, h)."""
    rising: Tensor = field(init=False)
    """Of the relative part, Σ t|A| over pairs that rise with distance at first (angle past π), Σ t|A|·|angle| (the
    short way round), and Σ t|A| over all: (3, h)."""
    moved: Tensor = field(init=False)
    """Σ over queries of the attention that moves when the text does (total variation), (h)."""

    def __post_init__(self) -> None:
        self.squares = torch.zeros(2, self.heads, dtype=torch.float64)
        self.rising = torch.zeros(3, self.heads, dtype=torch.float64)
        self.moved = torch.zeros(self.heads, dtype=torch.float64)

    def add(self, made: Factors, queries: Tensor) -> None:
        """Sampled queries (positions, rising) of one text against all keys they see."""
        assert made.echo is not None
        for block in queries.split(max(1, LOGITS_AT_ONCE // (self.heads * made.length))):
            here, there = made.logits(block), made.logits(block, shift=self.shift)
            moved = (torch.softmax(here, -1) - torch.softmax(there, -1)).abs().sum(-1) / 2
            self.moved += moved.double().sum(-1).cpu()
            for i, part in enumerate(("relative", "absolute")):
                scores = made.logits(block, part=part).double()
                self.squares[i] += scores.masked_fill(scores.isinf(), 0.0).square().sum((1, 2)).cpu()
            self._phases(made, block)
            self.queries += block.shape[0]

    def _phases(self, made: Factors, queries: Tensor) -> None:
        a = made.query[:, queries]
        for i, query in enumerate(queries.tolist()):
            keys = made.key[:, made.first_key(query) : query + 1].real.double().sum(1)
            size = a[:, i].abs().double() * keys.repeat_interleave(made.groups, dim=0)
            parts = size * (a[:, i].imag < 0), size * a[:, i].angle().abs(), size
            self.rising += torch.stack([part.sum(-1) for part in parts]).cpu()

    def absolute_share(self) -> Tensor:
        """Share of the score's energy that depends on absolute position, (h): 0 = purely relative."""
        return self.squares[1] / self.squares.sum(0).clamp(min=1e-300)

    def rising_share(self) -> Tensor:
        """Share of the relative part, by size, that first rises with distance, (h): 0 for exact CoCA."""
        return self.rising[0] / self.rising[2].clamp(min=1e-300)

    def mean_angle(self) -> Tensor:
        """Mean angle of the relative part at distance 0, by size and in radians, (h): 0 for exact CoCA, at most π/2."""
        return self.rising[1] / self.rising[2].clamp(min=1e-300)

    def moved_share(self) -> Tensor:
        """Attention that goes elsewhere when the text starts `shift` tokens later, (h), between 0 and 1."""
        return self.moved / max(1, self.queries)
