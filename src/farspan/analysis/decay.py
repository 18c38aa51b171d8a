"""Score against distance: a(s) at chosen distances, under the bounds of Eq. 19 and Eq. 20.

One distance is one diagonal of the score matrix: the queries along it (all of them, or evenly spaced ones in a long
text) give means and quantiles in O(N) memory, and the bounds are checked on every one of them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from farspan.analysis.factors import Factors

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
AT_ONCE = 2**21
"""Products h_j held at a time."""
SLIP = 1e-9
"""Rounding allowed to a bound, relative to it: everything here is float64."""
QUERIES = 2048
"""Queries a distance and text."""
CHECKS = ("eq19", "eq20", "eq21", "eq19_inner")


def distances(length: int) -> list[int]:
    """0, 1, 2, 3 and then steps of about √2 up to the last distance in a text.

    >>> distances(40)
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 39]
    """
    steps = {round(2 ** (k / 2)) for k in range(2, 64)}
    return sorted(s for s in {0, 1, 2, 3, length - 1} | steps if s < length)


@dataclass
class Decay:
    """Statistics of one layer's scores, over heads, queries and texts; distances s in `at`."""

    at: list[int]
    samples: list[int] = field(init=False)
    values: list[list[Tensor]] = field(init=False)
    """Logits a(s)·scale at each distance."""
    bounds: Tensor = field(init=False)
    """Σ of the bounds of Eq. 19 and Eq. 20, with the same scale: (2, distances)."""
    broken: dict[str, int] = field(init=False)
    """How often each inequality failed: "eq19" for the part of the score that is relative, "eq20" (a theorem for CoCA
    only), "eq21", and "eq19_inner", Eq. 19 with the maximum over neighbouring pairs alone."""

    def __post_init__(self) -> None:
        self.samples, self.values = [0] * len(self.at), [[] for _ in self.at]
        self.bounds = torch.zeros(2, len(self.at), dtype=torch.float64)
        self.broken = dict.fromkeys(CHECKS, 0)

    def add(self, made: Factors, count: int = QUERIES) -> None:
        """At most so many queries of one text, evenly spaced, at every distance the text has."""
        heads, pairs = made.query.shape[0], made.query.shape[2]
        rows = max(1, AT_ONCE // (heads * pairs))
        for i, s in enumerate(self.at):
            if s >= made.length or (made.window is not None and s >= made.window):
                continue
            queries = torch.arange(s, made.length, -(-(made.length - s) // count), device=made.query.device)
            for block in queries.split(rows):
                self._diagonal(made, i, s, block)

    def _diagonal(self, made: Factors, i: int, s: int, queries: Tensor) -> None:
        theta = made.theta(queries)
        key = made.key[:, queries - s].repeat_interleave(made.groups, dim=0).to(torch.complex128)
        h = made.query[:, queries].to(torch.complex128) * key.conj()  # h n j
        wave = torch.polar(torch.ones_like(theta), s * theta)
        relative = (h * wave).real.sum(-1)
        score = relative
        if made.echo is not None:
            sigma = (2 * queries - s)[:, None] * theta
            echo = made.echo[:, queries].to(torch.complex128) * key
            score = relative + (echo * torch.polar(torch.ones_like(sigma), sigma)).real.sum(-1)
        self.values[i].append((score * made.scale).flatten().to(made.query.real.dtype).cpu())
        self.samples[i] += score.numel()
        self._check(i, relative.abs(), h, wave, made.scale)

    def _check(self, i: int, a: Tensor, h: Tensor, wave: Tensor, scale: float) -> None:
        padded = torch.cat((h, torch.zeros_like(h[..., :1])), dim=-1)  # h_{d/2} = 0 ends the Abel summation
        steps, flat = padded.diff(dim=-1).abs(), padded.abs().diff(dim=-1).abs()
        partial = wave.cumsum(-1)
        sums = partial.abs().sum(-1), partial.real.abs().sum(-1)
        eq19, eq20 = steps.amax(-1) * sums[0], flat.amax(-1) * sums[1]
        inner = steps[..., :-1].amax(-1) * sums[0] if h.shape[-1] > 1 else torch.zeros_like(eq19)
        size = h.abs().sum(-1)  # rounding of a is relative to the terms, not to their sum
        for name, bound in (("eq19", eq19), ("eq20", eq20), ("eq19_inner", inner)):
            self.broken[name] += int((a > bound + SLIP * size).sum())
        self.broken["eq21"] += int((flat > steps + SLIP * size[..., None]).any(-1).sum())
        self.bounds[:, i] += torch.stack((eq19.sum(), eq20.sum())).cpu() * scale

    def mean(self) -> Tensor:
        """(distances)."""
        nothing = torch.tensor(torch.nan, dtype=torch.float64)
        return torch.stack([torch.cat(v).double().mean() if v else nothing for v in self.values])

    def quantiles(self) -> Tensor:
        """(quantiles, distances), interpolated linearly."""
        nothing = torch.full((len(QUANTILES),), torch.nan, dtype=torch.float64)
        return torch.stack([quantiles(torch.cat(v).double()) if v else nothing for v in self.values], dim=-1)

    def mean_bounds(self) -> Tensor:
        """Mean bound of Eq. 19 and Eq. 20 at each distance: (2, distances)."""
        return self.bounds / torch.tensor(self.samples, dtype=torch.float64).clamp(min=1)


def quantiles(values: Tensor) -> Tensor:
    """:data:`QUANTILES` of any number of values (torch.quantile stops at 16 million).

    >>> quantiles(torch.arange(101.0)).tolist()
    [5.0, 25.0, 50.0, 75.0, 95.0]
    """
    ordered = values.sort().values
    place = torch.tensor(QUANTILES, dtype=torch.float64) * (len(values) - 1)
    low = place.floor().long()
    high = (low + 1).clamp(max=len(values) - 1)
    part = (place - low).to(values.dtype)
    return ordered[low] * (1 - part) + ordered[high] * part
