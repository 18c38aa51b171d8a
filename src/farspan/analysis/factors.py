"""What a rotary layer multiplies: a(m, n) = Re Σ_j h_j e^{i(m-n)θ_j}, with h_j = A_j(m)·conj B_j(n), for every kind.

=========== ======================= ======= ===================================================================
layer       A_j                     B_j
=========== ======================= ======= ===================================================================
RoPE        q_j                     k_j     complex pairs: Θ_j = arg h_j may be anything (Eq. 3)
exact CoCA  ‖q_j‖²                  t_j     real and ≥ 0: Θ_j = 0 (Eq. 17)
slack CoCA  (a+b)(1-i) q_j / 2      t_j     q_j = a + ib; and beside it the echo (a-b)(1+i) q_j / 2, which turns with
                                            m+n instead of m-n (docs/math.md, "Why slack is not relative")
=========== ======================= ======= ===================================================================
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from farspan.layers import Attention
from farspan.ops.device import working_dtype
from farspan.ops.masking import make_mask
from farspan.ops.reference import governing_length, pairs
from farspan.ops.rotary import Rotary


@dataclass(frozen=True)
class Factors:
    """One layer on one text of m tokens: A (h, m, d/2), B (g, m, d/2), both complex and un-rotated."""

    layer: int
    name: str
    """The layer's attention, e.g. "rope"."""
    query: Tensor
    key: Tensor
    initial: Tensor
    """A of Eq. 3, where CoCA's key is q∘t: Θ_j = arg(initial·conj B). It differs from `query` in slack only."""
    echo: Tensor | None
    """Slack CoCA's part that depends on absolute positions, shaped like `query`; None elsewhere."""
    rotary: Rotary
    scale: float
    """What the softmax multiplies scores by: 1/√d, and YaRN's temperature squared."""
    window: int | None

    @property
    def length(self) -> int:
        return self.query.shape[1]

    @property
    def groups(self) -> int:
        """Query heads a key head."""
        return self.query.shape[0] // self.key.shape[0]

    def theta(self, queries: Tensor) -> Tensor:
        """Frequencies under which each query looks: (queries, d/2) float64."""
        lengths = governing_length(self.rotary, make_mask(self.length, self.length, 1, queries.device))
        theta = self.rotary.frequencies(lengths, queries.device)
        return theta.expand(queries.shape[0], -1) if theta.ndim == 1 else theta[0, queries]

    def first_key(self, query: int) -> int:
        """The first key in a query's sight."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def logits(self, queries: Tensor, *, shift: int = 0, part: str = "all") -> Tensor:
        """What the softmax sees: (h, queries, m), -inf where a query cannot look.

        Args:
            queries: positions (n), rising.
            shift: moves the whole text to another start, which matters to slack only.
            part: "all", or of slack's score "relative" or "absolute" alone.
        """
        theta = self.theta(queries)
        out = self.query.real.new_empty(self.query.shape[0], queries.shape[0], self.length)
        starts = [0, *((theta[1:] != theta[:-1]).any(-1).nonzero().flatten() + 1).tolist(), queries.shape[0]]
        for start, stop in pairwise(starts):  # dynamic NTK: one run of queries a base
            query = self._queries(queries[start:stop], shift, theta[start], part)
            key = self._keys(shift, theta[start])
            grouped = query.unflatten(0, (-1, self.groups)).flatten(1, 2) @ key  # no copy of a key for each query head
            out[:, start:stop] = grouped.unflatten(1, (self.groups, -1)).flatten(0, 1)
        distance = queries[:, None] - torch.arange(self.length, device=queries.device)
        unseen = distance < 0
        if self.window is not None:
            unseen |= distance >= self.window
        return (out * self.scale).masked_fill_(unseen, -torch.inf)

    def _queries(self, queries: Tensor, shift: int, theta: Tensor, part: str) -> Tensor:
        """Rotated queries as real vectors: (h, queries, d)."""
        turns = turn(queries + shift, theta, self.query.dtype)
        rotated = self.query[:, queries] * turns
        if self.echo is not None:  # Re(X·K) = Re(conj X · conj K): the echo meets the same keys mirrored
            echo = (self.echo[:, queries] * turns).conj()
            rotated = {"all": rotated + echo, "relative": rotated, "absolute": echo}[part]
        return torch.view_as_real(rotated.resolve_conj()).flatten(-2)

    def _keys(self, shift: int, theta: Tensor) -> Tensor:
        """Rotated keys as real vectors: (g, d, m)."""
        places = torch.arange(self.length, device=self.key.device) + shift
        return torch.view_as_real(self.key * turn(places, theta, self.key.dtype)).flatten(-2).mT


def turn(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor:
    """e^{inθ_j} for positions (n): (n, d/2), the angle in float64 whatever the dtype."""
    angle = positions[:, None].to(theta.dtype) * theta
    return torch.polar(torch.ones_like(angle), angle).to(dtype)


def factors(attention: Attention, index: int, q: Tensor, k: Tensor) -> Factors:
    """The factors of a rotary layer from its own projections of one text: q (1, h, m, d), k (1, g, m, d) or t (…, d/2).

    >>> from farspan.layers import CocaAttention
    >>> layer = CocaAttention(32, 4)
    >>> q, t, _ = layer.project(torch.randn(1, 5, 32))
    >>> made = factors(layer, 0, q, t)
    >>> made.query.shape, bool((made.query * made.key.conj()).imag.any())
    (torch.Size([4, 5, 4]), False)
    """
    assert attention.rotary is not None
    law = attention.rotary.scaling
    scale = attention.scaling * (1.0 if law is None else law.attention_factor**2)
    z, echo = pairs(q[0]), None
    if attention.spec.kind == "coca":
        t = k[0].to(working_dtype(k.dtype))
        key = torch.complex(t, torch.zeros_like(t))
        a, b = z.real, z.imag
        square = a * a + b * b
        initial = query = torch.complex(square, torch.zeros_like(square))
        if attention.form == "slack":
            query = (a + b) * z * (1 - 1j) / 2
            echo = (a - b) * z * (1 + 1j) / 2
    else:
        initial, query, key = z, z, pairs(k[0])
    name, rotary, window = attention.spec.name, attention.rotary, attention.spec.window
    return Factors(index, name, query, key, initial, echo, rotary, scale, window)
