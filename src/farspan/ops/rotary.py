"""Rotary angles: frequencies, the methods that scale them for longer sequences, and the rotation (CoCA paper, Eq. 1).

Angles are computed in float64 and only their cosines and sines are rounded, to float32 or wider: at position 100,000 a
float32 angle is wrong by 0.004 radians.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.device import working_dtype

if TYPE_CHECKING:
    from farspan.ops.masking import AttentionMask

Device = torch.device | str | None
Length = int | Tensor | None
"""The sequence length that sets dynamic frequencies: for all rows, or (b)."""


def theta(dim: int, base: float | Tensor, device: Device = None) -> Tensor:
    """Compute θ_j = base^(-2j/d), j = 0 … d/2-1, in float64: (d/2), or (b, d/2) for one base per row."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / -dim
    return base**exponents if isinstance(base, float | int) else base[..., None] ** exponents


@dataclass(frozen=True)
class Scaling(ABC):
    """A method that changes rotary frequencies for sequences up to `factor` times as long."""

    factor: float

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.factor) and self.factor >= 1,
            f"scaling factor must be at least 1, got {self.factor}; it is the new length divided by the old",
        )
        length = getattr(self, "train_length", 1)
        require(length >= 1, f"train_length must be at least 1, got {length}; give the length of training")

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines; scores are multiplied by its square (YaRN's temperature)."""
        return 1.0

    @abstractmethod
    def frequencies(self, dim: int, base: float, length: Length, device: Device = None) -> Tensor:
        """Compute the frequencies (d/2) in float64; `length` matters to dynamic methods only."""


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: n → n/k.

    >>> Linear(2).frequencies(2, 10_000.0, None).item()
    0.5
    """

    def frequencies(self, dim: int, base: float, length: Length, device: Device = None) -> Tensor:
        return theta(dim, base, device) / self.factor


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware scaling: base → base·k^(d/(d-2)). The lowest frequency is divided by k, the highest stays.

    >>> theta(8, 10_000.0) / NTK(4).frequencies(8, 10_000.0, None)
    tensor([1.0000, 1.5874, 2.5198, 4.0000], dtype=torch.float64)
    """

    def frequencies(self, dim: int, base: float, length: Length, device: Device = None) -> Tensor:
        return theta(dim, base * self.factor ** _ntk_exponent(dim), device)


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """base → base·(s·L/L₀ - (s-1))^(d/(d-2)) once a length L exceeds the training length L₀.

    ``per_request``: L is the length of the whole call, as in the paper. Under a cache the base must stay fixed for the
    request (:meth:`Rotary.at_length`), or earlier tokens keep keys made with a smaller base.

    ``per_query``: L is the query's own position, rounded up to the next L₀·2^k. A token's result then depends on
    nothing that comes after it: prefill, chunked prefill and decoding agree, whatever the rest of the batch.

    >>> DynamicNTK(4, train_length=512).bucket(511), DynamicNTK(4, train_length=512).bucket(512)
    (512, 1024)
    """

    train_length: int
    mode: str = "per_query"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("mode", self.mode, ("per_query", "per_request"))

    def bucket(self, position: int) -> int:
        """Return the smallest L₀·2^k beyond a position: the length that sets its query's frequencies."""
        return self.train_length << max(position // self.train_length, 0).bit_length()

    def buckets(self, positions: Tensor) -> Tensor:
        """Apply :meth:`bucket` to a tensor of positions, without leaving the device."""
        ladder = self.train_length * 2 ** torch.arange(31, device=positions.device)
        return self.train_length * 2 ** torch.bucketize(positions.contiguous(), ladder, right=True)

    def base_at(self, length: int | Tensor, dim: int, base: float) -> Any:
        """Compute the base for a length, or a tensor of bases for a tensor of lengths."""
        first = self.train_length
        longer = length.double().clamp(min=first) if isinstance(length, Tensor) else max(length, first)
        return base * (self.factor * longer / first - (self.factor - 1)) ** _ntk_exponent(dim)

    def frequencies(self, dim: int, base: float, length: Length, device: Device = None) -> Tensor:
        return theta(dim, base if length is None else self.base_at(length, dim, base), device)


@dataclass(frozen=True)
class YaRN(Scaling):
    """Interpolate slow pairs, keep fast ones, blend between, and scale the scores (Peng et al. 2023).

    A pair is fast if it makes more than `beta_fast` rotations within the training length, slow below `beta_slow`.

    >>> yarn = YaRN(4, train_length=512)
    >>> theta(8, 10_000.0) / yarn.frequencies(8, 10_000.0, None), round(yarn.attention_factor, 4)
    (tensor([1.0000, 1.6000, 4.0000, 4.0000], dtype=torch.float64), 1.1386)
    """

    train_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    temperature: float | None = None
    """Factor of cosines and sines; None is the published 0.1·ln(factor) + 1."""
    truncate: bool = True
    """Round the borders of the blend to whole pairs, as the published code does."""

    @property
    def attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.temperature is None else self.temperature

    def frequencies(self, dim: int, base: float, length: Length, device: Device = None) -> Tensor:
        def pair_with(turns: float) -> float:
            return dim * math.log(self.train_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64, device=device)
        slow = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        plain = theta(dim, base, device)
        return plain * (1 - slow) + plain / self.factor * slow


@dataclass(frozen=True)
class Llama3(Scaling):
    """Divide slow pairs by the factor, keep fast ones, blend between by the number of rotations (Llama 3.1).

    A pair is fast if it makes more than `high_rotations` rotations in the training length, slow below `low_rotations`.
    YaRN blends by the index of the pair and also scales the scores; this does neither.

    >>> theta(8, 1_000.0) / Llama3(4, train_length=64).frequencies(8, 1_000.0, None)
    tensor([1.0000, 2.2083, 4.0000, 4.0000], dtype=torch.float64)
    """

    train_length: int
    low_rotations: float = 1.0
    high_rotations: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.low_rotations < self.high_rotations,
            f"low_freq_factor must lie between 0 and {self.high_rotations}, got {self.low_rotations}; "
            "Llama 3.1 uses 1 and 4",
        )

    def frequencies(self, dim: int, base: float, length: Length, device: Device = None) -> Tensor:
        plain = theta(dim, base, device)
        turns = self.train_length * plain / (2 * math.pi)
        fast = ((turns - self.low_rotations) / (self.high_rotations - self.low_rotations)).clamp(0, 1)
        return plain * fast + plain / self.factor * (1 - fast)


def _ntk_exponent(dim: int) -> float:
    require(dim > 2, f"NTK scaling needs at least two rotary pairs, got head_dim {dim}; choose head_dim ≥ 4")
    return dim / (dim - 2)


def log_length(count: Tensor, train_length: int) -> Tensor:
    """Compute the length temperature of a sequence's n-th token: ln n / ln L₀ past the training length L₀, else 1.

    The more keys, the flatter the softmax over scores of one size. Multiplying scores by this factor brings the
    entropy of the softmax nearer to that of training.

    >>> log_length(torch.tensor([64, 512, 512**2]), 512)
    tensor([1., 1., 2.], dtype=torch.float64)
    """
    require(train_length > 1, f"train_length must be at least 2 for log_length, got {train_length}; ln 1 is 0")
    return (count.double().clamp(min=train_length).log() / math.log(train_length)).clamp(min=1.0)


def step_length(count: Tensor, train_length: int) -> Tensor:
    """Compute another temperature of the n-th token: 1 + 0.1·ln(1 + ⌊(n-1) / L₀⌋), as of Llama 4.

    >>> step_length(torch.tensor([64, 512, 513]), 512)
    tensor([1.0000, 1.0000, 1.0693], dtype=torch.float64)
    """
    return 1 + 0.1 * (1 + (count - 1).clamp(min=0) // train_length).double().log()


def odd_width(width: int) -> str:
    """Return the error message for a head that does not split into rotary pairs."""
    return f"head_dim must be even to form rotary pairs, got {width}; choose hidden_size / num_heads even"


@dataclass(frozen=True)
class Rotary:
    """Frequencies θ_j = base^(-2j/d), changed by an optional scaling method.

    >>> Rotary(4).frequencies()
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """

    dim: int
    base: float = 10_000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        require(self.dim >= 2 and self.dim % 2 == 0, lambda: odd_width(self.dim))
        require(self.base > 1, lambda: f"base must be greater than 1, got {self.base}; the paper uses 10000")

    @property
    def is_dynamic(self) -> bool:
        """Whether frequencies change as a sequence grows; rotated keys must not be cached then."""
        return isinstance(self.scaling, DynamicNTK)

    @property
    def follows_query(self) -> bool:
        """Whether frequencies depend on the query's position (`per_query` dynamic NTK)."""
        return isinstance(self.scaling, DynamicNTK) and self.scaling.mode == "per_query"

    @property
    def follows_length(self) -> bool:
        """Whether frequencies depend on the length of the request (`per_request` dynamic NTK)."""
        return isinstance(self.scaling, DynamicNTK) and self.scaling.mode == "per_request"

    @property
    def factor(self) -> float:
        """Factor of cosines and sines (YaRN's temperature)."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def at_length(self, length: int) -> "Rotary":
        """Return this rotary with the fixed frequencies that dynamic NTK uses at a length."""
        if not isinstance(self.scaling, DynamicNTK):
            return self
        return Rotary(self.dim, self.scaling.base_at(length, self.dim, self.base))

    def frequencies(self, length: Length = None, device: Device = None) -> Tensor:
        """Compute θ_j in float64: (d/2), or (b, d/2) if dynamic NTK is given one length per row."""
        if self.scaling is None:
            return theta(self.dim, self.base, device)
        return self.scaling.frequencies(self.dim, self.base, length, device)


class Angles:
    """Angles position·θ_j of a mask's queries and keys, computed when first asked for.

    Torch code takes tables of cosines and sines. Kernels take 64-bit steps and compute the angles themselves.
    """

    def __init__(self, rotary: Rotary, mask: "AttentionMask") -> None:
        # Not the mask itself: the two would keep each other, and their tensors, until the garbage collector runs.
        self.rotary, self.device = rotary, mask.device
        self.n, self.m, self.offset, self.aligned = mask.n, mask.m, mask.offset, mask.aligned
        self.first, self.positions = mask.first, mask.positions
        self.length = _governing_length(rotary.scaling, mask) if isinstance(rotary.scaling, DynamicNTK) else None
        self.frequencies = rotary.frequencies(self.length, self.device)
        """θ_j in float64: (d/2), or (b, d/2)."""
        self._made: dict[Hashable, Any] = {}

    @property
    def steps(self) -> Tensor:
        """θ_j as int64 fractions of a full circle, (1|b, d/2); see :func:`fixed_point`."""
        if "steps" not in self._made:
            self._made["steps"] = fixed_point(self.frequencies)
        return self._made["steps"]

    def key(self, dtype: torch.dtype) -> Tensor:
        """Return cosines and sines of the keys, (b|1, 1, m, 2, d/2), in the working dtype of `dtype`."""
        if ("key", dtype) not in self._made:
            if self.positions is None:
                first = self.first or 0
                positions = torch.arange(first, first + self.m, device=self.device)[None]
            else:
                positions = self.positions[1]
            self._made["key", dtype] = cos_sin(positions, self.frequencies, self.rotary.factor, dtype)
        return self._made["key", dtype]

    def query(self, dtype: torch.dtype) -> Tensor:
        """Return cosines and sines of the queries, (b|1, 1, n, 2, d/2)."""
        if self.aligned:
            key = self.key(dtype)
            return key if self.n == self.m else key[:, :, self.offset : self.offset + self.n]
        if ("query", dtype) not in self._made:
            assert self.positions is not None
            table = cos_sin(self.positions[0], self.frequencies, self.rotary.factor, dtype)
            self._made["query", dtype] = table
        return self._made["query", dtype]

    def rotate_keys(self, k: Tensor) -> Tensor:
        """Rotate k (b, g, m, d) by the positions of the keys."""
        return self._rotate(k, "key", self.key(k.dtype))

    def rotate_queries(self, q: Tensor) -> Tensor:
        """Rotate q (b, h, n, d) by the positions of the queries."""
        return self._rotate(q, "key" if self.aligned and self.n == self.m else "query", self.query(q.dtype))

    def rotate_new(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (b, h, n, d) and k (b, g, n, d) of the same tokens.

        On a GPU a step of one token costs its number of kernels: where all rows have one position, q and k share them.
        """
        if k.is_cuda and self.n == 1 and self.key(k.dtype).shape[0] == 1:
            return self.rotate_together(q, k)
        return self.rotate_keys(q), self.rotate_keys(k)

    def rotate_together(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (b, h, 1, d) and k (b, g, 1, d) by one position; both are contiguous, as a cache copies fastest."""
        heads = torch.cat((q.flatten(0, 1), k.flatten(0, 1)))[None]
        q_, k_ = self.rotate_keys(heads)[0].split((q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]))
        return q_.view(q.shape), k_.view(k.shape)

    def _rotate(self, x: Tensor, which: str, table: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # only views, or the graph would compute the rest per head
            return rotate(x, (table[..., 0, :], table[..., 1, :]))
        wide = ("rotation", which, x.dtype)
        if wide not in self._made:
            cos, sin = table.unbind(-2)
            self._made[wide] = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return rotate(x, self._made[wide])


def _governing_length(scaling: DynamicNTK, mask: "AttentionMask") -> int | Tensor:
    """Return the length that sets the frequencies of all queries of a mask, for all rows or (b)."""
    if scaling.mode == "per_request" and mask.rotary_length is not None:
        return mask.rotary_length
    if scaling.mode == "per_request":
        return mask.query_positions.amax(-1) + 1 if mask.first is None else mask.first + mask.offset + mask.n
    if mask.first is None:
        return scaling.buckets(mask.query_positions[:, -1])
    return scaling.bucket(mask.first + mask.offset + mask.n - 1)


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Compute factor·(cos, sin) of positions (b|1, n) times frequencies (d/2) or (b, d/2): (b|1, 1, n, 2, d/2)."""
    if frequencies.ndim > 1:
        frequencies = frequencies[:, None, None, :]
    angles = positions[:, None, :, None].to(frequencies.dtype) * frequencies
    return (torch.stack((angles.cos(), angles.sin()), dim=-2) * factor).to(working_dtype(dtype))


def fixed_point(frequencies: Tensor) -> Tensor:
    """Convert θ_j (…, d/2) in float64 to θ_j/2π in units of 2⁻⁶⁴ of a full circle, int64; (d/2) becomes (1, d/2).

    A product of position and step wraps at whole circles by itself. What is left is the reduced angle, exact at any
    position.

    >>> quarter = fixed_point(torch.tensor([math.pi / 2], dtype=torch.float64))
    >>> (quarter * 5).item() / 2**64  # five quarter circles are one quarter
    0.25
    """
    turns = frequencies / (2 * math.pi)
    turns = turns - turns.round()
    return (turns * 2.0**64).to(torch.int64).reshape(-1, frequencies.shape[-1])


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (j, j + d/2) of x (b, h, n, d), Eq. 1.

    The tables are cos and sin (…, d/2), or (cos, cos) and (-sin, sin) (…, d), which take a third of the operations.

    >>> quarter = torch.zeros(1), torch.ones(1)
    >>> rotate(torch.tensor([1.0, 0.0]), quarter).tolist()
    [0.0, 1.0]
    >>> rotate(torch.tensor([1.0, 0.0]), (torch.zeros(2), torch.tensor([-1.0, 1.0]))).tolist()
    [0.0, 1.0]
    """
    cos, sin = tables
    if cos.shape[-1] == x.shape[-1]:
        out = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
    else:
        a, b = x.to(cos.dtype).chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return out if out.dtype == x.dtype else out.to(x.dtype)
