"""Windows, and the kernel for masked attention, equal the definition: every mask, hostile shapes, gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.ops import Rotary, alibi_attention, coca_attention, explain, rope_attention
from tests.helpers import largest_difference, softmax_inputs
from tests.ops.cases import SOFTMAX, of_heads
from tests.ops.cases import inputs as leaves_of
from tests.ops.kernels import DEVICE, assert_as_good_as_eager


@st.composite
def cases(draw: Any, largest: int) -> dict[str, Any]:
    """Draw lengths, a window and masks."""
    m = draw(st.integers(1, largest))
    n = draw(st.sampled_from([m, draw(st.integers(1, m))]))
    return {
        "n": n,
        "m": m,
        "window": draw(st.one_of(st.integers(1, 20), st.integers(1, m + 3))),
        "causal": draw(st.booleans()),
        "padding": draw(st.sampled_from([None, "left", "right", "holes"])),
        "documents": draw(st.booleans()),
        "positions": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


def options_of(case: dict[str, Any], b: int) -> dict[str, Any]:
    m, index = case["m"], torch.arange(case["m"])
    found: dict[str, Any] = {"window": case["window"], "causal": case["causal"]}
    lengths = torch.randint(0, m + 1, (b, 1))
    padding = {"left": index >= lengths, "right": index < lengths, "holes": torch.rand(b, m) < 0.7}
    if case["padding"] is not None:
        found["padding_mask"] = padding[case["padding"]]
    if case["documents"]:
        found["documents"] = (torch.rand(b, m) < 0.1).long().cumsum(-1)
    if case["positions"]:
        found["positions"] = torch.randint(1, 3, (m,)).cumsum(-1)
    return found


@pytest.mark.parametrize(
    ("n", "m", "window", "name"),
    [(2, 513, 512, "blocked"), (100, 100, 90, "blocked"), (400, 400, 90, "window"), (9000, 9000, 4096, "blocked")],
)
def test_few_queries_and_wide_windows_run_block_by_block(n: int, m: int, window: int, name: str) -> None:
    q, k = torch.zeros(1).expand(1, 2, n, 8), torch.zeros(1).expand(1, 2, m, 8)
    found = explain(rope_attention, q, k, k, rotary=None, window=window).then
    assert found is not None
    assert found.name == name


def test_a_window_reads_memory_in_proportion_to_its_width() -> None:
    """At 16 times the length, nothing that is allocated grows by more than 16 times."""
    largest = {}
    for n in (1024, 16 * 1024):
        q = torch.randn(1, 2, n, 16)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            rope_attention(q, q, q, rotary=None, window=64)
        largest[n] = max(event.cpu_memory_usage for event in profile.key_averages())
    assert largest[16 * 1024] <= 17 * largest[1024]


def by_kernel(op: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = op(*leaves, **options)
    torch.manual_seed(0)
    weights = torch.randn(out.shape, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


@pytest.mark.parametrize("kind", ["rope", "alibi", "exact", "pope"])
@settings(max_examples=5, deadline=None)
@given(case=cases(40))
def test_the_kernel_equals_the_definition_with_gradients(kind: str, case: dict[str, Any]) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    torch.manual_seed(case["seed"])
    op, fixed = SOFTMAX[kind]
    if kind == "alibi":
        case = {**case, "positions": False}  # not by the kernel
    if op is coca_attention:
        case = {**case, "n": case["m"]}  # few queries are decoded by another kernel
    inputs = leaves_of(kind, case["n"], case["m"], b=2)
    narrow = tuple(x.detach().float().to(DEVICE) for x in inputs)
    options = {**of_heads(fixed, 4), **options_of(case, 2)}
    options = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}
    found = by_kernel(op, narrow, {**options, "backend": "triton"})
    truth = by_kernel(op, tuple(x.double() for x in narrow), {**options, "backend": "reference"})
    plain = by_kernel(op, narrow, {**options, "backend": "sdpa"})
    for ours, exact, theirs in zip(found, truth, plain, strict=True):
        error, size = (ours.double() - exact).abs().max(), max(1.0, float(exact.abs().max()))
        assert error <= 4 * (theirs.double() - exact).abs().max() + 4e-6 * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 64), (4, 1, 80)], ids=str)
def test_the_kernel_is_as_good_as_eager(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    h, g, d = shape
    q, k, v = (x.detach().to(DEVICE, dtype) for x in softmax_inputs(150, h=h, g=g, d=d))
    options: dict[str, Any] = {"rotary": None, "window": 40}
    definition = {**options, "backend": "reference"}
    truth = by_kernel(rope_attention, tuple(x.double() for x in (q, k, v)), definition)
    plain = by_kernel(rope_attention, (q, k, v), definition)
    ours = by_kernel(rope_attention, (q, k, v), {**options, "backend": "triton"})
    for found, exact, eager in zip(ours, truth, plain, strict=True):
        assert_as_good_as_eager(found, exact, eager)


def test_the_kernel_leaves_what_it_cannot_run() -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    q, k, v = (x.detach() for x in softmax_inputs(20))
    pair = (torch.arange(20)[None], torch.arange(20)[None])
    found = explain(rope_attention, q, k, v, rotary=None, window=4, positions=pair, backend="triton").then
    assert found is not None
    assert found.name == "blocked"
    assert "among the keys" in found.skipped["masked_kernel"]
    found = explain(alibi_attention, q, k, v, window=4, positions=torch.arange(20) * 2, backend="triton").then
    assert found is not None
    assert found.name == "blocked"
    assert "consecutive positions" in found.skipped["masked_kernel"]


def test_one_compiled_graph_of_the_kernel_serves_all_lengths() -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rope_attention(q, k, v, rotary=Rotary(8), window=5, backend="triton")

    torch.compiler.reset()
    compiled = torch.compile(attention, backend=count, dynamic=True, fullgraph=True)
    for n in (20, 3, 5, 6, 64, 65):
        q, k, v = (x.detach().float().to(DEVICE) for x in softmax_inputs(n))
        assert torch.allclose(compiled(q, k, v), attention(q, k, v), atol=1e-5)
    assert len(graphs) == 1


def test_one_compiled_graph_serves_rows_of_whole_blocks() -> None:
    """Padding by nothing keeps the strides of its input, which a traced graph takes for contiguous."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rope_attention(q, k, v, rotary=Rotary(8), window=70)

    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in (280, 283):
        leaves = softmax_inputs(n, b=3)
        assert largest_difference(compiled, attention, leaves) <= 1e-12


@pytest.mark.parametrize("n", [300, 4096])
@pytest.mark.parametrize(
    "layout", [lambda x: x.mT.contiguous().mT, lambda x: torch.stack((x, -x), -1).flatten(-2)[..., ::2]]
)
def test_layout_of_memory_does_not_matter(n: int, layout: Callable[[Tensor], Tensor]) -> None:
    q, k, v = torch.randn(3, 1, 2, n, 16, dtype=torch.float64).unbind()
    out = rope_attention(*map(layout, (q, k, v)), rotary=None, window=64)
    torch.testing.assert_close(out, rope_attention(q, k, v, rotary=None, window=64), atol=1e-12, rtol=0)
