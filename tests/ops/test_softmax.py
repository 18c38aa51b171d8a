"""RoPE, NoPE and ALiBi, windows and the kernel for masked attention, and the SDPA calls that CoCA shares with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.ops import (
    Rotary,
    alibi_attention,
    alibi_slopes,
    coca_attention,
    explain,
    rope_attention,
)
from farspan.ops.masking import AttentionContext
from farspan.ops.softmax import fix_layout
from tests.helpers import largest_difference, softmax_inputs
from tests.ops.cases import SOFTMAX, calls, of_heads
from tests.ops.cases import inputs as leaves_of
from tests.ops.kernels import DEVICE, assert_as_good_as_eager


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.allclose(alibi_slopes(16)[::2].log2(), -torch.arange(0.5, 8.5, 1.0))
    twelve = alibi_slopes(12)
    assert twelve[:8].tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.allclose(twelve[8:].log2(), torch.tensor([-0.5, -1.5, -2.5, -3.5]))


def test_heads_become_queries_unless_threads_would_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        read.append(tuple(q.shape[1:3]))
        return sdpa(q, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for threads in (2, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rope_attention(*softmax_inputs(1, 9, h=8, g=2), rotary=Rotary(8))
    assert read == [(2, 4), (8, 1)]


SEEN: list[tuple[int, ...]] = []
"""Strides of the gradients that the op below received."""


@torch.library.custom_op("farspan_tests::laid_out", mutates_args=())
def laid_out_op(x: torch.Tensor) -> torch.Tensor:
    """Stand in for SDPA."""
    return x.clone()


@torch.library.custom_op("farspan_tests::laid_out_backward", mutates_args=())
def laid_out_backward_op(gradient: torch.Tensor) -> torch.Tensor:
    SEEN.append(gradient.stride())
    return gradient.clone()


laid_out_op.register_fake(lambda x: x.clone())
laid_out_backward_op.register_fake(lambda gradient: gradient.clone())
laid_out_op.register_autograd(lambda _, gradient: laid_out_backward_op(gradient))


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)]
"""Orders of the axes of (b, h, n, d) in memory."""


@pytest.mark.parametrize(
    ("backend", "order"),
    [(None, order) for order in ORDERS]
    + [("aot_eager", ORDERS[0]), ("aot_eager, dynamic", ORDERS[1]), ("aot_eager", ORDERS[2]), ("inductor", ORDERS[3])],
    ids=str,
)
def test_a_gradient_arrives_laid_out_as_a_projection_gives_it(backend: str | None, order: tuple[int, ...]) -> None:
    """Otherwise cuDNN would read a gradient with the strides of another.

    Tests on a GPU show that Inductor lays a gradient out for cuDNN as it does for this op.
    """
    torch.compiler.reset()  # each case is a recompilation of the same functions
    shape = (2, 3, 5, 4)
    held = torch.randn([shape[axis] for axis in order])
    x = held.permute([order.index(axis) for axis in range(4)]).requires_grad_()
    want = (60, 4, 12, 1)  # (b, n, h, d)

    def joined(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((fix_layout(laid_out_op(x)), x.detach()), dim=2)  # whose gradient is cut in parts

    def alone(x: torch.Tensor) -> torch.Tensor:
        return fix_layout(laid_out_op(x))

    weights = torch.randn(2, 3, 10, 4)
    cases = [
        (joined, weights),
        (alone, weights[:, :, 3:8]),
        (alone, weights[:, :, :5].contiguous()),
        (alone, weights[:, :, :5].transpose(1, 2).contiguous().transpose(1, 2)),
        (alone, torch.randn(4).expand(2, 3, 5, 4)),
        *([(alone, torch.randn(()).expand(2, 3, 5, 4))] if backend is None else []),
    ]
    for run, weight in cases[:2] if backend == "inductor" else cases:  # which calls a C++ compiler for each
        SEEN.clear()
        if backend is not None:
            name, *dynamic = backend.split(", ")
            run = torch.compile(run, backend=name, fullgraph=True, dynamic=bool(dynamic))
        out = run(x)
        (found,) = torch.autograd.grad(out, x, weight)
        assert [want] == SEEN
        assert torch.equal(found, weight[:, :, :5])


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
@given(data=st.data())
def test_the_kernel_equals_the_definition_with_gradients(kind: str, data: st.DataObject) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    (op, fixed), (shape, options) = SOFTMAX[kind], data.draw(calls(kind, (1, 2, 17, 40)))
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    if kind == "alibi" or isinstance(options["positions"], tuple):
        options["positions"] = None  # not by the kernel
    if op is coca_attention:
        shape["n"] = shape["m"]  # few queries are decoded by another kernel
    options |= {"window": options["window"] or data.draw(st.integers(1, 43)), **of_heads(fixed, shape["h"])}
    narrow = tuple(x.detach().float().to(DEVICE) for x in leaves_of(kind, **shape))
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


@pytest.mark.parametrize("seen", [0, 2, 9])
@pytest.mark.parametrize("n", [1, 3])
def test_the_kernel_takes_the_mask_of_a_static_window(seen: int, n: int) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    window, device = 5, torch.device(DEVICE)
    context = AttentionContext(torch.zeros(2, n, 1, device=device), past=torch.tensor(seen), cached=True, static=True)
    length, past = window - 1 + n, torch.tensor(seen, device=device)
    mask = context.mask(window, past=past, length=length, offset=past - (window - 1))
    q, k, v = (torch.randn(2, heads, size, 8, device=device) for heads, size in ((4, n), (2, length), (2, length)))
    ours, theirs = (rope_attention(q, k, v, rotary=None, mask=mask, backend=name) for name in ("triton", "sdpa"))
    assert (ours - theirs).abs().max() <= 1e-5
    assert mask.padding is not None
    assert mask.padding.sum() == min(seen, window - 1) + n
