"""cosFormer past M: an error that counts right, or outputs that stay within the values."""

import math
from collections.abc import Callable

import pytest
import torch

from farspan.ops import cosformer_attention, cosformer_attention_reference
from tests.helpers import largest_difference, softmax_inputs
from tests.ops.cosformer import PAST_M, in_pieces


@pytest.mark.parametrize("beyond", PAST_M)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_past_m_outputs_stay_within_the_values(beyond: str, dtype: torch.dtype) -> None:
    """To 8M: numerator weights never exceed denominator weights, so |o| ≤ max |v|."""
    q, k, v = (x.detach().to(dtype) for x in softmax_inputs(8 * 32, d=4))
    for inputs in ((q, k, v), (q, (k - 1).where(torch.rand_like(k) < 0.05, -1.0), v)):  # the second: few keys meet
        out = cosformer_attention(*inputs, max_length=32, beyond=beyond)
        assert out.isfinite().all()
        assert out.abs().max() <= v.abs().max() * (1 + 1e-2)


@pytest.mark.parametrize("beyond", PAST_M)
@pytest.mark.parametrize("size", [1.0, 1000.0])
@pytest.mark.parametrize("pieces", [65, 1])
@torch.no_grad()
def test_a_lone_key_two_m_away_does_not_leave_rounding_errors_divided(beyond: str, size: float, pieces: int) -> None:
    """At 2M still and wave cancel; what float32 leaves of them grows with the activations, and ε does not."""
    m = 32
    q, k = torch.rand(2, 8, 1, 2 * m + 1, 16) * size
    k[:, :, 1:] = -1.0
    v = torch.randn(8, 1, 2 * m + 1, 4)
    out, _ = in_pieces((q, k, v), pieces, max_length=m, beyond=beyond)
    assert out.abs().max() <= v[:, :, 0].abs().max() * (1 + 2**-6)
    want = cosformer_attention_reference(q.double(), k.double(), v.double(), max_length=m, beyond=beyond)
    assert (out - want).abs().max() <= 2**-6 * v.abs().max()


def test_a_rotated_denominator_past_m_would_not_be_bounded() -> None:
    """Why "raise" raises: with cos below as well, the sum of weights passes zero."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k, v = torch.ones(1, 1, 60, 1, dtype=torch.float64), torch.ones(1, 1, 60, 1, dtype=torch.float64)
    distance = torch.arange(60, dtype=torch.float64)
    assert torch.cos(math.pi * distance / 32).sum() < 0
    with pytest.raises(ValueError, match=r"M = 16 and the sequence spans 60 positions.*beyond='decoupled'"):
        cosformer_attention(q, k, v, max_length=16)


def test_decoupled_forgets_nothing_but_decay_does() -> None:
    """One key, its value 1, then nothing: what is left of it at distance 4M, where the cosine is 1 again."""
    m, far = 16, 64
    k = torch.full((1, 1, far + 1, 1), -1.0, dtype=torch.float64)
    k[0, 0, 0], k[0, 0, -1] = 1.0, 1.0
    v = torch.zeros_like(k)
    v[0, 0, 0] = 1.0
    last = {b: float(cosformer_attention(k, k, v, max_length=m, beyond=b)[0, 0, -1, 0]) for b in PAST_M}
    assert last["decoupled"] == pytest.approx(0.5)
    assert last["decay"] == pytest.approx(math.exp(-4) / (1 + math.exp(-4)))


def test_raise_counts_real_tokens_documents_and_the_stream() -> None:
    q, k, v = (x.detach() for x in softmax_inputs(40, b=1))
    options = {"max_length": 20}
    with pytest.raises(ValueError, match="max_length is M = 20 and the sequence spans 40 positions"):
        cosformer_attention(q, k, v, **options)
    cosformer_attention(q, k, v, documents=(torch.arange(40) // 20)[None], **options)
    with pytest.raises(ValueError, match="spans 21 positions"):
        cosformer_attention(q, k, v, documents=(torch.arange(40) // 21)[None], **options)
    cosformer_attention(q, k, v, padding_mask=(torch.arange(40) >= 20)[None], **options)
    with pytest.raises(ValueError, match="spans 21 positions"):
        cosformer_attention(q, k, v, padding_mask=(torch.arange(40) >= 19)[None], **options)
    _, state = in_pieces((q[:, :, :20], k[:, :, :20], v[:, :, :20]), 10, **options)
    with pytest.raises(ValueError, match="spans 21 positions"):
        cosformer_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], state=state, **options)
    cosformer_attention(q, k, v, reweight=False, **options)  # no cosine, no limit


def test_raise_counts_only_keys_that_a_causal_query_sees() -> None:
    q, k, v = softmax_inputs(10, 40)
    options = {"max_length": 20, "positions": (torch.arange(10), torch.arange(40))}
    ops = cosformer_attention, cosformer_attention_reference
    assert largest_difference(*ops, (q, k, v), **options) <= 1e-12
    with pytest.raises(ValueError, match="spans 40 positions"):
        cosformer_attention(q, k, v, causal=False, **options)


@pytest.mark.parametrize("attention", [cosformer_attention, cosformer_attention_reference])
def test_padding_gives_zeros_and_no_gradient_even_past_m(attention: Callable[..., torch.Tensor]) -> None:
    """20 tokens of M = 20 and 40 of padding, whose denominators are negative."""
    inputs = [x.detach().to(torch.float16).requires_grad_() for x in softmax_inputs(60)]
    with torch.no_grad():
        for x in inputs[1:]:
            x[:, :, 20:] = torch.nan
    out = attention(*inputs, max_length=20, padding_mask=(torch.arange(60) < 20)[None])
    assert (out[:, :, 20:] == 0).all()
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().square().sum(), inputs))
