"""Linear CoCA (experimental): exact CoCA's two non-negative factors as weights of a linear attention, not as logits."""

from functools import partial
from typing import Unpack

from torch import Tensor

from farspan.errors import require
from farspan.ops.cosformer import (
    CHUNKED,
    COSINE,
    ONE,
    REFERENCE,
    LinearCall,
    LinearOptions,
    LinearState,
    Weighting,
    check_linear_call,
)
from farspan.ops.dispatch import Table, operation, reference_twin
from farspan.ops.reference import linear_coca_weights
from farspan.ops.rotary import Rotary, odd_width


@operation(LinearOptions, Tensor | tuple[Tensor, LinearState])
def linear_coca_attention(
    q: Tensor, t: Tensor, v: Tensor, *, rotary: Rotary | None, **options: Unpack[LinearOptions]
) -> LinearCall:
    """Compute exact CoCA without the softmax: weights Σ_j ‖q_j‖² t_j cos(Δθ_j) over Σ_j ‖q_j‖² t_j. Experimental.

    This is a cosFormer with one frequency per pair. Fast pairs become negative within a few tokens, so the denominator
    has no cosine, and |o| ≤ max |v| at any length. YaRN's factor is a temperature of the softmax and is left out. The
    gradient of a key with almost no weight is ‖q_j‖²/ε; it may be infinite in float16, but not in bfloat16.

    Args:
        q: (b, h, n, d) queries before rotation.
        t: (b, g, m, d/2) coefficients ≥ 0, un-rotated, after their activation.
        v: (b, g, m, dv) values.
        rotary: the angles, with fixed frequencies; None for weights Σ_j ‖q_j‖² t_j, which give a mean of values.
        backend: "auto", "chunked" or "reference".

    The other arguments, and what is returned, are those of :func:`farspan.ops.cosformer_attention`.

    >>> import torch
    >>> q, t, v = torch.randn(1, 4, 6, 8), torch.rand(1, 2, 6, 4), torch.randn(1, 2, 6, 8)
    >>> linear_coca_attention(q, t, v, rotary=Rotary(8)).shape
    torch.Size([1, 4, 6, 8])
    """
    width, theta = q.shape[-1], None
    require(width % 2 == 0, lambda: odd_width(width))
    if rotary is not None:
        require(
            rotary.dim == width,
            lambda: f"rotary must have dim {width}, the width of q, got {rotary.dim}; build Rotary(head_dim)",
        )
        require(
            not rotary.is_dynamic,
            "rotary must have fixed frequencies, got dynamic NTK: sums cannot be rotated again; use NTK or Linear",
        )
        theta = rotary.frequencies(device=q.device)
    weighting = Weighting(
        name=("linear coca", rotary),
        definition=partial(linear_coca_weights, theta=theta),
        frequency=0.0 if theta is None else theta,
        numerator=ONE if theta is None else COSINE,
        denominator=ONE,
        query_map=_squares,
        key_map=lambda t: t,
    )
    return check_linear_call(LINEAR_COCA, q, t, v, weighting, **options)


def _squares(q: Tensor) -> Tensor:
    """Compute ‖q_j‖² of each pair (j, j + d/2)."""
    a, b = q.chunk(2, dim=-1)
    return a * a + b * b


LINEAR_COCA = Table(CHUNKED, REFERENCE, key_name="t")  # the kernels are for one frequency

linear_coca_attention_reference = reference_twin(linear_coca_attention)
