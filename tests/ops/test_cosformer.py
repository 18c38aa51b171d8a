"""cosFormer and linear CoCA: chunks, streams and the definition agree, in any dtype and past M."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farspan.ops import (
    Rotary,
    YaRN,
    cosformer_attention,
    cosformer_attention_reference,
    linear_coca_attention,
    linear_coca_attention_reference,
)
from farspan.ops.cosformer import BEYOND
from farspan.ops.device import why_not_triton
from farspan.ops.reference import scores_closed
from tests.helpers import coca_inputs, largest_difference, softmax_inputs
from tests.ops.cases import inputs as meeting_inputs
from tests.ops.cosformer import PAST_M, check_against_eager, in_pieces, saved_bytes
from tests.ops.kernels import DEVICE


def test_two_tokens_by_hand() -> None:
    q = torch.tensor([[1.0, -5.0], [2.0, 3.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([[1.0, 1.0], [-7.0, 2.0]], dtype=torch.float64)[None, None]
    v = torch.tensor([[1.0], [10.0]], dtype=torch.float64)[None, None]
    far, near = (2 + 3) * math.cos(math.pi / 8), 6.0  # query 1 on key 0, M = 4, and on itself
    want = [1.0, (far * 1 + near * 10) / (far + near)]
    assert cosformer_attention(q, k, v, max_length=4).flatten().tolist() == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [64, 257])
def test_errors_are_at_most_twice_those_of_eager_and_of_the_output_one_rounding(dtype: torch.dtype, n: int) -> None:
    check_against_eager(n, dtype, "chunked", h=4, g=4, d=32)
    q, k, v = (x.detach().to(dtype) for x in softmax_inputs(n, h=4, g=4, d=32))
    truth = cosformer_attention_reference(q.double(), k.double(), v.double(), max_length=n)
    error = (cosformer_attention(q, k, v, max_length=n).double() - truth).abs().max()
    assert error <= torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_does_not_reach_the_sums(causal: bool) -> None:
    inputs = [x.detach().bfloat16().requires_grad_() for x in softmax_inputs(100)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = cosformer_attention(*inputs, max_length=100, causal=causal)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


NEEDS_TRITON = pytest.mark.skipif(why_not_triton(DEVICE) is not None, reason="needs triton (pip install farspan[gpu])")


@pytest.mark.parametrize(
    ("beyond", "backend", "dtype"),
    [
        *((beyond, "auto", dtype) for beyond in BEYOND for dtype in (torch.float16, torch.bfloat16, torch.float32)),
        *(pytest.param("raise", "triton", x, marks=NEEDS_TRITON) for x in (torch.bfloat16, torch.float32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1e-3, 100.0])
def test_dead_queries_and_disjoint_supports_are_finite(
    beyond: str, backend: str, dtype: torch.dtype, size: float
) -> None:
    n, device = (40, DEVICE) if backend == "triton" else (70, "cpu")
    q, k, v = (x.detach().to(device, dtype) * size for x in softmax_inputs(n, d=8, h=2, g=2))
    q[:, :, ::3] = -q[:, :, ::3].abs()  # nothing after the ReLU
    q[:, 1, :, :4], k[:, 1, :, 4:] = -1, -1  # no feature in common
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = cosformer_attention(*inputs, max_length=70, beyond=beyond, backend=backend)
    assert out.isfinite().all()
    assert (out[:, :, ::3] == 0).all()
    assert (out[:, 1] == 0).all()
    assert out[:, 0].abs().sum() > 0
    gradients = torch.autograd.grad(out.float().sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)


def test_training_keeps_one_state_per_segment() -> None:
    """Saved for backward: inputs, outputs, and the sums of each segment; neither N×2d×d nor the features."""
    q, k, v = (x.float().detach().requires_grad_() for x in softmax_inputs(4096, h=2, g=2, d=32))
    saved = saved_bytes(lambda: cosformer_attention(q, k, v, max_length=4096))
    assert saved <= 2 * (q.nbytes + k.nbytes + v.nbytes)


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


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("activation", ["relu", "elu"])
def test_padding_in_a_stream_changes_nothing_but_the_position(beyond: str, activation: str) -> None:
    """Whatever it holds, and in pieces of its own."""
    inputs, keep = softmax_inputs(60, b=2), torch.ones(2, 60, dtype=torch.bool)
    keep[0, :25], keep[1, 40:] = False, False
    hidden = ~keep[:, None, :, None]
    with torch.no_grad():
        for x, value in zip(inputs[1:], (torch.nan, torch.inf), strict=True):
            x.masked_fill_(hidden, value)
    options: dict[str, Any] = {"max_length": 60, "beyond": beyond, "activation": activation, "padding_mask": keep}
    whole = cosformer_attention(*inputs, **options)
    for pieces in (10, 1):
        parts, state = in_pieces(inputs, pieces, **options)
        assert (parts - whole).abs().max() <= 1e-12
        assert all(x.isfinite().all() for x in state[:5])
        gradients = torch.autograd.grad(parts.square().sum(), inputs)
        assert all(x.isfinite().all() for x in gradients)
        assert all((x.masked_fill(~hidden, 0.0) == 0).all() for x in gradients[1:])


@pytest.mark.parametrize("beyond", BEYOND)
@torch.no_grad()
def test_state_bytes_and_outputs_do_not_depend_on_the_position(beyond: str) -> None:
    """Streams from 1k, from 1M, and up to the largest position; M is large enough for "raise"."""
    inputs = tuple(x.detach() for x in softmax_inputs(100))
    held, outputs = [], []
    for begin in (1_000, 1_000_000, 2**31 - 1000):
        out, state = cosformer_attention(*inputs, max_length=256, beyond=beyond, positions=begin, return_state=True)
        more = cosformer_attention(*inputs, max_length=256, beyond=beyond, state=state)
        held.append(state.nbytes)
        outputs.append(torch.cat((out, more), dim=2))
        assert sum(x.untyped_storage().nbytes() for x in state[:5]) == state.nbytes  # not views of something larger
    assert len(set(held)) == 1
    assert max(float((x - outputs[0]).abs().max()) for x in outputs) <= 1e-12


@pytest.mark.parametrize("beyond", PAST_M)
@torch.no_grad()
def test_a_long_gap_in_a_stream_keeps_the_state_exact(beyond: str) -> None:
    """Jump by 1M positions: the same bytes, the right weights."""
    q, k, v = (x.detach() for x in softmax_inputs(20))
    positions = torch.cat((torch.arange(10), torch.arange(10) + 1_000_000))
    want = cosformer_attention_reference(q, k, v, max_length=37, beyond=beyond, positions=positions)
    options = {"max_length": 37, "beyond": beyond, "return_state": True}
    old, state = cosformer_attention(*(x[:, :, :10] for x in (q, k, v)), **options)
    new, after = cosformer_attention(*(x[:, :, 10:] for x in (q, k, v)), state=state, positions=1_000_000, **options)
    assert (torch.cat((old, new), dim=2) - want).abs().max() <= 1e-12
    assert state.nbytes == after.nbytes


@pytest.mark.parametrize("beyond", BEYOND)
@torch.no_grad()
def test_float32_stays_exact_over_many_steps(beyond: str) -> None:
    """One token at a time; rotating the state in float32 at each step would drift."""
    q, k, v = (x.detach() for x in softmax_inputs(300, d=4, h=1, g=1))
    options = {"max_length": 500, "beyond": beyond}
    want = cosformer_attention(q, k, v, **options)
    got, _ = in_pieces((q.float(), k.float(), v.float()), 1, **options)
    assert (got - want).abs().max() <= 2e-5


@pytest.mark.parametrize("kind", [*BEYOND, "linear coca"])
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 70), min_size=1, max_size=5))
@example(0, [1] * 20)
@example(0, [64, 64, 7])
@settings(max_examples=8, deadline=None)
def test_any_split_of_a_stream_gives_the_same_with_gradients(kind: str, seed: int, pieces: list[int]) -> None:
    torch.manual_seed(seed)
    op: Callable[..., Any] = cosformer_attention
    options: dict[str, Any] = {"max_length": 400 if kind == "raise" else 11, "beyond": kind}
    if kind == "linear coca":
        op, options = linear_coca_attention, {"rotary": Rotary(8)}
    inputs = meeting_inputs("linear coca" if kind == "linear coca" else "raise", sum(pieces), sum(pieces), b=2)
    whole, (parts, _) = op(*inputs, **options), in_pieces(inputs, pieces, op, **options)
    assert (parts - whole).abs().max() <= 1e-12
    weights = torch.randn_like(whole)
    pairs = zip(*(torch.autograd.grad(out, inputs, weights) for out in (whole, parts)), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-11


def test_a_stream_that_goes_back_raises() -> None:
    q, k, v = softmax_inputs(5)
    _, state = cosformer_attention(q, k, v, max_length=2, beyond="decay", positions=10_000, return_state=True)
    for back in (0, torch.arange(5)):
        with pytest.raises(ValueError, match=r"must not go back behind the state at 10004, got a step of -10004; omit"):
            cosformer_attention(q, k, v, max_length=2, beyond="decay", positions=back, state=state)


def test_a_state_of_another_attention_raises() -> None:
    inputs = softmax_inputs(5)
    _, state = cosformer_attention(*inputs, max_length=16, return_state=True)
    with pytest.raises(ValueError, match=r"state was made by cosformer, M = 16.* cannot continue as cosformer, M = 32"):
        cosformer_attention(*inputs, max_length=32, state=state)
    with pytest.raises(ValueError, match="state must have batch, key heads and value width"):
        cosformer_attention(*softmax_inputs(5, b=2), max_length=16, state=state)


def test_a_detached_state_stops_the_gradient() -> None:
    q, k, v = softmax_inputs(10)
    _, state = cosformer_attention(q, k, v, max_length=64, return_state=True)
    assert state.numerator.requires_grad
    later = softmax_inputs(3)
    kept, cut = (cosformer_attention(*later, max_length=64, state=s) for s in (state, state.detach()))
    assert torch.equal(kept, cut)
    assert torch.autograd.grad(kept.sum(), k)[0].abs().sum() > 0
    assert torch.autograd.grad(cut.sum(), (*later, k), allow_unused=True)[-1] is None


def inputs_of_linear_coca(*shape: int, **options: int) -> tuple[torch.Tensor, ...]:
    """Return q, t > 0 and v: at t = 0 a lone key has no weight, and gradients are 1/ε."""
    q, t, v = coca_inputs(*shape, **options)
    return q, (t.detach() + 0.1).requires_grad_(), v


def test_the_weight_is_equation_17_and_the_denominator_its_value_without_angles() -> None:
    q, t, v = inputs_of_linear_coca(20, h=2, g=2)
    distance = (torch.arange(20)[:, None] - torch.arange(20)).double()
    theta = Rotary(8).frequencies()
    weights = scores_closed(q, t, distance, theta).tril()
    totals = scores_closed(q, t, distance * 0, theta).tril().sum(-1, keepdim=True)
    assert (linear_coca_attention(q, t, v, rotary=Rotary(8)) - weights @ v / totals).abs().max() <= 1e-12


@pytest.mark.parametrize("scaling", [None, YaRN(4, 16)], ids=["plain", "yarn"])
def test_outputs_stay_within_the_values_at_any_length(scaling: object) -> None:
    q, t, v = (x.detach().float() for x in coca_inputs(2000, d=16))
    v[:, :, 0] = 10.0  # all that the first query sees, at distance 0
    out = linear_coca_attention(q, t, v, rotary=Rotary(16, scaling=scaling), positions=10**6)
    assert out.abs().max() <= v.abs().max() * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 16.0])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_finite_where_keys_are_dead(dtype: torch.dtype, size: float, causal: bool) -> None:
    q, t, v = (x.detach() for x in coca_inputs(70, d=64))
    q, t = q * size, t * size
    t[:, :, :2], t[:, 1] = -1.0, -1.0
    if dtype != torch.float16:
        t[:, 0, 0] = 1e-7
    q[:, :, ::3] = 0.0
    q, t, v = inputs_of_linear_coca = [x.to(dtype).requires_grad_() for x in (q, t, v)]
    out = linear_coca_attention(q, t.relu(), v, rotary=Rotary(64), causal=causal)
    assert (out[:, :, ::3] == 0).all()
    assert (out[:, 2:] == 0).all()  # its key head is dead throughout
    assert out.isfinite().all()
    assert out[:, :2, 2::3].abs().sum() > 0
    gradients = torch.autograd.grad(out.float().sum(), inputs_of_linear_coca)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_small_coefficients_keep_their_digits_at_ordinary_queries(dtype: torch.dtype) -> None:
    q, t, v = (x.detach() for x in coca_inputs(8, d=64))
    t = t.abs() * 3e-3
    want = linear_coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(64))
    out = linear_coca_attention(q.to(dtype), t.to(dtype), v.to(dtype), rotary=Rotary(64))
    assert (out - want).abs().max() <= (1e-2 if dtype == torch.float16 else 1e-4) * want.abs().max()


@pytest.mark.parametrize(
    ("op", "options"),
    [
        (linear_coca_attention, {"rotary": Rotary(8, scaling=YaRN(4.0, 16))}),
        (cosformer_attention, {"max_length": 200, "beyond": "decay"}),
    ],
    ids=["linear coca", "cosformer"],
)
def test_it_compiles_without_a_break(op: Callable[..., Any], options: dict[str, Any]) -> None:
    def both(*sequences: torch.Tensor) -> torch.Tensor:
        out, state = op(*(x[:, :, :30] for x in sequences), **options, return_state=True)
        rest, _ = op(*(x[:, :, 30:] for x in sequences), **options, state=state, return_state=True)
        return torch.cat((out, rest), dim=2)

    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    leaves = (inputs_of_linear_coca if op is linear_coca_attention else softmax_inputs)(50)
    assert largest_difference(compiled, both, leaves) <= 1e-12
