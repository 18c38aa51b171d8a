"""RoPE, NoPE and ALiBi against their definitions, and the SDPA calls that CoCA shares with them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.ops import (
    Rotary,
    alibi_attention,
    alibi_attention_reference,
    alibi_slopes,
    rope_attention,
    rope_attention_reference,
    softmax,
)
from farspan.ops.masking import make_mask
from farspan.ops.softmax import fix_layout
from tests.helpers import largest_difference, masks, softmax_inputs

MASKS = list(masks(1, 1))


def test_alibi_with_a_flat_head_stays_finite() -> None:
    inputs, slopes = softmax_inputs(9), torch.tensor([0.0, 0.5, 0.0, 1.0])
    assert largest_difference(alibi_attention, alibi_attention_reference, inputs, slopes=slopes) <= 1e-12
    with pytest.raises(ValueError, match="slopes must be ≥ 0"):
        alibi_attention(*inputs, slopes=-slopes)


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.allclose(alibi_slopes(16)[::2].log2(), -torch.arange(0.5, 8.5, 1.0))
    twelve = alibi_slopes(12)
    assert twelve[:8].tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.allclose(twelve[8:].log2(), torch.tensor([-0.5, -1.5, -2.5, -3.5]))


@pytest.mark.parametrize("op", [rope_attention, alibi_attention])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_error_is_at_most_twice_that_of_eager(op, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in softmax_inputs(257, d=32, g=4))
    options = {"rotary": Rotary(32)} if op is rope_attention else {}
    truth = op(q.double(), k.double(), v.double(), **options, backend="reference")
    ours = (op(q, k, v, **options).double() - truth).abs()
    if op is rope_attention:  # the same dtype, eagerly: its reference rotates in float32
        angles = make_mask(257, 257, 1, q.device).angles(Rotary(32))
        q, k, options = angles.rotate_queries(q), angles.rotate_keys(k), {"rotary": None}
    theirs = (op(q, k, v, **options, backend="reference").double() - truth).abs()
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()


def test_a_window_costs_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is handed only the keys its queries can see."""
    seen, original = [], softmax.FLASH

    def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.append((q.shape[0] * q.shape[2], k.shape[2]))
        return original(q, k, v, **options)

    monkeypatch.setattr(softmax, "FLASH", flash)
    rope_attention(*(x.detach() for x in softmax_inputs(1000)), rotary=None, window=100)
    assert sum(queries for queries, _ in seen) == 1000
    assert {keys for _, keys in seen} == {200}


@pytest.mark.parametrize("threads", [1, 64])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("h", "g"), [(6, 3), (4, 1)])
def test_one_query_of_grouped_heads_equals_reference(
    h: int, g: int, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    inputs = softmax_inputs(1, 37, b=3, h=h, g=g)
    options = masks(3, 37)[name]
    assert largest_difference(rope_attention, rope_attention_reference, inputs, rotary=Rotary(8), **options) <= 1e-12
    assert largest_difference(alibi_attention, alibi_attention_reference, inputs, **options) <= 1e-12


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
