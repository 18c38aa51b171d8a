"""The same properties on a GPU, in the precisions people use there."""

from collections.abc import Callable

import pytest
import torch

from farspan import FarspanCache
from farspan.ops import (
    DynamicNTK,
    Rotary,
    alibi_attention,
    alibi_attention_reference,
    coca_attention,
    coca_attention_reference,
    cosformer_attention,
    cosformer_attention_reference,
    linear_coca_attention,
    linear_coca_attention_reference,
    rope_attention,
    rope_attention_reference,
)
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
