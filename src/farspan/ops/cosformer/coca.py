"""CoCA meets linear attention: the exact form's two non-negative factors as weights instead of logits. Experimental."""

from dataclasses import fields
from typing import Literal, overload

from torch import Tensor

from farspan.errors import require, require_choice
from farspan.ops.call import reference_twin
from farspan.ops.cosformer.reference import linear_coca_weights, seen_only, weigh
from farspan.ops.cosformer.run import BACKENDS, place, run, silenced
from farspan.ops.cosformer.state import LinearState
from farspan.ops.cosformer.weights import Kernel, Shape
from farspan.ops.positions import PositionsArgument
from farspan.ops.rotary import Rotary
from farspan.ops.softmax.reference import visible


@overload
def linear_coca_attention(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    causal: bool = ...,
    positions: PositionsArgument | str = ...,
    padding_mask: Tensor | None = ...,
    documents: Tensor | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def linear_coca_attention(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    causal: bool = ...,
    positions: PositionsArgument | str = ...,
    padding_mask: Tensor | None = ...,
    documents: Tensor | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, LinearState]: ...


def linear_coca_attention(
    q: Tensor,
    t: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None,
    causal: bool = True,
    positions: PositionsArgument | str = None,
    padding_mask: Tensor | None = None,
    documents: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """Exact CoCA without the softmax (experimental): weights Σ_j ‖q_j‖² t_j cos(Δθ_j) over Σ_j ‖q_j‖² t_j.

    A cosFormer with one frequency for each pair and features of width d. Fast pairs turn negative within a few
    tokens, so the denominator is left un-rotated, and |o| ≤ max |v| at any length. The factor by which YaRN lengthens
    its waves is a temperature of the softmax, and is left out. Gradients of a key with almost no weight are
    ‖q_j‖²/ε: in float16 they may be infinite, in bfloat16 not.

    Args:
        q: (b, h, n, d) queries before rotation.
        t: (b, g, m, d/2) coefficients ≥ 0, un-rotated, after their activation.
        v: (b, g, m, dv) values.
        rotary: the angles, under a fixed scaling law; None leaves them out (weights Σ_j ‖q_j‖² t_j, a mean of values).

    The other arguments, and what is returned, are those of :func:`farspan.ops.cosformer_attention`.

    >>> import torch
    >>> q, t, v = torch.randn(1, 4, 6, 8), torch.rand(1, 2, 6, 4), torch.randn(1, 2, 6, 8)
    >>> linear_coca_attention(q, t, v, rotary=Rotary(8)).shape
    torch.Size([1, 4, 6, 8])
    """
    require_choice("backend", backend, BACKENDS)
    _check_rotary(rotary, q.shape[-1])
    places = place(
        q,
        t,
        v,
        key_name="t",
        key_width=q.shape[-1] // 2,
        causal=causal,
        positions=positions,
        padding_mask=padding_mask,
        documents=documents,
        state=state,
        return_state=return_state,
        backend=backend,
    )
    theta = None if rotary is None else rotary.frequencies(device=q.device)
    if backend == "reference":
        distance = places.query[:, None, :, None] - places.key[:, None, None, :]
        mask = visible(places, causal=causal, window=None, padding_mask=padding_mask, documents=documents)
        weights = linear_coca_weights(q, seen_only(t, mask), distance, theta)
        return silenced(weigh(*weights, seen_only(v, mask), mask), places, padding_mask)
    kernel = Kernel(
        name=_name(rotary),
        frequency=0.0 if theta is None else theta,
        numerator=Shape(1, 0) if theta is None else Shape(0, 1),
        denominator=Shape(1, 0),
        query_map=_squares,
        key_map=lambda x: x,
    )
    out, after = run(
        kernel, q, t, v, places, causal=causal, padding_mask=padding_mask, documents=documents, state=state
    )
    if not return_state:
        return out
    assert after is not None
    return out, after


linear_coca_attention_reference = reference_twin(linear_coca_attention)


def _check_rotary(rotary: Rotary | None, width: int) -> None:
    if rotary is None:
        return
    require(
        rotary.dim == width,
        f"rotary must have dim {width}, the width of q, got {rotary.dim}; build Rotary(head_dim)",
    )
    require(
        not rotary.is_dynamic,
        "rotary must have fixed frequencies, got dynamic NTK: sums cannot be turned again; use NTK or Linear",
    )


def _name(rotary: Rotary | None) -> str:
    """The angles in words, spelt out: torch.compile cannot compare the text of a dataclass."""
    if rotary is None:
        return "linear coca without angles"
    law = rotary.scaling
    words = ["no scaling"]
    if law is not None:
        words = [type(law).__name__, *(str(getattr(law, field.name)) for field in fields(law))]  # type: ignore[arg-type]
    return f"linear coca, width {rotary.dim}, base {rotary.base}, {' '.join(words)}"


def _squares(q: Tensor) -> Tensor:
    """‖q_j‖² of each pair (j, j + d/2)."""
    a, b = q.chunk(2, dim=-1)
    return a * a + b * b
