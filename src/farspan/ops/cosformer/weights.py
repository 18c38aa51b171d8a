"""What linear attention needs to know about a weight: how it falls with distance, and which features carry it.

Every weight here is Σ_f a_f t_f κ_f(Δ) for non-negative features a of the query and t of the key, with

    κ_f(Δ) = e^{-λ|Δ|} · (still + wave · cos ω_f Δ)

once for the numerator and once for the denominator. cos ω(i-j) splits into cos·cos + sin·sin, so κ needs one, two or
three features for each f, and past keys are two running sums: Σ φ(k)⊗v and Σ ψ(k).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.ops.rotary import working_dtype

EPSILON = {torch.float16: 2.0**-10, torch.bfloat16: 1e-6, torch.float32: 1e-6, torch.float64: 1e-12}
"""The least denominator. Gradients grow as its inverse, and 1/1e-6 has no float16."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "elu": lambda x: F.elu(x) + 1.0}
BEYOND = ("raise", "decoupled", "raised-cosine", "decay")
"""What a weight does past distance M; formulas in docs/math.md."""
FLOOR = 2.0**-16
"""δ, the least weight of the raised cosine: at distance 2M its two parts cancel to 2^-24 in float32, and a quotient of
such remainders has no bound."""


@dataclass(frozen=True)
class Shape:
    """still + wave·cos ωΔ."""

    still: float
    wave: float


@dataclass(frozen=True)
class Kernel:
    """κ, and the maps from what the caller gives to features a, t ≥ 0."""

    name: str
    """All that a state depends on, in words: a state continues only under the same name."""
    frequency: float | Tensor
    """ω, one for all features or (f)."""
    numerator: Shape
    denominator: Shape
    query_map: Callable[[Tensor], Tensor]
    key_map: Callable[[Tensor], Tensor]
    decay: float = 0.0
    """λ"""
    period: float | None = None
    """Where all angles come round: positions are reduced by it first, so that they are exact however far the text."""

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of ω·position for (rows, n) float64: (rows, 1, n, 1 | f), rounded only at the end."""
        if self.period is not None:
            positions = positions.remainder(self.period)
        phase = positions[:, None, :, None] * self.frequency
        return phase.cos().to(dtype), phase.sin().to(dtype)

    def query(self, q: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """φ(q) and ψ(q), with the weights of `still` and `wave` on this side."""
        a = self.query_map(q.to(working_dtype(q.dtype)))
        return self._both(lambda shape: _lift(a, angles, shape))

    def key(self, k: Tensor, keep: Tensor | None, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """φ(k) and ψ(k); nothing of a key that is not kept (rows, n)."""
        k = k.to(working_dtype(k.dtype))
        if keep is None:
            t = self.key_map(k)
        else:  # before the activation, whose slope at NaN no zero can undo; and after, as elu + 1 of zero is one
            hidden = ~keep[:, None, :, None]
            t = self.key_map(k.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0)
        return self._both(lambda shape: _lift(t, angles, Shape(float(shape.still != 0), float(shape.wave != 0))))

    def _both(self, lift: Callable[[Shape], Tensor]) -> tuple[Tensor, Tensor]:
        phi = lift(self.numerator)
        return phi, phi if self.shared else lift(self.denominator)

    @property
    def shared(self) -> bool:
        """Numerator and denominator weigh alike: the output is a mean of values."""
        return self.numerator == self.denominator

    @staticmethod
    def width(shape: Shape, features: int) -> int:
        """How many numbers a lifted feature vector has."""
        return features * (int(shape.still != 0) + 2 * int(shape.wave != 0))


def _lift(x: Tensor, angles: tuple[Tensor, Tensor], shape: Shape) -> Tensor:
    cos, sin = angles
    parts = [x * shape.still] if shape.still else []
    if shape.wave:
        x = x if shape.wave == 1 else x * shape.wave
        parts += [x * cos, x * sin]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def cosformer_kernel(max_length: int, beyond: str, activation: str, reweight: bool) -> Kernel:
    """The weight of cosFormer, ω = π/2M; without re-weighting κ = 1."""
    raised = Shape(0.5 + FLOOR, 0.5)
    shapes = {
        "raise": (Shape(0, 1), Shape(0, 1)),
        "decoupled": (Shape(0, 1), Shape(1, 0)),
        "raised-cosine": (raised, raised),
        "decay": (raised, raised),
    }
    numerator, denominator = shapes[beyond] if reweight else (Shape(1, 0), Shape(1, 0))
    act = ACTIVATIONS[activation]
    return Kernel(
        name=f"cosformer, M = {max_length}, beyond {beyond}, {activation}" if reweight else f"linear, {activation}",
        frequency=math.pi / (2 * max_length),
        numerator=numerator,
        denominator=denominator,
        query_map=act,
        key_map=act,
        decay=1.0 / max_length if reweight and beyond == "decay" else 0.0,
        period=4.0 * max_length,
    )
