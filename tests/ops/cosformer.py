"""Helpers of the cosFormer tests: inputs, streams of calls, and what results are measured against."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.ops import cosformer_attention, cosformer_attention_reference
from farspan.ops.cosformer import BEYOND
from tests.helpers import softmax_inputs
from tests.ops.kernels import DEVICE

PAST_M = [beyond for beyond in BEYOND if beyond != "raise"]


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short text has several, of more than one block each."""
    monkeypatch.setattr("farspan.ops.triton.linear.segment_of", lambda q, v: 64)


def inputs(n: int, m: int | None = None, *, dtype: torch.dtype = torch.float32, **shape: int) -> list[Tensor]:
    return [x.detach().to(DEVICE, dtype).requires_grad_() for x in softmax_inputs(n, m, **{"h": 2, "g": 1, **shape})]


def in_pieces(
    inputs: Sequence[Tensor], pieces: int | list[int], op: Callable[..., Any] = cosformer_attention, **options: Any
) -> tuple[Tensor, Any]:
    """Return the outputs of a stream of calls, and the last state. All states must take the same bytes."""
    state, parts, held = None, [], set()
    mask = options.pop("padding_mask", None)
    masks_ = [None] * inputs[0].shape[2] if mask is None else mask.split(pieces, dim=1)
    for q, k, v, keep in zip(*(x.split(pieces, dim=2) for x in inputs), masks_, strict=False):
        out, state = op(q, k, v, state=state, return_state=True, padding_mask=keep, **options)
        parts.append(out)
        held.add(state.nbytes)
    assert len(held) == 1
    return torch.cat(parts, dim=2), state


@torch.no_grad()
def meeting(leaves: list[Tensor]) -> list[Tensor]:
    """Queries that all meet their keys: a gradient is divided by the sum of weights, and that must have digits."""
    for x in leaves[:2]:
        x += 1.0
    return leaves


def saved_bytes(attend: Callable[[], Tensor]) -> int:
    """Count the bytes that autograd keeps of a call for its backward pass."""
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attend()
    return sum(saved.values())


def with_gradients(attend: Any, leaves: list[Tensor], weights: Tensor, **options: Any) -> list[Tensor]:
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


def compare(leaves: list[Tensor], **options: Any) -> float:
    """The kernels' largest relative difference from the definition in float64, with gradients."""
    options = {"max_length": 150, **options}
    wide = [x.detach().double().requires_grad_() for x in leaves]
    weights = torch.randn(*leaves[0].shape[:3], leaves[2].shape[-1], dtype=torch.float64, device=DEVICE)
    pairs = zip(
        with_gradients(cosformer_attention, leaves, weights, backend="triton", **options),
        with_gradients(cosformer_attention_reference, wide, weights, **options),
        strict=True,
    )
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


def eager(q: Tensor, k: Tensor, v: Tensor, max_length: int) -> Tensor:
    """What anyone would write in the same dtype: features, products and weights in that dtype."""
    angle = math.pi * torch.arange(q.shape[2], device=q.device) / (2 * max_length)
    waves = [x[:, None].to(q.dtype) for x in (angle.cos(), angle.sin())]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q_, k_ = (torch.cat([x.relu() * wave for wave in waves], dim=-1) for x in (q, k))
    weights = (q_ @ k_.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-3)


def check_against_eager(n: int, dtype: torch.dtype, backend: str = "triton", **shape: int) -> None:
    """Errors of values and gradients at most twice those of eager in the same dtype; rounding is always allowed."""
    leaves = meeting(inputs(n, dtype=dtype, **shape))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    weights = torch.randn(*leaves[0].shape[:3], leaves[2].shape[-1], device=DEVICE).to(dtype)
    options: dict[str, Any] = {"max_length": n}
    truth = with_gradients(cosformer_attention_reference, wide, weights, **options)
    ours = with_gradients(cosformer_attention, leaves, weights, backend=backend, **options)
    plain = with_gradients(eager, leaves, weights, **options)
    for name, a, b, want in zip(("out", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        units = 2 if dtype == torch.float32 else 1  # three products of 11 bits each leave out the fourth
        rounding = units * float(want.abs().max()) * torch.finfo(dtype).eps
        mine, theirs = ((x.double() - want).abs() for x in (a, b))
        assert a.isfinite().all(), name
        assert mine.max() <= 2 * theirs.max() + rounding, name
        assert mine.mean() <= 2 * theirs.mean() + rounding / 8, name
