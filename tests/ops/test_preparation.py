"""The kernel that prepares queries and keys of CoCA and PoPE: features with one rounding, and in one graph."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.layers import Attention
from farspan.ops import DynamicNTK, Rotary, YaRN, coca, coca_attention, coca_features, explain, pope_attention
from farspan.ops.coca import COCA, POPE, kernel_features, polar_features
from farspan.ops.masking import make_mask
from farspan.ops.rotary import Angles
from tests.ops.kernels import DEVICE, FORMS, inputs, poison  # noqa: F401 (a fixture for every test here)


def angles_of(q: Tensor, t: Tensor, rotary: Rotary, positions: int | Tensor = 0) -> Angles:
    return make_mask(q.shape[2], t.shape[2], q.shape[0], q.device, positions=positions).angles(rotary)


def features_by_torch(
    q: Tensor, t: Tensor, angles: Angles, form: str, phase: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if form == "polar":
        return polar_features(q, angles.query(q.dtype), phase), polar_features(t, angles.key(t.dtype))
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
        ("polar", 1, 64),
        ("polar", 65, 32),
        ("polar", 129, 6),
        ("polar without phase", 20, 64),
    ],
)
def test_preparation_equals_the_features_forward_and_backward(form: str, n: int, d: int) -> None:
    q, t, _ = inputs(n, n + 3, h=5, g=1, d=d)
    angles, wide, (form, *no_phase) = angles_of(q, t, Rotary(d), 131_000), [q, t], form.split(maxsplit=1)
    if form == "polar":
        phase = torch.linspace(-9, 9, 5 * (d // 2), device=DEVICE).view(5, d // 2)
        wide = [q[..., : d // 2].abs(), t, *([] if no_phase else [phase])]
    wide = [x.double().requires_grad_() for x in wide]

    def ordered(made: Any, q: Tensor, t: Tensor, *phase: Tensor) -> Any:
        return made(q, t, angles, form, *phase)

    truth = ordered(features_by_torch, *wide)
    weights = [torch.randn_like(x) for x in truth]
    true_gradients = torch.autograd.grad(truth, wide, weights)
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
        out = ordered(kernel_features, *narrow)
        gradients = torch.autograd.grad(out, narrow, [x.to(dtype) for x in weights])
        for got, want in zip((*out, *gradients), (*truth, *true_gradients), strict=True):
            # In bfloat16 the inputs themselves are rounded, and q̃ is quadratic in them. Phases are up to 9.
            allowed = limit if dtype == torch.float32 else (12 if form == "polar" else 3) * limit
            assert (got - want).abs().max() <= allowed * want.abs().max()


def test_preparation_rounds_once() -> None:
    """From the same bfloat16 inputs, the result is within half a unit of the float64 one."""
    q, t, _ = inputs(33, dtype=torch.bfloat16, d=16)
    angles = angles_of(q, t, Rotary(16))
    truth = features_by_torch(q.double(), t.double(), angles, "exact")
    for got, want in zip(kernel_features(q, t, angles, "exact"), truth, strict=True):
        assert ((got - want).abs() <= want.abs() * 2**-8 * 1.001 + 1e-6).all()


@pytest.mark.parametrize("form", FORMS)
def test_preparation_takes_positions_and_frequencies_per_row(form: str) -> None:
    q, t, _ = inputs(11, 20, b=2, d=16)
    positions = (torch.arange(20) * 7 + torch.tensor([[0], [100_000]])).to(DEVICE)
    rotary = Rotary(16, scaling=DynamicNTK(4, 32, "per_request"))
    angles = angles_of(q, t, rotary, positions)
    wanted = features_by_torch(q.double(), t.double(), angles, form)
    for a, b in zip(kernel_features(q, t, angles, form), wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5


@pytest.fixture
def _by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" choose as on a GPU."""
    for table in (COCA, POPE):
        entries = tuple(entry._replace(device=None) if entry.name == "fused" else entry for entry in table.entries)
        monkeypatch.setattr(table, "entries", entries)
    monkeypatch.setattr(coca, "why_not_feature_kernel", lambda *_: None)


@pytest.mark.parametrize(
    ("form", "scaling"),
    [
        ("exact", None),
        ("slack", None),
        ("slack", YaRN(4, 16)),
        ("exact", DynamicNTK(4, 16, "per_request")),
        ("slack", DynamicNTK(4, 16, "per_query")),
        ("polar", None),
        ("polar", DynamicNTK(4, 16, "per_query")),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_by_kernel")
def test_attention_by_the_kernel_equals_sdpa_with_gradients(form: str, scaling: Any) -> None:
    rows = (torch.arange(40) + torch.tensor([[0], [7]])).to(DEVICE)
    for positions in (None, rows):
        leaves = [x.requires_grad_() for x in inputs(33, 40, b=2, h=4, g=1, d=16)]
        options: dict[str, Any] = {"rotary": Rotary(16, scaling=scaling), "positions": positions}
        op: Any = coca_attention
        if form == "polar":
            phase = torch.linspace(-1, 1, 32, device=DEVICE).view(4, 8).requires_grad_()
            q, k, v = leaves
            leaves = [q.detach()[..., :8].abs().requires_grad_(), k, v, phase]
            op = lambda q, k, v, phase, **given: pope_attention(q, k, v, phase=phase, **given)  # noqa: E731
            assert explain(pope_attention, *leaves[:3], **options).name == "fused"
        else:
            options["form"] = form
            assert explain(coca_attention, *leaves, **options).name == "fused"
        want, auto, triton = (op(*leaves, **options, backend=name) for name in ("sdpa", "auto", "triton"))
        weights = torch.randn_like(want)
        gradients = torch.autograd.grad(want, leaves, weights)
        for got in (auto, triton):
            assert 0 < (got - want).abs().max() <= 1e-5  # two implementations
            for a, b in zip(torch.autograd.grad(got, leaves, weights), gradients, strict=True):
                assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


def test_layers_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the kernel strict CoCA would have to write out its tied query; RoPE has other features."""
    from farspan import layers

    taken: list[str] = []

    def spy(*args: Any) -> Any:
        taken.append(args[3])
        return kernel_features(*args)

    monkeypatch.setattr(layers, "why_not_feature_kernel", lambda *_: None)
    monkeypatch.setattr(layers, "kernel_features", spy)
    mask = make_mask(5, 5, 1, torch.device(DEVICE))
    kinds = {"coca-slack": ["slack"], "coca-exact": ["exact"], "coca-strict": [], "rope": []}
    for name, wanted in {**kinds, "pope": ["polar"], "coca-polar": ["polar"]}.items():
        taken.clear()
        layer = Attention(32, 4, name).to(DEVICE)
        q, k, _ = layer.project(torch.randn(1, 5, 32, device=DEVICE))
        layer.features(q, k, mask, layer.rotary)
        assert taken == wanted


def test_angles_of_another_device_raise() -> None:
    q, t, _ = inputs(3, d=8)
    stray = make_mask(3, 3, 1, torch.device("meta")).angles(Rotary(8))
    with pytest.raises(ValueError, match=f"must be on the device of q, {q.device}; move them there"):
        kernel_features(q, t, stray, "exact")


def test_one_graph_makes_features_of_every_length() -> None:
    """Whatever the batch and length; strided inputs, as projections give them, keep their layout."""
    graphs = CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")

    def features(q: Tensor, t: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        mask = make_mask(q.shape[2], t.shape[2], q.shape[0], q.device, positions=at)
        return kernel_features(q, t, mask.angles(Rotary(16)), "slack")

    compiled, first = torch.compile(features, fullgraph=True, dynamic=True, backend=graphs), 0
    for b, n in ((3, 9), (5, 40), (3, 17)):  # no two sizes alike at first, or one symbol would stand for both
        q, t, _ = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(n, b=b, h=4, g=2, d=16))
        at = torch.arange(n, device=DEVICE).expand(b, n).contiguous()
        leaves = (q.requires_grad_(), t.requires_grad_())
        got, want = compiled(*leaves, at), features(*leaves, at)
        first = first or graphs.frame_count  # torch 2.11 starts the first graph twice
        weights = [torch.randn_like(x) for x in want]
        gradients = [torch.autograd.grad(out, leaves, weights) for out in (got, want)]
        for a, c in zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True):
            assert a.stride() == c.stride()
            assert torch.allclose(a, c, atol=1e-6)
    assert graphs.frame_count == first


@pytest.mark.parametrize("name", ["fused", "sdpa"])
def test_one_graph_attends_whatever_the_sizes(name: str, request: pytest.FixtureRequest) -> None:
    """With dynamic=True no message may contain a size, and no argument of SDPA may be a symbolic truth value."""
    if name == "fused":
        request.getfixturevalue("_by_kernel")
    graphs = CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, t: Tensor, v: Tensor) -> Tensor:
        return coca_attention(q, t, v, rotary=Rotary(16), form="slack")

    compiled, first = torch.compile(attend, fullgraph=True, dynamic=True, backend=graphs), 0
    for n in (20, 33):
        leaves = [x.requires_grad_() for x in inputs(n, b=3, h=4, g=2, d=16)]
        found = [out.sum() for out in (compiled(*leaves), attend(*leaves))]
        first = first or graphs.frame_count
        gradients = [torch.autograd.grad(out, leaves) for out in found]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
    assert graphs.frame_count == first


def test_torch_compile_looks_into_the_op() -> None:
    """In a process without the interpreter, Inductor receives the kernel, which writes nothing but its results."""
    script = Path(__file__).with_name("trace_preparation.py")
    own = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["forward", "backward"] * 5
