"""cosFormer's kernels as operators of torch: registered, compiled, taken where timed, refused with a reason."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import cosformer, cosformer_attention, explain
from farspan.ops.masking import make_mask
from tests.ops.cosformer import inputs, with_gradients
from tests.ops.kernels import DEVICE, poison  # noqa: F401 (a fixture for every test here)


def test_operators_pass_torchs_own_check() -> None:
    q, k, v = inputs(40, h=2, d=8)
    folded = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    crossed = q.detach().permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1).requires_grad_()
    angles = torch.rand(1, 2, 40, device=DEVICE)
    state = (torch.rand(1, 1, 2, 8, 8, device=DEVICE), torch.rand(1, 1, 2, 8, device=DEVICE))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for given, initial in ((folded, state), (crossed, (None, None))):
        arguments = (given, k, v, angles, None, 1e-6, *initial)
        torch.library.opcheck(torch.ops.farspan.linear_attention.default, arguments, test_utils=tests)


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    leaves = inputs(40, h=1, d=8)

    def attend(*leaves: Tensor) -> Tensor:
        return cosformer_attention(*leaves, max_length=40, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    weights = torch.randn(1, 1, 40, 8, device=DEVICE)
    for got, want in zip(
        with_gradients(compiled, leaves, weights), with_gradients(attend, leaves, weights), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-6)


def test_angles_are_made_once_for_layers_that_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, made = cosformer.Weighting.angles, []
    monkeypatch.setattr(
        cosformer.Weighting, "angles", lambda self, x, *rest: made.append(x.shape[1]) or compute(self, x, *rest)
    )
    q, k, v = (x.detach() for x in inputs(40, h=1, d=8))
    mask = make_mask(40, 40, 1, q.device)
    for _ in range(3):
        cosformer_attention(q, k, v, max_length=4711, mask=mask, backend="triton")
    assert made == [40]


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({}, torch.float64, "takes float32, bfloat16 or float16, got torch.float64; use backend='chunked'"),
        ({"beyond": "decay"}, torch.float32, "takes beyond='raise' with ReLU and re-weighting; use backend='chunked'"),
        ({"activation": "elu"}, torch.float32, "with ReLU and re-weighting"),
        ({"reweight": False}, torch.float32, "with ReLU and re-weighting"),
        ({"causal": False}, torch.float32, "takes causal calls with one query per key"),
        ({"positions": (torch.arange(5), torch.arange(5))}, torch.float32, "with one query per key"),
    ],
)
def test_what_the_kernels_cannot_do_raises_with_the_reason(
    options: dict[str, Any], dtype: torch.dtype, message: str
) -> None:
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    with pytest.raises(ValueError, match=message):
        cosformer_attention(*inputs(5, dtype=dtype), max_length=8, backend="triton", **options)


AUTO: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "causal": True, "n": 64, "d": 16, "hopper": True}
PAPER: dict[str, Any] = {"beyond": "raise", "activation": "relu", "reweight": True}


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"hopper": False}, False),
        ({"device": "cpu"}, False),
        ({"dtype": torch.float32}, False),
        ({"causal": False}, False),
        ({"n": 1}, False),
        ({"n": 63}, False),
        ({"d": 256}, False),
        ({"beyond": "decoupled"}, False),
        ({"beyond": "decay"}, False),
        ({"activation": "elu"}, False),
        ({"reweight": False}, False),
    ],
)
def test_auto_takes_the_kernels_where_they_were_timed(
    changed: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {**AUTO, **PAPER, **changed}
    monkeypatch.setattr(cosformer, "is_hopper", lambda index: case["hopper"])
    options = {name: case[name] for name in (*PAPER, "causal")}
    with FakeTensorMode():  # has CUDA tensors on any machine
        q = torch.empty(1, 2, case["n"], case["d"], dtype=case["dtype"], device=case["device"])
        k = q.new_empty(1, 2, 64, case["d"])
        assert (explain(cosformer_attention, q, k, k, max_length=150, **options).name == "triton") is taken


def test_forward_derivatives_raise_rather_than_be_zero() -> None:
    leaves = tuple(x.detach() for x in inputs(40, h=1, d=8))

    def attend(backend: str) -> Any:
        return lambda *leaves: cosformer_attention(*leaves, max_length=40, backend=backend)

    _, tangent = torch.func.jvp(attend("chunked"), leaves, leaves)
    assert tangent.abs().sum() > 0
    with pytest.raises(ValueError, match="no forward-mode derivatives; use backend='chunked'"):
        torch.func.jvp(attend("triton"), leaves, leaves)


def test_heads_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match="heads up to 128 wide, got 136; use backend='chunked'"):
        cosformer_attention(*inputs(5, d=136), max_length=8, backend="triton")
