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
    members = [(unit == k).nonzero().flatten().tolist() for k in range(int(unit.max()) + 1)]
    rho, found = float(spearman(a, b)), _resampled(a, b, members, resamples, seed)
    if math.isnan(rho) or not len(found):
        return Correlation(math.nan, math.nan, math.nan, len(x), len(members))
    ends = found.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Correlation(rho, float(ends[0]), float(ends[1]), len(x), len(members))


def _resampled(a: Tensor, b: Tensor, members: list[list[int]], resamples: int, seed: int) -> Tensor:
    """ρ of each draw of whole units that has one (a draw of one point many times over has none)."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(members), (resamples, len(members)), generator=generator)
    by_size: dict[int, list[list[int]]] = {}
    for draw in draws.tolist():
        rows = [row for unit in draw for row in members[unit]]
        by_size.setdefault(len(rows), []).append(rows)
    found = torch.cat([spearman(a[rows], b[rows]) for rows in map(torch.tensor, by_size.values())])
    return found[found.isfinite()]


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation of the ranks along the last axis, (…, n) → (…); NaN where either does not vary."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def ranks(x: Tensor) -> Tensor:
    """Ranks from 1 along the last axis, equal values sharing the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    ordered = x.sort(-1).values
    below, upto = (torch.searchsorted(ordered, x.contiguous(), right=right) for right in (False, True))
    return (below + upto + 1).double() / 2
