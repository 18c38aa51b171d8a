"""Score against distance, attention against length, and the parts of slack CoCA's score, for one layer each."""

import numpy as np
import torch
from torch import Tensor

from farspan.analysis.factors import Factors

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
QUERIES = 2048
"""Queries per distance and sequence."""
PRODUCTS_AT_ONCE = 2**21
LOGITS_AT_ONCE = 2**21
"""Scores held at a time, in float64 and in several copies."""
SLIP = 1e-9
"""Rounding allowed to a bound, relative to it: everything here is float64."""
CHECKS = ("eq19", "eq20", "eq21")
FIRST = 4
"""Tokens at the start whose attention is counted: attention sinks are there."""
PER_HEAD = ("entropy", "even", "first", "far")
"""Entropy in nats · entropy over that of even attention · mass on the first tokens · mass past the training length."""
PER_LAYER = ("logit_mean", "logit_spread", "logit_top", "query_norm", "key_norm", "hidden_norm")
"""Scores as the softmax sees them (mean, standard deviation and largest per query), and norms per token."""
LARGEST = 32
"""Lengths go up to so many training lengths."""


def distances(length: int) -> list[int]:
    """Return 0, 1, 2, 3 and then steps of about √2 up to the last distance in a sequence.

    >>> distances(40)
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 39]
    """
    steps = {round(2 ** (k / 2)) for k in range(2, 64)}
    return sorted(s for s in {0, 1, 2, 3, length - 1} | steps if s < length)


class Decay:
    """Scores a(s) at chosen distances s, and the bounds of Eq. 19 and Eq. 20 on each.

    One distance is one diagonal of the score matrix: the queries along it (all of them, or evenly spaced ones) give
    means and quantiles in O(N) memory. `broken` counts where an inequality failed: "eq19" for the part of the score
    that is relative, "eq20" (a theorem for CoCA only), and "eq21".
    """

    def __init__(self, at: list[int]) -> None:
        self.at, self.samples = at, [0] * len(at)
        self.values: list[list[Tensor]] = [[] for _ in at]  # logits a(s)·scale
        self.bounds = torch.zeros(2, len(at), dtype=torch.float64)  # sums, with the same scale
        self.broken = dict.fromkeys(CHECKS, 0)

    def add(self, made: Factors, count: int = QUERIES) -> None:
        """Add at most so many queries of one sequence, evenly spaced, at every distance that it has."""
        heads, pairs = made.query.shape[0], made.query.shape[2]
        for i, s in enumerate(self.at):
            if s >= made.length or (made.window is not None and s >= made.window):
                continue
            queries = torch.arange(s, made.length, -(-(made.length - s) // count), device=made.query.device)
            for block in queries.split(max(1, PRODUCTS_AT_ONCE // (heads * pairs))):
                self._diagonal(made, i, s, block)

    def _diagonal(self, made: Factors, i: int, s: int, queries: Tensor) -> None:
        theta = made.theta(queries)
        key = made.key[:, queries - s].repeat_interleave(made.groups, dim=0).to(torch.complex128)
        h = made.query[:, queries].to(torch.complex128) * key.conj()  # h n j
        wave = torch.polar(torch.ones_like(theta), s * theta)
        score = relative = (h * wave).real.sum(-1)
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
        size = h.abs().sum(-1)  # rounding of a is relative to the terms, not to their sum
        for name, bound in (("eq19", eq19), ("eq20", eq20)):
            self.broken[name] += int((a > bound + SLIP * size).sum())
        self.broken["eq21"] += int((flat > steps + SLIP * size[..., None]).any(-1).sum())
        self.bounds[:, i] += torch.stack((eq19.sum(), eq20.sum())).cpu() * scale

    def mean(self) -> Tensor:
        """Return the mean score at each distance."""
        nothing = torch.tensor(torch.nan, dtype=torch.float64)
        return torch.stack([torch.cat(v).double().mean() if v else nothing for v in self.values])

    def quantiles(self) -> Tensor:
        """(quantiles, distances), interpolated linearly."""
        nothing = torch.full((len(QUANTILES),), torch.nan, dtype=torch.float64)
        # numpy's, as torch.quantile stops at 16 million values
        found = [torch.from_numpy(np.quantile(torch.cat(v).double(), QUANTILES)) if v else nothing for v in self.values]
        return torch.stack(found, dim=-1)

    def mean_bounds(self) -> Tensor:
        """Return the mean bound of Eq. 19 and of Eq. 20 at each distance: (2, distances)."""
        return self.bounds / torch.tensor(self.samples, dtype=torch.float64).clamp(min=1)


def lengths(train_length: int, longest: int) -> list[int]:
    """Return the training length and its doublings that the sequence reaches, up to 32 times.

    >>> lengths(64, 300)
    [64, 128, 256]
    """
    return [n for n in (train_length << k for k in range(LARGEST.bit_length())) if n <= longest]


def band(length: int, train_length: int) -> tuple[int, int]:
    """Return the positions first … last+1 of the queries that stand for a length: its last half window.

    Every length has as many, and the training length is the point of comparison.
    """
    return length - max(1, train_length // 2), length


class Drift:
    """What attention, scores and norms of one layer become at one length; sums over sampled queries."""

    def __init__(self, heads: int, train_length: int) -> None:
        self.heads, self.train_length, self.queries = heads, train_length, 0
        self.head_sums = torch.zeros(len(PER_HEAD), heads, dtype=torch.float64)
        self.layer_sums = torch.zeros(len(PER_LAYER), dtype=torch.float64)

    def add(self, made: Factors, queries: Tensor, hidden_norms: Tensor) -> None:
        """Add sampled queries of one sequence (positions, rising), and the norms of the residual (band)."""
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
        count = seen.sum(-1)[0].double()  # n: the logarithm of an int would be float32
        p = torch.softmax(logits, dim=-1)
        entropy = -torch.xlogy(p, p).sum(-1)  # h n
        even = torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)
        distance = queries[:, None] - torch.arange(made.length, device=queries.device)
        far = (p * (distance >= self.train_length)).sum(-1)
        self.head_sums += torch.stack([x.sum(-1) for x in (entropy, even, p[..., :FIRST].sum(-1), far)]).cpu()
        plain = torch.where(seen, logits, 0.0)
        mean = plain.sum(-1) / count
        spread = ((plain - mean[..., None]).square() * seen).sum(-1).div(count).sqrt()
        self.layer_sums[:3] += torch.stack([x.mean(0).sum() for x in (mean, spread, logits.amax(-1))]).cpu()

    def per_head(self) -> dict[str, Tensor]:
        """Return means over queries, (h) each."""
        return dict(zip(PER_HEAD, self.head_sums / max(1, self.queries), strict=True))

    def per_layer(self) -> dict[str, float]:
        """Return means over queries, heads and tokens."""
        return dict(zip(PER_LAYER, (self.layer_sums / max(1, self.queries)).tolist(), strict=True))


class Microscope:
    """Measure how far slack CoCA's score depends on the start of the sequence, and its angle at distance 0.

    Per pair, slack = t/2·{(a+b)² cosΔ - (b²-a²) sinΔ} + t/2·{(a-b)² cosΣ + (b²-a²) sinΣ}: the first brace rotates with
    the distance, the second with the sum of the positions. The first has an angle of its own at distance 0, so that
    "Θ_j = 0" is true of slack's vectors but not of its score.

    Args:
        shift: tokens by which the sequence is moved to see what its start matters: the training length.
    """

    def __init__(self, heads: int, shift: int) -> None:
        self.heads, self.shift, self.queries = heads, shift, 0
        self.squares = torch.zeros(2, heads, dtype=torch.float64)  # Σ score² of the relative and the absolute part
        # Of the relative part: Σ t|A| over pairs that rise with distance at first, Σ t|A|·|angle|, Σ t|A|.
        self.rising = torch.zeros(3, heads, dtype=torch.float64)
        self.moved = torch.zeros(heads, dtype=torch.float64)  # Σ total variation of attention when the sequence moves

    def add(self, made: Factors, queries: Tensor) -> None:
        """Compare sampled queries (positions, rising) of one sequence with all keys they see."""
        for block in queries.split(max(1, LOGITS_AT_ONCE // (self.heads * made.length))):
            here, there = (torch.softmax(made.logits(block, shift=shift), -1) for shift in (0, self.shift))
            self.moved += ((here - there).abs().sum(-1) / 2).double().sum(-1).cpu()
            for i, part in enumerate(("relative", "absolute")):
                scores = made.logits(block, part=part).double()
                self.squares[i] += scores.masked_fill(scores.isinf(), 0.0).square().sum((1, 2)).cpu()
            a = made.query[:, block]
            for i, query in enumerate(block.tolist()):
                keys = made.key[:, made.first_key(query) : query + 1].real.double().sum(1)
                size = a[:, i].abs().double() * keys.repeat_interleave(made.groups, dim=0)
                parts = size * (a[:, i].imag < 0), size * a[:, i].angle().abs(), size
                self.rising += torch.stack([part.sum(-1) for part in parts]).cpu()
            self.queries += block.shape[0]

    def per_head(self) -> dict[str, Tensor]:
        """Return shares and an angle, (h) each.

        Absolute: the score's energy that depends on absolute position. Rising and mean angle: of the relative part, by
        size, what first rises with distance, and the angle at distance 0 in radians (both 0 for exact CoCA). Moved: the
        attention that moves when the sequence starts `shift` tokens later.
        """
        size = self.rising[2].clamp(min=1e-300)
        return {
            "absolute_share": self.squares[1] / self.squares.sum(0).clamp(min=1e-300),
            "rising_share": self.rising[0] / size,
            "mean_angle": self.rising[1] / size,
            "moved_share": self.moved / max(1, self.queries),
        }
