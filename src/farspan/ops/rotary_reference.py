"""Eq. 1 on complex numbers, one angle for every pair of query and key: the specification of the rotary tables."""

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.positions import Positions
from farspan.ops.rotary import Plan, Rotary, working_dtype
from farspan.ops.scaling import DynamicNTK


def turns(rotary: Rotary | Plan | None, places: Positions, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """e^{imθ} for each query (b|1, n, d/2) and e^{inθ} for each query *and* key (b|1, n, m, d/2).

    Keys have a query axis because θ may depend on the query (per_query dynamic NTK); usually it is only repeated.
    """
    work = torch.complex128 if working_dtype(dtype) == torch.float64 else torch.complex64
    theta, factor = torch.zeros(width // 2, dtype=torch.float64, device=places.device), 1.0
    if rotary is not None:
        require(isinstance(rotary, Rotary), "backend='reference' needs a Rotary, got a ready plan; pass what made it")
        assert isinstance(rotary, Rotary)
        theta = rotary.frequencies(governing_length(rotary, places), places.device)  # (d/2) or (b|1, n, d/2)
        factor = rotary.factor
    theta = theta.expand(places.query.shape[0], places.n, -1)
    query = places.query[:, :, None] * theta
    key = places.key[:, None, :, None] * theta[:, :, None, :]
    return (
        torch.polar(torch.full_like(query, factor), query).to(work),
        torch.polar(torch.full_like(key, factor), key).to(work),
    )


def governing_length(rotary: Rotary, places: Positions) -> Tensor | None:
    """The length that sets each query's frequencies (b|1, n), for a dynamic law."""
    if rotary.follows_query:
        assert isinstance(rotary.scaling, DynamicNTK)
        return rotary.scaling.buckets(places.query)
    if rotary.follows_length:
        return (places.query.amax(-1, keepdim=True) + 1).expand_as(places.query)
    return None


def pairs(x: Tensor) -> Tensor:
    """(…, d) real → (…, d/2) complex, pair j = (x_j, x_{j+d/2})."""
    return torch.complex(*x.to(working_dtype(x.dtype)).chunk(2, dim=-1))
