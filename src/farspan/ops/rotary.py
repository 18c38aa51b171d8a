"""Rotary angles, the laws that stretch them, and the rotation itself (CoCA paper, Eq. 1).

Everything here is stateless. Angles are computed in float64 and only their cosines and sines are rounded, to float32
at the lowest: at position 100 000 a float32 angle is already wrong by 0.004 radians.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.positions import Positions, PositionsArgument, resolve
from farspan.ops.scaling import DynamicNTK, Scaling, theta


@dataclass(frozen=True)
class Angles:
    """cos(nθ_j) and sin(nθ_j) side by side, (b|1, 1, positions, 2, d/2): ready to meet (b, h, positions, ·)."""

    both: Tensor

    @property
    def cos(self) -> Tensor:
        return self.both[..., 0, :]

    @property
    def sin(self) -> Tensor:
        return self.both[..., 1, :]


class Run(NamedTuple):
    """Queries ``start … stop-1`` that share one set of frequencies, those of the governing `length`."""

    start: int
    stop: int
    length: int | Tensor | None
    member: Tensor | None = None
    """(b, stop-start): the queries that belong, when rows of a batch cross into the next frequencies apart."""


A = TypeVar("A", covariant=True)


@dataclass(frozen=True)
class Segment(Generic[A]):
    """Queries ``start … stop-1`` of a call, which share one set of frequencies, and the keys they can see.

    The angles are tables, :class:`Angles`, or :class:`~farspan.ops.phases.Phases`, from which a kernel finds them.
    Only `per_query` dynamic NTK makes more than one segment. `member` (b, stop-start) marks the queries that belong,
    when rows of a batch cross into the next frequencies at different columns.
    """

    start: int
    stop: int
    keys: int
    query: A
    key: A
    member: Tensor | None = None


Plan = tuple[Segment[Angles], ...]


def odd_width(width: int) -> str:
    """What is wrong with a head that does not split into rotary pairs.

    >>> odd_width(63)
    'head_dim must be even to form rotary pairs, got 63; choose hidden_size / num_heads even'
    """
    return f"head_dim must be even to form rotary pairs, got {width}; choose hidden_size / num_heads even"


@dataclass(frozen=True)
class Rotary:
    """θ_j = base^(-2j/d) under a scaling law.

    >>> Rotary(4).frequencies()
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """

    dim: int
    base: float = 10_000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        require(
            self.dim >= 2 and self.dim % 2 == 0,
            lambda: odd_width(self.dim),
        )
        require(self.base > 1, f"base must be greater than 1, got {self.base}; the paper uses 10000")

    @property
    def follows_query(self) -> bool:
        """Keys must be re-rotated for each query: nothing rotated may be cached."""
        return isinstance(self.scaling, DynamicNTK) and self.scaling.mode == "per_query"

    @property
    def follows_length(self) -> bool:
        """The frequencies depend on the length of the request."""
        return isinstance(self.scaling, DynamicNTK) and self.scaling.mode == "per_request"

    @property
    def is_dynamic(self) -> bool:
        """The frequencies change as a text grows, by query or by request: what was turned may have to be turned again.

        >>> Rotary(4).is_dynamic, Rotary(4, scaling=DynamicNTK(2, train_length=64)).is_dynamic
        (False, True)
        """
        return isinstance(self.scaling, DynamicNTK)

    @property
    def factor(self) -> float:
        """What multiplies cos and sin (YaRN's temperature)."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def at_length(self, length: int) -> "Rotary":
        """The rotary whose frequencies are those of a request of this length (itself, unless it follows length)."""
        if not self.follows_length:
            return self
        assert isinstance(self.scaling, DynamicNTK)
        return Rotary(self.dim, self.scaling.base_at(length, self.dim, self.base))

    def frequencies(self, length: int | Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """θ_j in float64: (d/2), or (b, d/2) where a dynamic law is given one length a row."""
        if self.scaling is None:
            return theta(self.dim, self.base, device)
        return self.scaling.frequencies(self.dim, self.base, length, device)

    def plan(
        self,
        positions: PositionsArgument | Positions,
        n: int,
        m: int,
        *,
        causal: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Plan:
        """Angles for n queries and m keys, in as few segments as the scaling law allows.

        A model computes this once a forward pass and hands it to every layer in place of the rotary.
        """
        places = positions if isinstance(positions, Positions) else resolve(positions, n, m, torch.device(device))
        return tuple(
            self._segment(places, start, stop, length, member, causal, dtype)
            for start, stop, length, member in self.runs(places)
        )

    def runs(self, places: Positions) -> Iterator[Run]:
        """Split the queries into runs of equal frequencies."""
        law, n = self.scaling, places.n
        if not isinstance(law, DynamicNTK):
            yield Run(0, n, None)
        elif law.mode == "per_request":
            known = places.first is not None
            yield Run(0, n, places.first + places.m if known else places.query.amax(-1) + 1)  # type: ignore[operator]
        elif places.first is not None:
            begin, start = places.first + places.m - n, 0
            while start < n:
                length = law.bucket(begin + start)
                stop = min(n, length - begin)
                yield Run(start, stop, length)
                start = stop
        elif n == 1:
            yield Run(0, 1, law.buckets(places.query[:, 0]))
        else:
            require(
                not torch.compiler.is_compiling(),
                "per_query dynamic NTK cannot be compiled with padding or position_ids for more than one query; "
                "compile without them, or use mode 'per_request'",
            )
            lengths = law.buckets(places.query)
            for length in lengths.unique().tolist():
                member = lengths == length
                columns = member.any(0).nonzero()
                start, stop = int(columns[0]), int(columns[-1]) + 1
                part = member[:, start:stop]
                yield Run(start, stop, length, None if part.all() else part)

    def _segment(
        self,
        places: Positions,
        start: int,
        stop: int,
        length: int | Tensor | None,
        member: Tensor | None,
        causal: bool,
        dtype: torch.dtype,
    ) -> Segment[Angles]:
        offset, keys = places.m - places.n, places.seen(stop, causal=causal)
        frequencies = self.frequencies(length, places.key.device)
        key = table(places.key[:, :keys], frequencies, self.factor, dtype)
        if places.aligned:
            lo, hi = offset + start, offset + stop
            query = Angles(key.both[:, :, lo:hi])
        else:
            query = table(places.query[:, start:stop], frequencies, self.factor, dtype)
        return Segment(start, stop, keys, query, key, member)


def table(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Angles:
    """factor·cos(nθ_j), factor·sin(nθ_j) for positions (b|1, n) and frequencies (d/2) or (b, d/2)."""
    angles = positions[:, None, :, None].to(frequencies.dtype) * (
        frequencies if frequencies.ndim == 1 else frequencies[:, None, None, :]
    )
    return Angles((torch.stack((angles.cos(), angles.sin()), dim=-2) * factor).to(working_dtype(dtype)))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Angles, squares and products are never held in less than float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """f(x, n) of Eq. 1 on pairs (j, j + d/2): (b, h, n, d) → (b, h, n, d), in x's dtype.

    >>> quarter = Angles(torch.tensor([0.0, 1.0]).view(1, 1, 1, 2, 1))
    >>> rotate(torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), quarter).flatten().tolist()
    [0.0, 1.0]
    """
    a, b = x.to(angles.cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * angles.cos - b * angles.sin, a * angles.sin + b * angles.cos), dim=-1).to(x.dtype)
