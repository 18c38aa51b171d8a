"""On a GPU layers and models prepare queries and keys with the kernel, compiled or not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.layers import Attention
from farspan.ops import DynamicNTK, Rotary, coca_attention
from farspan.ops.coca import why_not_feature_kernel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch.compiler.reset()


def leaves_of(n: int, group: int, dtype: torch.dtype) -> list[Tensor]:
    """As projections give them: heads inside positions."""
    made = (torch.randn(2, n, 8, 64), torch.rand(2, n, 8 // group, 32), torch.randn(2, n, 8 // group, 64))
    return [x.to("cuda", dtype).transpose(1, 2).requires_grad_() for x in made]


def check(run: Callable[..., Tensor], leaves: list[Tensor], options: dict[str, Any]) -> None:
    """Output and gradients are at most twice as far from float64 as those of plain torch in the same dtype."""

    def plain(*inputs: Tensor) -> Tensor:
        return coca_attention(*inputs, **options, backend="sdpa")

    found = []
    wide = [x.detach().double().requires_grad_() for x in leaves]
    weights = torch.randn(2, 8, leaves[0].shape[2], 64, device="cuda")
    for function, inputs in ((plain, wide), (plain, leaves), (run, leaves)):
        out = function(*inputs)
        found.append((out, *torch.autograd.grad(out, inputs, weights.to(out.dtype))))
    for truth, theirs, ours in zip(*found, strict=True):
        mine, other = ((x.double() - truth).norm() / truth.norm() for x in (ours, theirs))
        assert mine <= 2 * other + torch.finfo(ours.dtype).eps


def launches(run: Callable[[], object]) -> int:
    run()  # compiled, and made
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum("prepare_kernel" in event.name for event in seen.events())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_launches_it_once_forwards_and_once_backwards(compiled: bool, dtype: torch.dtype) -> None:
    assert why_not_feature_kernel(dtype, 64, torch.device("cuda")) is None
    layer = Attention(256, 4, "coca-slack", num_key_heads=1).to("cuda", dtype)
    x = torch.randn(2, 300, 256, device="cuda", dtype=dtype)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    assert launches(lambda: run(x).sum().backward()) == 2
    with torch.no_grad():
        assert launches(lambda: run(x)) == 1
    assert launches(lambda: layer.half()(x.half())) == 0


@pytest.mark.parametrize("form", ["exact", "slack"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_compiled_graph_is_right_at_every_length(form: str, group: int, dtype: torch.dtype) -> None:
    options = {"rotary": Rotary(64), "form": form}
    graphs = CompileCounterWithBackend("inductor")
    run = torch.compile(lambda *inputs: coca_attention(*inputs, **options), fullgraph=True, backend=graphs)
    for n in (512, 2048, 777):
        leaves = leaves_of(n, group, dtype)
        for x in leaves:
            torch._dynamo.mark_dynamic(x, 2)
        check(run, leaves, options)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("case", ["positions per row", "per_query", "per_query, positions per row", "per_request"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_positions_and_dynamic_frequencies(case: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"rotary": Rotary(64), "form": "slack"}
    if case.startswith("per_"):
        options["rotary"] = Rotary(64, scaling=DynamicNTK(4, 256, case.split(",")[0]))
    if case.endswith("per row"):
        options["positions"] = (torch.arange(777) + torch.tensor([[0], [300]])).cuda()

    def run(*inputs: Tensor) -> Tensor:
        return coca_attention(*inputs, **options)

    leaves = leaves_of(777, 4, dtype)
    check(run, leaves, options)
    if case != "per_query, positions per row":  # which is not for torch.compile
        check(torch.compile(run, fullgraph=True), leaves, options)


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_gradients_are_right_however_they_were_laid_out_before(backend: str) -> None:
    """On cuDNN, whose graphs torch keeps: part of a longer one, then on its own or as a projection lays it out, eager
    and compiled."""
    leaves = leaves_of(256, 4, torch.bfloat16)
    longer = torch.randn(2, 8, 777, 64, device="cuda", dtype=torch.bfloat16)

    def run(*inputs: Tensor) -> Tensor:
        return coca_attention(*inputs, rotary=Rotary(64), form="slack", backend=backend)

    def gradients(run: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
        out = run(*inputs)
        return torch.autograd.grad(out, inputs, weights.to(out.dtype))

    wide = [x.detach().double().requires_grad_() for x in leaves]
    part = longer[:, :, 300:556]
    for weights in (part, part.contiguous(), part.transpose(1, 2).contiguous().transpose(1, 2)):
        truths = gradients(run, wide, weights)
        for each in (run, torch.compile(run, fullgraph=True)):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                found = gradients(each, leaves, weights)
            for truth, ours in zip(truths, found, strict=True):
                assert (ours.double() - truth).norm() <= 0.02 * truth.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_blocks_train_alike_without_a_graph_for_each_length(autocast: bool) -> None:
    settings = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = FarspanConfig(vocab_size=97, num_hidden_layers=2, attention="coca-slack", train_length=512, **settings)
    model = FarspanForCausalLM(config).cuda()
    model = model if autocast else model.bfloat16()
    graphs = CompileCounterWithBackend("inductor")
    inputs = [torch.randint(1, 97, (2, n), device="cuda") for n in (512, 700, 777)]

    def gradients(x: Tensor) -> Tensor:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(x, labels=x, use_cache=False).loss
        loss.backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters()])

    wanted = [gradients(x) for x in inputs]
    for block in model.model.layers:
        block.compile(backend=graphs, fullgraph=True)
    for x, want in zip(inputs, wanted, strict=True):
        assert (gradients(x) - want).norm() <= 0.03 * want.norm()
    assert graphs.frame_count == 2
