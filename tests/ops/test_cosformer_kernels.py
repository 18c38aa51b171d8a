"""cosFormer's Triton kernels compute what the definition says: on a GPU where there is one, else in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import cosformer_attention, cosformer_attention_reference
from tests.ops.cosformer import (
    check_against_eager,
    compare,
    inputs,
    meeting,
    short_segments,  # noqa: F401 (a fixture that tests name)
    with_gradients,
)
from tests.ops.kernels import DEVICE, poison  # noqa: F401 (a fixture for every test here)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("dtype", "n"),
    [*((torch.bfloat16, n) for n in (2, 64, 65, 200)), (torch.float16, 65), (torch.float32, 65)],
    ids=str,
)
def test_errors_are_at_most_twice_those_of_eager(dtype: torch.dtype, n: int) -> None:
    check_against_eager(n, dtype, h=1, d=64 if n == 65 else 16)


def test_the_first_token_gives_its_value_back_and_no_gradient() -> None:
    """A mean over one key is that key's value, however its weight is rounded."""
    q, k, v = meeting(inputs(65, dtype=torch.bfloat16, h=1, d=64))
    out = cosformer_attention(q, k, v, max_length=65, backend="triton")
    assert torch.equal(out[:, :, 0], v[:, :, 0])
    (dq,) = torch.autograd.grad(out, q, torch.randn_like(out))
    assert dq[:, :, 0].abs().max() <= 1e-6 * dq.abs().max()


def options_by_name(n: int) -> dict[str, dict[str, Any]]:
    index = torch.arange(n, device=DEVICE)
    rows = torch.tensor([[n // 3], [0]], device=DEVICE)
    return {
        "causal": {},
        "left padding": {"padding_mask": index[None] >= rows},
        "right padding": {"padding_mask": index[None] < n - rows},
        "long documents": {"documents": (index // 45).expand(2, n)},
        "short documents": {"documents": (index // 7).expand(2, n)},
        "documents and padding": {"documents": (index // 33).expand(2, n), "padding_mask": index[None] >= rows},
        "positions a row": {"positions": index * 2 + rows},
        "far positions": {"positions": 2**31 - 1001 - n},
    }


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("name", list(options_by_name(1)))
def test_kernels_equal_the_definition_for_every_option(name: str) -> None:
    n = 70  # three chunks of 32, two segments
    options = {"max_length": 170, **options_by_name(n)[name]}
    b = 2 if any(isinstance(x, Tensor) for x in options.values()) else 1
    leaves = inputs(n, b=b, h=1, d=8)
    assert compare(meeting(leaves), **options) <= 2e-6


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("h", "g"), [(4, 1), (4, 2)])
def test_grouped_heads_strides_and_unequal_widths(h: int, g: int) -> None:
    q, k, _ = inputs(40, h=h, g=g, d=6)
    q, k = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k))
    v = torch.randn(1, g, 40, 40, device=DEVICE)[..., ::2].requires_grad_()
    assert compare([q, k, v]) <= 2e-6


@pytest.mark.usefixtures("short_segments")
def test_a_stream_in_pieces_equals_the_whole_with_its_gradients() -> None:
    leaves = inputs(81, h=1, d=8)
    options: dict[str, Any] = {"max_length": 100}
    weights = torch.randn(1, 1, 81, 8, device=DEVICE)

    def in_pieces(*leaves: Tensor, **options: Any) -> Tensor:
        state, parts = None, []
        for q, k, v in zip(*(x.split([40, 40, 1], dim=2) for x in leaves), strict=True):
            out, state = cosformer_attention(q, k, v, state=state, return_state=True, backend="triton", **options)
            parts.append(out)
        ours = cosformer_attention(*leaves, return_state=True, backend="chunked", **options)[1]
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(state[:5], ours[:5], strict=True))
        return torch.cat(parts, dim=2)

    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = with_gradients(cosformer_attention_reference, wide, weights, **options)
    for got, want in zip(with_gradients(in_pieces, leaves, weights, **options), truth, strict=True):
        assert (got - want).abs().max() <= 3e-6 * want.abs().max().clamp(min=1.0)


def test_a_state_alone_has_gradients() -> None:
    leaves = inputs(40, h=1, d=8)
    pairs = []
    for backend in ("triton", "chunked"):
        _, state = cosformer_attention(*leaves, max_length=50, return_state=True, backend=backend)
        loss = (state.numerator.square().sum() + state.denominator.square().sum()).sqrt()
        pairs.append(torch.autograd.grad(loss, leaves[1:]))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*pairs, strict=True))


def test_padding_may_hold_anything() -> None:
    leaves = inputs(40, h=1, d=8)
    with torch.no_grad():
        for x in leaves[1:]:
            x[:, :, 30:] = torch.nan
    keep = (torch.arange(40, device=DEVICE) < 30)[None]
    out = cosformer_attention(*leaves, max_length=30, padding_mask=keep, backend="triton")
    alone = cosformer_attention(*(x[:, :, :30] for x in leaves), max_length=30, backend="triton")
    assert (out[:, :, :30] - alone).abs().max() <= 1e-6  # on a GPU the two are cut otherwise
    assert (out[:, :, 30:] == 0).all()
    dq, dk, dv = torch.autograd.grad(out.square().sum(), leaves)
    assert all((x[:, :, 30:] == 0).all() for x in (dk, dv))
    assert dq.isfinite().all()


def test_nan_is_not_hidden_by_the_activation() -> None:
    q, k, v = (x.detach() for x in inputs(5, h=1, d=8))
    k[0, 0, 2, 3] = torch.nan
    out = cosformer_attention(q, k, v, max_length=8, backend="triton")
    assert out[:, :, :2].isfinite().all()
    assert out[:, :, 2].isnan().all()


# What only a GPU has the time for.


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "h", "g"), [(1000, 4, 2), (4097, 2, 2)])
def test_long_sequences_on_a_gpu(n: int, h: int, g: int, d: int, dtype: torch.dtype) -> None:
    check_against_eager(n, dtype, b=1, h=h, g=g, d=d)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(options_by_name(1)))
def test_long_sequences_with_every_option_on_a_gpu(name: str) -> None:
    options = {"max_length": 2500, **options_by_name(1000)[name]}
    assert compare(meeting(inputs(1000, b=2, h=4, g=2, d=64)), **options) <= 2e-5
