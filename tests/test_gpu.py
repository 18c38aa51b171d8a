"""The same properties on a GPU, in the precisions people use there; its layers and models prepare by the kernel."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.layers import Attention
from farspan.ops import (
    AttentionContext,
    DynamicNTK,
    Rotary,
    alibi_attention,
    alibi_attention_reference,
    coca_attention,
    coca_attention_reference,
    cosformer_attention,
    cosformer_attention_reference,
    explain,
    linear_coca_attention,
    linear_coca_attention_reference,
    rope_attention,
    rope_attention_reference,
)
from farspan.ops.coca import why_not_feature_kernel
from tests.helpers import coca_inputs, eager, largest_difference, masks
from tests.models.small import CONFIGURATIONS, make, name_of, tokens

pytestmark = pytest.mark.gpu


def on_gpu(options: dict[str, object]) -> dict[str, object]:
    return {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in options.items()}


@pytest.mark.parametrize("form", ["exact", "slack"])
@pytest.mark.parametrize("name", list(masks(1, 1)))
@pytest.mark.parametrize("shape", [(37, 37), (5, 37), (1, 37), (130, 257)], ids=str)
def test_coca_equals_reference_in_float64(form: str, name: str, shape: tuple[int, int]) -> None:
    inputs, options = coca_inputs(*shape, b=3, device="cuda"), on_gpu(masks(3, shape[1])[name])
    for rotary in (Rotary(8), None, Rotary(8, scaling=DynamicNTK(4, 10))):
        options |= {"rotary": rotary, "form": form}
        assert largest_difference(coca_attention, coca_attention_reference, inputs, **options) <= 1e-12


@pytest.mark.parametrize("name", list(masks(1, 1)))
def test_baselines_equal_their_references_in_float64(name: str) -> None:
    q, _, v = coca_inputs(65, 130, b=3, device="cuda")
    inputs, options = (q, torch.randn_like(v).requires_grad_(), v), on_gpu(masks(3, 130)[name])
    assert largest_difference(alibi_attention, alibi_attention_reference, inputs, **options) <= 1e-12
    options["rotary"] = Rotary(8)
    assert largest_difference(rope_attention, rope_attention_reference, inputs, **options) <= 1e-12


@pytest.mark.parametrize("name", [name for name in masks(1, 1) if "window" not in name])
@pytest.mark.parametrize("shape", [(37, 37), (1, 37), (130, 257)], ids=str)
def test_linear_attention_equals_its_references_in_float64(name: str, shape: tuple[int, int]) -> None:
    q, t, v = coca_inputs(*shape, b=3, device="cuda")
    inputs, options = (q, torch.randn_like(v).requires_grad_(), v), on_gpu(masks(3, shape[1])[name])
    ops = cosformer_attention, cosformer_attention_reference
    for beyond in ("raise", "decoupled", "decay"):
        assert largest_difference(*ops, inputs, max_length=257, beyond=beyond, **options) <= 1e-12
    ops, positive = (linear_coca_attention, linear_coca_attention_reference), (t.detach() + 0.1).requires_grad_()
    assert largest_difference(*ops, (q, positive, v), rotary=Rotary(8), **options) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_cosformer_stream_rounds_only_its_output(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 3000, 64, dtype=dtype, device="cuda") for _ in range(3))
    truth = cosformer_attention(q.double(), k.double(), v.double(), max_length=3000)
    whole, state, parts = cosformer_attention(q, k, v, max_length=3000), None, []
    for pieces in zip(*(x.split([2990, 1, 9], dim=2) for x in (q, k, v)), strict=True):
        out, state = cosformer_attention(*pieces, max_length=3000, state=state, return_state=True)
        parts.append(out)
    for got in (whole, torch.cat(parts, dim=2)):
        assert (got - truth).abs().max() <= torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("form", ["exact", "slack"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [65, 1000])
def test_low_precision_error_is_at_most_twice_that_of_eager(form: str, dtype: torch.dtype, n: int) -> None:
    q, t, v = (x.detach().to(dtype) for x in coca_inputs(n, h=4, g=4, d=64, device="cuda"))
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(64), form=form)
    ours = (coca_attention(q, t, v, rotary=Rotary(64), form=form).double() - truth).abs()
    theirs = (eager(q, t, v, form).double() - truth).abs()
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()


@pytest.mark.parametrize("g", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"causal": False}], ids=str)
def test_grouped_heads_in_bfloat16_with_gradients(g: int, options: dict[str, object]) -> None:
    inputs = coca_inputs(300, h=8, g=g, d=64, dtype=torch.bfloat16, device="cuda")
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    out = coca_attention(*inputs, rotary=Rotary(64), **options)
    truth = coca_attention(*wide, rotary=Rotary(64), **options)
    assert (out - truth).abs().max() <= 0.1
    weights = torch.randn_like(out)
    narrow, exact = torch.autograd.grad(out, inputs, weights), torch.autograd.grad(truth, wide, weights.double())
    for a, b in zip(narrow, exact, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()


@pytest.mark.parametrize("first", ["ours", "torch"])
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_beside_those_of_another_library(first: str, turned: bool) -> None:
    """cuDNN's backward graphs are kept for all of a process: whose came first must not matter to the other."""
    n = {"ours": 192, "torch": 320}[first] + 64 * turned  # a shape of its own, which no graph was kept for
    shape = (2, n, 4, 64) if turned else (2, 4, n, 64)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    leaves = (q, k, v)
    inputs = [x.transpose(1, 2) for x in leaves] if turned else leaves
    weights = torch.randn(2, n, 4 * 64, dtype=torch.bfloat16, device="cuda")

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        return rope_attention(*inputs, rotary=None)

    def theirs(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    def gradients(call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        out = call(*inputs).transpose(1, 2).flatten(2)
        return torch.cat([x.flatten() for x in torch.autograd.grad(out, leaves, weights.to(out.dtype))])

    want = gradients(theirs, *(x.double() for x in inputs))
    if first == "ours":
        torch.autograd.grad(ours(*inputs).sum(), leaves)  # one number for all, which has no layout of its own
    for call in (ours, theirs) if first == "ours" else (theirs, ours):
        assert (gradients(call, *inputs) - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_prefill_equals_decode_equals_any_chunking(options: dict) -> None:
    model, x = make(**options).cuda(), tokens(2, 130).cuda()
    whole = model(x).logits
    for pieces in ([1] * 130, [7, 1, 9, 47, 66]):
        for length in (None, 140):
            cache = FarspanCache(model.config, max_length=length)
            parts = [model(piece, past_key_values=cache).logits for piece in x.split(pieces, dim=1)]
            assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-10


@pytest.mark.parametrize("options", CONFIGURATIONS[2:9:3], ids=name_of)
@torch.no_grad()
def test_generate_with_padding_equals_each_row_alone(options: dict) -> None:
    """With a static cache transformers compiles the decoding step, with CUDA graphs."""
    model, x = make(**options).cuda(), tokens(2, 14).cuda()
    mask = torch.stack([torch.arange(14) >= pad for pad in (0, 9)]).long().cuda()
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(x[1:, 9:], **settings)[0]
    for cache in ("dynamic", "static"):
        out = model.generate(x, attention_mask=mask, cache_implementation=cache, **settings)
        assert torch.equal(out[1, 9:], alone), cache


@pytest.mark.parametrize("slots", [5, 129, 4096])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@torch.no_grad()
def test_one_query_of_a_static_cache_equals_the_reference(group: int, padded: bool, slots: int) -> None:
    """Later slots are empty, and hold anything; compiled, the number of tokens is a tensor."""
    q, k, v = (torch.randn(3, 4 // size, n, 64, device="cuda") for size, n in ((1, 1), (group, slots), (group, slots)))
    past, hidden = torch.tensor(slots - 2, device="cuda"), torch.zeros(3, 1, 8, device="cuda")
    real = torch.ones(3, slots, dtype=torch.long, device="cuda")
    real[1, :2] = 0

    def attend(backend: str, *tensors: Tensor) -> Tensor:
        given = {"attention_mask": real if padded else None, "cached": True, "static": True, "whole_cache": True}
        mask = AttentionContext(hidden, past=past, **given).mask(None, past=past, length=slots, offset=0)
        if backend == "auto" and group == 1 and not padded and slots >= 64:
            assert explain(rope_attention, *tensors, rotary=None, mask=mask).then.name == "one_query"
        return rope_attention(*tensors, rotary=None, mask=mask, backend=backend)

    narrow = [x.bfloat16() for x in (q, k, v)]
    want = attend("reference", *(x.double() for x in narrow))
    compiled = torch.compile(lambda *tensors: attend("sdpa", *tensors), fullgraph=True, dynamic=False)
    for found in (attend("auto", *narrow), compiled(*narrow)):
        assert (found - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("attention", ["coca-exact", "coca-slack", "rope"])
def test_long_attention_takes_the_flash_path(attention: str) -> None:
    """32 768 tokens of one layer's attention in well under the 17 GB that N×N scores would take."""
    q, v = (torch.randn(1, 8, 32_768, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if attention == "rope":
        rope_attention(q, v, v, rotary=Rotary(64))
    else:
        coca_attention(q, q[..., :32].relu(), v, rotary=Rotary(64), form=attention.removeprefix("coca-"))
    assert torch.cuda.max_memory_allocated() - before <= 600e6


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
