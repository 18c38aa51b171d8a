"""The scaling laws an analysis compares, and how much wider each makes the zone of damped tokens (App. D.2)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops.rotary import NTK, DynamicNTK, Linear, Rotary, Scaling, YaRN

ROPE_TYPES = {"pi": "linear", "ntk": "ntk", "dynamic": "dynamic", "yarn": "yarn"}
"""Our short names for the laws, and transformers' names for them. "none" is the model as it was loaded."""
LAWS = ("none", *ROPE_TYPES)


def scaled(rotary: Rotary, law: str, factor: float, train_length: int) -> Rotary:
    """The rotary under a law; "none" leaves it as it is.

    >>> scaled(Rotary(4), "pi", 2.0, 64).frequencies()
    tensor([0.5000, 0.0050], dtype=torch.float64)
    """
    made: dict[str, Scaling] = {
        "pi": Linear(factor),
        "ntk": NTK(factor),
        "dynamic": DynamicNTK(factor, train_length),
        "yarn": YaRN(factor, train_length),
    }
    return rotary if law == "none" else Rotary(rotary.dim, rotary.base, made[law])


def frequencies_at(rotary: Rotary, length: int) -> Tensor:
    """θ_j for the last token of a text of this length: (d/2) float64; only dynamic laws look at the length."""
    law = rotary.scaling
    if not isinstance(law, DynamicNTK):
        return rotary.frequencies()
    return rotary.frequencies(law.bucket(length - 1) if law.mode == "per_query" else length)


def widening(theta: Tensor, scaled_theta: Tensor) -> Tensor:
    """How many times more tokens the zone of each pair holds: 1 without scaling, k for PI, λ^(2j/d) for NTK.

    >>> plain = Rotary(8)
    >>> widening(plain.frequencies(), scaled(plain, "pi", 4.0, 64).frequencies()).tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    return theta / scaled_theta


@contextmanager
def under(model: FarspanForCausalLM, law: str, factor: float) -> Iterator[None]:
    """The model with its angles under a law; what it was loaded with is put back afterwards."""
    if law == "none":
        yield
        return
    kept: dict[str, Any] = dict(model.config.rope_parameters or {})
    model.set_rope_parameters(rope_type=ROPE_TYPES[law], factor=factor)
    try:
        yield
    finally:
        model.set_rope_parameters(**{"rope_type": "default", **kept})


def sample(low: int, high: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` positions (or all, where there are no more) in low … high-1, rising, one from each equal part.

    >>> sample(0, 4, 9, torch.Generator()).tolist()
    [0, 1, 2, 3]
    """
    require(high > low, f"positions must not be empty, got {low} … {high - 1}; use a longer text")
    if high - low <= count:
        return torch.arange(low, high)
    edges = low + (high - low) * torch.arange(count + 1, dtype=torch.float64) / count
    places = edges[:-1] + torch.rand(count, generator=generator, dtype=torch.float64) * edges.diff()
    return places.long().unique()
