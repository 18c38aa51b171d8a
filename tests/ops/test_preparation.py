"""Who prepares queries and keys, and that it is the same whoever does; the kernel is interpreted where no GPU is."""

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
from farspan.ops import DynamicNTK, Rotary, YaRN, coca_attention, coca_features
from farspan.ops.coca import preparation
from farspan.ops.coca.preparation import coca_plan, preparation_refusal, prepared
from farspan.ops.phases import Phases, phase_plan, rotary_steps
from farspan.ops.positions import resolve
from farspan.ops.rotary import Angles
from tests.helpers import coca_inputs
from tests.ops.kernels import DEVICE, inputs, poison  # noqa: F401 (a fixture for every test here)

LAWS = [None, YaRN(4, 16), DynamicNTK(4, 16, "per_request"), DynamicNTK(4, 16, "per_query")]


@pytest.fixture
def _by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(preparation, "preparation_refusal", lambda *_: None)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("where", ["from 0", "from 131 000", "a row", "free"])
def test_phases_are_the_angles_of_the_tables(law: Any, where: str) -> None:
    rows = (torch.arange(40) * 3 + torch.tensor([[0], [100_000]])).to(DEVICE)
    positions = {"from 0": None, "from 131 000": 131_000, "a row": rows, "free": (rows[:, 5:16], rows)}[where]
    rotary = Rotary(16, scaling=law)
    places = resolve(positions, 11, 40, torch.device(DEVICE))
    tables = rotary.plan(places, 11, 40, dtype=torch.float64)
    plan = phase_plan(rotary, places, causal=True)
    assert [(p.start, p.stop, p.keys) for p in plan] == [(p.start, p.stop, p.keys) for p in tables]
    for part, table in zip(plan, tables, strict=True):
        assert (part.member is None) == (table.member is None)
        for phases, angles, n in ((part.query, table.query, part.stop - part.start), (part.key, table.key, part.keys)):
            assert (phases.angles(n, torch.float64).both - angles.both).abs().max() <= 1e-9  # float64 at 131 000


@pytest.mark.parametrize("form", ["exact", "slack"])
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.usefixtures("_by_kernel")
def test_auto_by_the_kernel_equals_sdpa_with_gradients(form: str, law: Any) -> None:
    rows = (torch.arange(40) + torch.tensor([[0], [7]])).to(DEVICE)
    for positions in (None, rows):
        leaves = [x.requires_grad_() for x in inputs(33, 40, b=2, h=4, g=1, d=16)]
        options: dict[str, Any] = {"rotary": Rotary(16, scaling=law), "form": form, "positions": positions}
        got, want = (coca_attention(*leaves, **options, backend=backend) for backend in ("auto", "sdpa"))
        assert 0 < (got - want).abs().max() <= 1e-5  # two ways
        weights = torch.randn_like(got)
        for a, b in zip(*(torch.autograd.grad(out, leaves, weights) for out in (got, want)), strict=True):
            assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(
    ("dtype", "width", "device", "reason"),
    [
        (torch.float32, 64, "cpu", "on CUDA alone, got cpu"),
        (torch.float16, 64, "cuda", "bfloat16 and float32, got torch.float16"),
        (torch.float64, 64, "cuda", "bfloat16 and float32, got torch.float64"),
        (torch.bfloat16, 512, "cuda", "up to 256 wide"),
    ],
)
def test_where_plain_torch_prepares_it_is_said_why(dtype: torch.dtype, width: int, device: str, reason: str) -> None:
    assert reason in str(preparation_refusal(dtype, width, torch.device(device)))


def test_transforms_of_torch_func_keep_plain_torch() -> None:
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(preparation_refusal(torch.float32, 64, torch.device("cuda")))
        return x.sum()

    x = torch.ones(2, 3)
    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    assert ["torch.func" in str(reason) for reason in found[:2]] == [True, True]
    assert "forward-mode" in str(found[2])


def test_a_cpu_prepares_from_tables() -> None:
    [part] = coca_plan(Rotary(8), resolve(None, 5, 5, torch.device("cpu")), causal=True, dtype=torch.float32)
    assert isinstance(part.query, Angles)
    q, t, v = (x.detach() for x in coca_inputs(9, dtype=torch.float32))
    options: dict[str, Any] = {"rotary": Rotary(8), "form": "slack"}
    assert torch.equal(*(coca_attention(q, t, v, **options, backend=one) for one in ("auto", "sdpa")))


@pytest.mark.usefixtures("_by_kernel")
def test_where_it_can_run_the_kernel_prepares_exact_and_slack() -> None:
    places = resolve(None, 5, 5, torch.device("cpu"))
    for name, wanted in (("coca-slack", Phases), ("coca-exact", Phases), ("coca-strict", Angles), ("rope", Angles)):
        plan = Attention(32, 4, name).plan(places, torch.float32)
        assert plan is not None
        assert isinstance(plan[0].query, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_another_dtype_than_the_plan_was_made_for_is_prepared_by_torch(dtype: torch.dtype) -> None:
    q, t, _ = inputs(20, 25, dtype=dtype, d=16)
    places = resolve(30, 20, 25, q.device)
    [part], [table] = phase_plan(Rotary(16), places, causal=True), Rotary(16).plan(places, 20, 25, dtype=dtype)
    got = prepared(q, t, part.query, part.key, form="slack")
    for a, b in zip(got, coca_features(q, t, table.query, table.key, form="slack"), strict=True):
        assert (a - b).abs().max() <= 20 * torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.parametrize("backend", ["sdpa", "triton", "reference"])
def test_a_plan_of_phases_is_for_auto(backend: str) -> None:
    q, t, v = inputs(6, d=16)
    plan = phase_plan(Rotary(16), resolve(None, 6, 6, q.device), causal=True)
    with pytest.raises(ValueError, match=f"a plan of phases is for backend='auto', got '{backend}'; pass the Rotary"):
        coca_attention(q, t, v, rotary=plan, backend=backend)


def test_angles_of_another_device_are_refused() -> None:
    q, t, _ = inputs(3, d=8)
    stray = Phases(torch.zeros(1, 4, dtype=torch.long, device="meta"), 0, None, 1.0)
    with pytest.raises(ValueError, match=f"must be on the device of q, {q.device}; move them there"):
        prepared(q, t, stray, stray)


@pytest.mark.parametrize("positions", [False, True])
def test_one_graph_prepares_texts_of_every_length(positions: bool) -> None:
    """Whatever the number of texts and tokens; strided inputs, as projections give them, keep their layout."""
    graphs = CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")
    step = rotary_steps(Rotary(16), None, torch.device(DEVICE))

    def prepare(q: Tensor, t: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor]:
        phases = Phases(step, 0, at, 1.0)
        return prepared(q, t, phases, phases, form="slack")

    compiled = torch.compile(prepare, fullgraph=True, dynamic=True, backend=graphs)
    for b, n in ((3, 9), (5, 40), (3, 17)):  # no two sizes alike at first, or one letter would stand for both
        q, t, _ = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(n, b=b, h=4, g=2, d=16))
        at = torch.arange(n, device=DEVICE).expand(b, n).contiguous() if positions else None
        leaves = (q.requires_grad_(), t.requires_grad_())
        got, want = compiled(*leaves, at), prepare(*leaves, at)
        weights = [torch.randn_like(x) for x in want]
        gradients = [torch.autograd.grad(out, leaves, weights) for out in (got, want)]
        for a, c in zip((*got, *gradients[0]), (*want, *gradients[1]), strict=True):
            assert a.stride() == c.stride()
            assert torch.allclose(a, c, atol=1e-6)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("who", ["kernel", "torch"])
def test_one_graph_attends_whatever_the_sizes(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dynamic=True nothing may write a size into a message, nor hand SDPA a truth value that is a letter."""
    monkeypatch.setattr(preparation, "preparation_refusal", lambda *_: None if who == "kernel" else "not asked")
    graphs = CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, t: Tensor, v: Tensor) -> Tensor:
        return coca_attention(q, t, v, rotary=Rotary(16), form="slack")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=graphs)
    for n in (20, 33):
        leaves = [x.requires_grad_() for x in inputs(n, b=3, h=4, g=2, d=16)]
        found = [out.sum() for out in (compiled(*leaves), attend(*leaves))]
        gradients = [torch.autograd.grad(out, leaves) for out in found]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
    assert graphs.frame_count == 1


def test_torch_compile_looks_into_the_operator() -> None:
    """Without an interpreter, in a process of its own: Inductor is given the kernel, which writes its results alone."""
    script = Path(__file__).with_name("trace_preparation.py")
    own = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["forward", "backward"] * 4
