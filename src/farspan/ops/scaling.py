"""The laws that stretch rotary frequencies over a longer text (PI, NTK, dynamic NTK, YaRN, Llama 3)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.errors import require, require_choice


def theta(dim: int, base: float | Tensor, device: torch.device | str | None = None) -> Tensor:
    """θ_j = base^(-2j/d), j = 0 … d/2-1, in float64: (d/2), or (b, d/2) for one base a row."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / -dim
    return base**exponents if isinstance(base, float | int) else base[..., None] ** exponents


def log_length(count: Tensor, train_length: int) -> Tensor:
    """What the scores of a text's n-th token are multiplied by: ln n / ln L₀ past the training length L₀, else 1.

    The more keys, the flatter the softmax over scores of one size; this brings its entropy nearer to that of training.

    >>> log_length(torch.tensor([64, 512, 512**2]), 512)
    tensor([1., 1., 2.], dtype=torch.float64)
    """
    require(train_length > 1, f"train_length must be at least 2 for log_length, got {train_length}; ln 1 is no measure")
    return (count.double().clamp(min=train_length).log() / math.log(train_length)).clamp(min=1.0)


class Scaling(ABC):
    """A law: frequencies from width, base and (for dynamic laws) the length that governs them."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin, so the scores by its square (YaRN's temperature)."""
        return 1.0

    @abstractmethod
    def frequencies(
        self, dim: int, base: float, length: int | Tensor | None, device: torch.device | str | None = None
    ) -> Tensor: ...


def _check_factor(factor: float) -> None:
    require(
        math.isfinite(factor) and factor >= 1,
        f"scaling factor must be at least 1, got {factor}; it is the new length divided by the old",
    )


def _check_train_length(train_length: int) -> None:
    require(train_length >= 1, f"train_length must be at least 1, got {train_length}; give the length of training")


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: n → n/k.

    >>> Linear(2).frequencies(2, 10_000.0, None).item()
    0.5
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(
        self, dim: int, base: float, length: int | Tensor | None, device: torch.device | str | None = None
    ) -> Tensor:
        return theta(dim, base, device) / self.factor


@dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware: base → base·k^(d/(d-2)), so the lowest frequency is stretched k times and the highest not at all.

    >>> theta(8, 10_000.0) / NTK(4).frequencies(8, 10_000.0, None)
    tensor([1.0000, 1.5874, 2.5198, 4.0000], dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(
        self, dim: int, base: float, length: int | Tensor | None, device: torch.device | str | None = None
    ) -> Tensor:
        return theta(dim, base * self.factor ** _ntk_exponent(dim), device)


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """base → base·(s·L/L₀ - (s-1))^(d/(d-2)) once the governing length L exceeds the training length L₀.

    ``per_request``: L is the length of the whole call, as the paper runs it. Under a cache the base must be held
    fixed for the request (:meth:`Rotary.at_length`), or earlier tokens keep the marks of a smaller base.

    ``per_query``: L is the query's own position, rounded up to the next L₀·2^k. The result for a token then depends
    on nothing that comes after it: prefill, chunks and decoding agree, whatever the batch-mates and the history.

    >>> DynamicNTK(4, train_length=512).bucket(511), DynamicNTK(4, train_length=512).bucket(512)
    (512, 1024)
    """

    factor: float
    train_length: int
    mode: str = "per_query"

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_train_length(self.train_length)
        require_choice("mode", self.mode, ("per_query", "per_request"))

    def bucket(self, position: int) -> int:
        """The length that governs a query at this position: the smallest L₀·2^k beyond it."""
        return self.train_length << max(position // self.train_length, 0).bit_length()

    def buckets(self, positions: Tensor) -> Tensor:
        """:meth:`bucket` for a tensor of positions, without leaving the device."""
        ladder = self.train_length * 2 ** torch.arange(31, device=positions.device)
        return self.train_length * 2 ** torch.bucketize(positions.contiguous(), ladder, right=True)

    def base_at(self, length: int, dim: int, base: float) -> float:
        """The base for a governing length."""
        ratio = self.factor * max(length, self.train_length) / self.train_length - (self.factor - 1)
        return base * ratio ** _ntk_exponent(dim)

    def frequencies(
        self, dim: int, base: float, length: int | Tensor | None, device: torch.device | str | None = None
    ) -> Tensor:
        if length is None:
            return theta(dim, base, device)
        if isinstance(length, int):
            return theta(dim, self.base_at(length, dim, base), device)
        ratio = self.factor * length.double().clamp(min=self.train_length) / self.train_length - (self.factor - 1)
        return theta(dim, base * ratio ** _ntk_exponent(dim), device)


@dataclass(frozen=True)
class YaRN(Scaling):
    """Interpolate slow pairs, leave fast ones, blend between; and cool the softmax (Peng et al. 2023).

    A pair is fast when it turns more than `beta_fast` times within the training length, slow below `beta_slow`.

    >>> law = YaRN(4, train_length=512)
    >>> theta(8, 10_000.0) / law.frequencies(8, 10_000.0, None), round(law.attention_factor, 4)
    (tensor([1.0000, 1.6000, 4.0000, 4.0000], dtype=torch.float64), 1.1386)
    """

    factor: float
    train_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    temperature: float | None = None
    """Multiplies cos and sin; None is the published 0.1·ln(factor) + 1."""
    truncate: bool = True
    """Round the borders of the blend to whole pairs, as the published code does."""

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_train_length(self.train_length)

    @property
    def attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.temperature is None else self.temperature

    def frequencies(
        self, dim: int, base: float, length: int | Tensor | None, device: torch.device | str | None = None
    ) -> Tensor:
        def pair_that_turns(times: float) -> float:
            return dim * math.log(self.train_length / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64, device=device)
        slow = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        plain = theta(dim, base, device)
        return plain * (1 - slow) + plain / self.factor * slow


@dataclass(frozen=True)
class Llama3(Scaling):
    """Divide slow pairs by the factor, leave fast ones, blend between by the number of turns (Llama 3.1).

    A pair is fast when it turns more than `high_turns` times within the training length, slow below `low_turns`.
    YaRN blends along the index of the pair and cools the softmax; this blends along the turns and does not.

    >>> theta(8, 1_000.0) / Llama3(4, train_length=64).frequencies(8, 1_000.0, None)
    tensor([1.0000, 2.2083, 4.0000, 4.0000], dtype=torch.float64)
    """

    factor: float
    train_length: int
    low_turns: float = 1.0
    high_turns: float = 4.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        _check_train_length(self.train_length)
        require(
            0 < self.low_turns < self.high_turns,
            f"low_freq_factor must lie between 0 and high_freq_factor = {self.high_turns}, got {self.low_turns}; "
            "Llama 3.1 uses 1 and 4",
        )

    def frequencies(
        self, dim: int, base: float, length: int | Tensor | None, device: torch.device | str | None = None
    ) -> Tensor:
        plain = theta(dim, base, device)
        turns = self.train_length * plain / (2 * math.pi)
        fast = ((turns - self.low_turns) / (self.high_turns - self.low_turns)).clamp(0, 1)
        return plain * fast + plain / self.factor * (1 - fast)


def _ntk_exponent(dim: int) -> float:
    require(dim > 2, f"NTK scaling needs at least two rotary pairs, got head_dim {dim}; choose head_dim ≥ 4")
    return dim / (dim - 2)
