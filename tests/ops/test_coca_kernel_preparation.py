"""The kernel that prepares CoCA's queries and keys: the features, their gradients, and one rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import DynamicNTK, Rotary, YaRN, coca_attention, coca_attention_reference, coca_features
from farspan.ops.coca import kernel_features
from farspan.ops.masking import make_mask
from farspan.ops.rotary import Angles
from tests.ops.kernels import DEVICE, FORMS, inputs, poison  # noqa: F401 (a fixture for every test here)


def angles_of(q: Tensor, t: Tensor, rotary: Rotary, positions: int | Tensor = 0) -> Angles:
    return make_mask(q.shape[2], t.shape[2], q.shape[0], q.device, positions=positions).angles(rotary)


def features(q: Tensor, t: Tensor, angles: Angles, form: str) -> tuple[Tensor, Tensor]:
    return coca_features(q, t, angles.query(q.dtype), angles.key(q.dtype), form=form)


@pytest.mark.parametrize(
    ("form", "n", "d"),
    [
        ("exact", 1, 64),
        ("slack", 63, 64),
        ("exact", 64, 64),
        ("exact", 65, 64),
        ("slack", 65, 64),
        ("slack", 129, 6),
        ("exact", 20, 128),
    ],
)
def test_preparation_equals_the_features_forward_and_backward(form: str, n: int, d: int) -> None:
    q, t, _ = inputs(n, n + 3, h=5, g=1, d=d)
    wide = [x.double().requires_grad_() for x in (q, t)]
    angles = angles_of(q, t, Rotary(d), 131_000)
    truth = features(*wide, angles, form)
    weights = [torch.randn_like(x) for x in truth]
    true_gradients = torch.autograd.grad(truth, wide, weights)
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        narrow = [x.to(dtype).requires_grad_() for x in (q, t)]
        out = kernel_features(*narrow, angles, form)
        gradients = torch.autograd.grad(out, narrow, [x.to(dtype) for x in weights])
        for got, want in zip((*out, *gradients), (*truth, *true_gradients), strict=True):
            # In bfloat16 the inputs themselves are rounded, and q̃ is quadratic in them.
            assert (got - want).abs().max() <= limit * (1 if dtype == torch.float32 else 3) * want.abs().max()


def test_preparation_rounds_once() -> None:
    """From the same bfloat16 inputs, the result is within half a unit of the float64 one."""
    q, t, _ = inputs(33, dtype=torch.bfloat16, d=16)
    angles = angles_of(q, t, Rotary(16))
    truth = features(q.double(), t.double(), angles, "exact")
    for got, want in zip(kernel_features(q, t, angles, "exact"), truth, strict=True):
        assert ((got - want).abs() <= want.abs() * 2**-8 * 1.001 + 1e-6).all()


@pytest.mark.parametrize("form", FORMS)
def test_preparation_takes_positions_and_frequencies_per_row(form: str) -> None:
    q, t, _ = inputs(11, 20, b=2, d=16)
    positions = (torch.arange(20) * 7 + torch.tensor([[0], [100_000]])).to(DEVICE)
    rotary = Rotary(16, scaling=DynamicNTK(4, 32, "per_request"))
    angles = angles_of(q, t, rotary, positions)
    wanted = features(q.double(), t.double(), angles, form)
    for a, b in zip(kernel_features(q, t, angles, form), wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("form", "scaling"),
    [("exact", None), ("slack", None), ("exact", DynamicNTK(4, 16)), ("slack", YaRN(4, 16))],
    ids=str,
)
def test_gradients_through_the_backend_equal_the_reference(form: str, scaling: Any) -> None:
    q, t, v = inputs(30, b=2, h=2, g=1, d=16)
    options: dict[str, Any] = {"rotary": Rotary(16, scaling=scaling), "form": form, "window": 20}
    leaves, wide = ([x.to(dtype).requires_grad_() for x in (q, t, v)] for dtype in (torch.float32, torch.float64))
    out, truth = coca_attention(*leaves, **options, backend="triton"), coca_attention_reference(*wide, **options)
    weights = torch.randn_like(out)
    gradients = (torch.autograd.grad(out, leaves, weights), torch.autograd.grad(truth, wide, weights.double()))
    assert (out - truth).abs().max() <= 1e-5
    for got, want in zip(*gradients, strict=True):
        assert (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
