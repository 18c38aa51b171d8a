"""CoCA's kernels as operators of torch: registered, compiled in one graph, refused with a reason."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

import farspan.ops.triton.coca_decode
import farspan.ops.triton.coca_features  # noqa: F401 (both make operators of torch)
from farspan.ops import Rotary, coca_attention, explain
from farspan.ops.rotary import fixed_point
from tests.ops.kernels import inputs, poison  # noqa: F401 (a fixture for every test here)


def test_operators_pass_torchs_own_check() -> None:
    q, t, _ = (x.requires_grad_() for x in inputs(5, 9, d=16))
    step = fixed_point(Rotary(16).frequencies()).to(q.device)
    folded = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(torch.ops.farspan.coca_prepare.default, (folded, t, step, None, None, 4, 0, "slack", 1.0))
    q, t, v = inputs(1, 9, d=16)
    rest = (None, None, None, None, None, 0, "exact", True, None, 0.25)
    torch.library.opcheck(torch.ops.farspan.half_width_attention.default, (q, t, v, step, *rest))


@pytest.mark.parametrize("gradient", [True, False])
def test_compiles_in_one_graph(gradient: bool) -> None:
    q, t, v = (x.requires_grad_(gradient) for x in inputs(6, 12, d=16))

    def attention(q: Tensor, t: Tensor, v: Tensor) -> Tensor:
        return coca_attention(q, t, v, rotary=Rotary(16), form="slack", backend="triton")

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    want, got = attention(q, t, v), compiled(q, t, v)
    assert torch.allclose(want, got, atol=1e-6)
    if gradient:
        weights = torch.randn_like(want)
        pairs = zip(*(torch.autograd.grad(x, (q, t, v), weights) for x in (want, got)), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({}, torch.float64, "got torch.float64; use backend='sdpa'"),
        ({"rotary": Rotary(16)}, torch.float32, "rotary must have dim 8, the width of q, got 16"),
    ],
)
def test_what_the_kernels_cannot_do_raises_with_the_reason(
    options: dict[str, Any], dtype: torch.dtype, message: str
) -> None:
    q, t, v = inputs(5, dtype=dtype)
    options = {"rotary": Rotary(8), **options}
    options = {name: x.to(q.device) if isinstance(x, Tensor) else x for name, x in options.items()}
    with pytest.raises(ValueError, match=message):
        coca_attention(q, t, v, **options, backend="triton")


def test_few_queries_take_the_half_width_kernel_and_gradients_the_feature_kernel() -> None:
    q, t, v = inputs(5, d=8)
    options: dict[str, Any] = {"rotary": Rotary(8), "backend": "triton"}
    assert explain(coca_attention, q, t, v, **options).name == "decode_triton"
    name, skipped, _ = explain(coca_attention, q, t.clone().requires_grad_(), v, **options)
    assert name == "fused"
    assert "no gradients; decode under torch.no_grad()" in skipped["decode_triton"]
    many = explain(coca_attention, *inputs(17, d=8), **options)  # in groups of two
    assert many.name == "fused"
    assert "at most 32 queries per key head" in many.skipped["decode_triton"]
    half = [x.half().requires_grad_() for x in (q, t, v)]
    with pytest.raises(ValueError, match="takes bfloat16 or float32 with gradients or more than 32 queries"):
        coca_attention(*half, **options)


def test_forward_derivatives_raise_rather_than_be_zero() -> None:
    leaves = inputs(20, d=8)

    def attend(backend: str) -> Any:
        return lambda *leaves: coca_attention(*leaves, rotary=Rotary(8), backend=backend)

    _, tangent = torch.func.jvp(attend("reference"), leaves, leaves)
    assert tangent.abs().sum() > 0
    with pytest.raises(ValueError, match="no forward-mode derivatives; use backend='sdpa'"):
        torch.func.jvp(attend("triton"), leaves, leaves)
