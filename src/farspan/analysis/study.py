"""Is one property of heads related to another? Spearman's rank correlation with a bootstrap interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.errors import require


@dataclass(frozen=True)
class Correlation:
    """ρ between -1 and 1, its 95% interval, and what it was counted over."""

    rho: float
    low: float
    high: float
    n: int
    groups: int
    """Independent units that were resampled: layers where given, otherwise the n points."""

    @property
    def null(self) -> bool:
        """Whether the interval includes no relation at all, or cannot be told."""
        return not (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        sign = "positive" if self.rho > 0 else "negative"
        found = "no relation told from chance" if self.null else f"a {sign} relation"
        return f"ρ = {self.rho:.2f} (95% {self.low:.2f} to {self.high:.2f}, n = {self.n}): {found}"


def rank_correlation(
    x: Sequence[float], y: Sequence[float], *, groups: Sequence[int] | None = None, resamples: int = 2000, seed: int = 0
) -> Correlation:
    """Spearman's ρ of paired values, ties sharing their mean rank, with a percentile bootstrap interval.

    groups: the unit each point belongs to (its layer): heads of one layer are not independent, so whole layers are
        resampled. Values that do not vary have no correlation: ρ is NaN, and the result counts as null.

    >>> str(rank_correlation([1, 2, 3, 4, 5, 6], [1, 4, 9, 16, 25, 36]))
    'ρ = 1.00 (95% 1.00 to 1.00, n = 6): a positive relation'
    """
    require(len(x) == len(y), f"x and y must be paired, got {len(x)} and {len(y)} values; give one of each a head")
    require(len(x) >= 3, f"x must hold at least 3 points for a correlation, got {len(x)}; measure more heads")
    a, b = torch.tensor(list(x), dtype=torch.float64), torch.tensor(list(y), dtype=torch.float64)
    require(bool(a.isfinite().all() and b.isfinite().all()), "x and y must be finite, got NaN or inf; drop those heads")
    require(groups is None or len(groups) == len(x), "groups must name one unit for each point")
    unit = torch.arange(len(x)) if groups is None else torch.tensor(list(groups)).unique(return_inverse=True)[1]
    members = [(unit == k).nonzero().flatten() for k in range(int(unit.max()) + 1)]
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(members), (resamples, len(members)), generator=generator)
    found = []
    for draw in draws:
        rows = torch.cat([members[k] for k in draw.tolist()])
        rho = spearman(a[rows], b[rows])
        if not math.isnan(rho):  # a draw of one point many times over
            found.append(rho)
    rho, n = spearman(a, b), len(x)
    if math.isnan(rho) or not found:
        return Correlation(math.nan, math.nan, math.nan, n, len(members))
    ends = torch.tensor(found).quantile(torch.tensor([0.025, 0.975]))
    return Correlation(rho, float(ends[0]), float(ends[1]), n, len(members))


def spearman(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of the ranks; NaN where either does not vary."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / size if size > 0 else math.nan


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1, equal values sharing the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2).double()[inverse]
