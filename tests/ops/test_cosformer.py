"""cosFormer: chunks, streams and the definition agree, and what the op promises past M holds."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.ops import cosformer_attention, cosformer_attention_reference
from farspan.ops.cosformer.kernel import BEYOND
from tests.helpers import largest_difference, masks, softmax_inputs

MASKS = [name for name in masks(1, 1, 1) if "window" not in name]
PAST_M = [beyond for beyond in BEYOND if beyond != "raise"]


def differs(inputs: tuple[torch.Tensor, ...], **options: object) -> float:
    return largest_difference(cosformer_attention, cosformer_attention_reference, inputs, **options)


def in_pieces(
    inputs: tuple[torch.Tensor, ...], pieces: int | list[int], **options: object
) -> tuple[torch.Tensor, object]:
    """The outputs of a stream of calls, each continuing the last, and its state."""
    state, parts = None, []
    mask = options.pop("padding_mask", None)
    masks_ = [None] * inputs[0].shape[2] if mask is None else mask.split(pieces, dim=1)
    for q, k, v, keep in zip(*(x.split(pieces, dim=2) for x in inputs), masks_, strict=False):
        out, state = cosformer_attention(q, k, v, state=state, return_state=True, padding_mask=keep, **options)
        parts.append(out)
    return torch.cat(parts, dim=2), state


def test_two_tokens_by_hand() -> None:
    q = torch.tensor([[1.0, -5.0], [2.0, 3.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([[1.0, 1.0], [-7.0, 2.0]], dtype=torch.float64)[None, None]
    v = torch.tensor([[1.0], [10.0]], dtype=torch.float64)[None, None]
    far, near = (2 + 3) * math.cos(math.pi / 8), 6.0  # query 1 on key 0, M = 4, and on itself
    want = [1.0, (far * 1 + near * 10) / (far + near)]
    assert cosformer_attention(q, k, v, max_length=4).flatten().tolist() == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000])
def test_chunked_equals_reference_at_hostile_lengths(beyond: str, n: int) -> None:
    assert differs(softmax_inputs(n, d=4, h=2, g=2), max_length=1000, beyond=beyond) <= 1e-12


def test_chunked_equals_reference_over_many_segments() -> None:
    q, k, v = (x.detach() for x in softmax_inputs(4097, d=4, h=1, g=1))
    options = {"max_length": 5000}
    whole = cosformer_attention_reference(q, k, v, **options)
    assert (cosformer_attention(q, k, v, **options) - whole).abs().max() <= 1e-12
    for size in (64, 700):
        assert (in_pieces((q, k, v), size, **options)[0] - whole).abs().max() <= 1e-12


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", [(37, 37), (5, 37), (1, 37), (65, 130)], ids=str)
def test_chunked_equals_reference_for_every_mask(beyond: str, name: str, shape: tuple[int, int]) -> None:
    inputs = softmax_inputs(*shape, b=3)
    assert differs(inputs, max_length=130, beyond=beyond, **masks(3, *shape)[name]) <= 1e-12


@pytest.mark.parametrize(("h", "g"), [(1, 1), (4, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("options", [{}, {"reweight": False}, {"activation": "elu"}, {"beyond": "decay"}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_chunked_equals_reference_for_every_group_size(h: int, g: int, options: dict, causal: bool) -> None:
    assert differs(softmax_inputs(100, h=h, g=g), max_length=100, causal=causal, **options) <= 1e-12


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"reweight": False}], ids=str)
def test_strided_inputs_and_unequal_value_width(options: dict) -> None:
    q, k, _ = softmax_inputs(100)
    q, k = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    v = torch.randn(1, 2, 100, 24, dtype=torch.float64)[..., ::2]
    got = cosformer_attention(q, k, v, max_length=100, **options)
    assert got.shape == (1, 4, 100, 12)
    assert (got - cosformer_attention_reference(q, k, v, max_length=100, **options)).abs().max() <= 1e-12


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_stream_in_pieces_equals_the_whole(beyond: str, size: int) -> None:
    inputs = softmax_inputs(30 if size == 1 else 135, b=2)
    options = {"max_length": 150 if beyond == "raise" else 10, "beyond": beyond}
    whole = cosformer_attention(*inputs, **options)
    parts, _ = in_pieces(inputs, size, **options)
    assert (parts - whole).abs().max() <= 1e-12
    weights = torch.randn_like(whole)
    pairs = zip(*(torch.autograd.grad(out, inputs, weights) for out in (whole, parts)), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-12


@pytest.mark.parametrize("beyond", BEYOND)
def test_growing_the_text_changes_no_earlier_output(beyond: str) -> None:
    """The published code takes M from the current length; then a prefix changes by a third."""
    q, k, v = (x.detach() for x in softmax_inputs(200))
    whole = cosformer_attention(q, k, v, max_length=256, beyond=beyond)
    for n in (1, 64, 130):
        prefix = cosformer_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], max_length=256, beyond=beyond)
        assert (prefix - whole[:, :, :n]).abs().max() <= 1e-12
    published = cosformer_attention(q[:, :, :100], k[:, :, :100], v[:, :, :100], max_length=100)
    longer = cosformer_attention(q, k, v, max_length=200)[:, :, :100]
    assert (published - longer).norm() / longer.norm() > 0.02  # what tying M to the length would do


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_left_right_or_none_gives_the_same(beyond: str, causal: bool) -> None:
    q, k, v = (x.detach() for x in softmax_inputs(90))
    options = {"max_length": 100, "beyond": beyond, "causal": causal}
    alone = cosformer_attention(q, k, v, **options)
    for left, right in ((30, 0), (0, 30), (13, 70)):
        padded = [torch.nn.functional.pad(x, (0, 0, left, right), value=torch.nan) for x in (q, k, v)]
        padded[0] = padded[0].nan_to_num(3.0)
        keep = torch.nn.functional.pad(torch.ones(1, 90, dtype=torch.bool), (left, right))
        got = cosformer_attention(*padded, padding_mask=keep, **options)[:, :, left : left + 90]
        assert (got - alone).abs().max() <= 1e-12


def test_padding_in_a_stream_may_arrive_in_its_own_pieces() -> None:
    inputs = tuple(x.detach() for x in softmax_inputs(60, b=2))
    keep = torch.ones(2, 60, dtype=torch.bool)
    keep[0, :25], keep[1, 40:] = False, False
    for beyond in BEYOND:
        whole = cosformer_attention(*inputs, max_length=60, beyond=beyond, padding_mask=keep)
        parts, _ = in_pieces(inputs, 10, max_length=60, beyond=beyond, padding_mask=keep)
        assert (parts - whole).abs().max() <= 1e-12


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
@pytest.mark.parametrize("size", [1.0, 10.0, 100.0, 1000.0])
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
    """Why "raise" refuses: with cos below as well, the sum of weights passes zero."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k, v = torch.ones(1, 1, 60, 1, dtype=torch.float64), torch.ones(1, 1, 60, 1, dtype=torch.float64)
    distance = torch.arange(60, dtype=torch.float64)
    assert torch.cos(math.pi * distance / 32).sum() < 0
    with pytest.raises(ValueError, match=r"M = 16 and this text spans 60 positions.*beyond='decoupled'"):
        cosformer_attention(q, k, v, max_length=16)


def test_decoupled_and_raised_cosine_forget_nothing_but_decay_does() -> None:
    """One key, its value 1, then nothing: what is left of it at distance 4M, where the cosine is 1 again."""
    m, far = 16, 64
    k = torch.full((1, 1, far + 1, 1), -1.0, dtype=torch.float64)
    k[0, 0, 0], k[0, 0, -1] = 1.0, 1.0
    v = torch.zeros_like(k)
    v[0, 0, 0] = 1.0
    last = {b: float(cosformer_attention(k, k, v, max_length=m, beyond=b)[0, 0, -1, 0]) for b in PAST_M}
    assert last["decoupled"] == pytest.approx(0.5)
    assert last["raised-cosine"] == pytest.approx(0.5)
    assert last["decay"] == pytest.approx(math.exp(-4) / (1 + math.exp(-4)))


def test_raise_counts_real_tokens_documents_and_the_stream() -> None:
    q, k, v = (x.detach() for x in softmax_inputs(40, b=1))
    options = {"max_length": 20}
    with pytest.raises(ValueError, match="max_length is M = 20 and this text spans 40 positions"):
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
    assert differs((q, k, v), **options) <= 1e-12
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


@pytest.mark.parametrize("attention", [cosformer_attention, cosformer_attention_reference])
@pytest.mark.parametrize("n", [40, 1])
def test_padding_of_nan_has_no_gradient_under_elu(attention: Callable[..., torch.Tensor], n: int) -> None:
    inputs = softmax_inputs(n, 40)
    with torch.no_grad():
        for x in inputs[1:]:
            x[:, :, :5] = torch.nan
    out = attention(*inputs, max_length=40, activation="elu", padding_mask=(torch.arange(40) >= 5)[None])
    dq, dk, dv = torch.autograd.grad(out.square().sum(), inputs)
    assert all((x[:, :, :5] == 0).all() for x in (dk, dv))
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("beyond", BEYOND)
@torch.no_grad()
def test_state_bytes_and_outputs_do_not_depend_on_how_far_the_text_has_come(beyond: str) -> None:
    """A stream at position 1 000 and one at 1 000 000 (M is large enough for "raise")."""
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
    """Jumping from 1k to 1M generated positions: the same state, the same bytes, the right weights."""
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
    """One token at a time; turning the state in float32 at each step would drift."""
    q, k, v = (x.detach() for x in softmax_inputs(500, d=4, h=1, g=1))
    options = {"max_length": 500, "beyond": beyond}
    want = cosformer_attention(q, k, v, **options)
    got, _ = in_pieces((q.float(), k.float(), v.float()), 1, **options)
    assert (got - want).abs().max() <= 2e-5


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_length: int) -> torch.Tensor:
    """What anyone would write in the same dtype: features, products and sums in that dtype."""
    n = q.shape[2]
    angle = math.pi * torch.arange(n) / (2 * max_length)
    q_, k_ = (
        torch.cat((x.relu() * angle.cos()[:, None].to(x.dtype), x.relu() * angle.sin()[:, None].to(x.dtype)), dim=-1)
        for x in (q, k)
    )
    weights = (q_ @ k_.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [64, 257, 1000])
def test_low_precision_error_is_at_most_twice_that_of_eager(dtype: torch.dtype, n: int) -> None:
    q, k, v = (x.detach().to(dtype) for x in softmax_inputs(n, h=4, g=4, d=32))
    truth = cosformer_attention_reference(q.double(), k.double(), v.double(), max_length=n)
    ours = (cosformer_attention(q, k, v, max_length=n).double() - truth).abs()
    theirs = (eager(q, k, v, n).double() - truth).abs()
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()
    assert ours.max() <= torch.finfo(dtype).eps * truth.abs().max()  # one rounding, of the output


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_does_not_reach_the_sums(causal: bool) -> None:
    inputs = [x.detach().bfloat16().requires_grad_() for x in softmax_inputs(100)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = cosformer_attention(*inputs, max_length=100, causal=causal)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_dead_queries_and_disjoint_supports_are_finite(dtype: torch.dtype, beyond: str, size: float) -> None:
    q, k, v = (x.detach().to(dtype) * size for x in softmax_inputs(70, d=8, h=2, g=2))
    q[:, :, ::3] = -q[:, :, ::3].abs()  # nothing after the ReLU
    q[:, 1, :, :4], k[:, 1, :, 4:] = -1, -1  # no feature in common
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = cosformer_attention(*inputs, max_length=70, beyond=beyond)
    assert out.isfinite().all()
    assert (out[:, :, ::3] == 0).all()
    assert (out[:, 1] == 0).all()
    assert out[:, 0].abs().sum() > 0
    gradients = torch.autograd.grad(out.float().sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("beyond", BEYOND)
def test_proportional_cross_attention_spreads_the_queries(beyond: str) -> None:
    q, _, _ = softmax_inputs(12)
    _, k, v = softmax_inputs(30)
    options = {"max_length": 30, "beyond": beyond, "causal": False}
    assert differs((q, k, v), positions="proportional", **options) <= 1e-12
    assert differs((k.repeat(1, 2, 1, 1), k[:, :, :12], v[:, :, :12]), positions="proportional", **options) <= 1e-12
    same, plain = (cosformer_attention(k, k, v, positions=p, **options) for p in ("proportional", None))
    assert (same - plain).abs().max() <= 1e-12
    # the middle query of an odd number looks most at the middle key
    ones, each = torch.ones(1, 1, 15, 1, dtype=torch.float64), torch.eye(15, dtype=torch.float64)[None, None]
    out = cosformer_attention(ones[:, :, :5], ones, each, positions="proportional", **options)
    assert out[0, 0, 2].argmax() == 7


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_may_be_placed_freely(beyond: str, causal: bool) -> None:
    q, _, _ = softmax_inputs(70, b=2)
    _, k, v = softmax_inputs(30, b=2)
    query = (torch.arange(70) * 2 + torch.tensor([[0], [5]])) // 3
    key = torch.arange(30)[None] + torch.tensor([[3], [0]])
    keep = torch.rand(2, 30) < 0.7
    options = {"max_length": 60, "beyond": beyond, "causal": causal, "positions": (query, key)}
    assert differs((q, k, v), **options) <= 1e-12
    assert differs((q, k, v), padding_mask=keep, **options) <= 1e-12


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, int, int, int, int, dict[str, object]]:
    """Any mode, activation, group size, length, mask and positions together."""
    g, times = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    m = draw(st.sampled_from([1, 2, 17, 63, 64, 65, 130]))
    n, b = draw(st.integers(1, m)), draw(st.integers(1, 3))
    options: dict[str, object] = {
        "max_length": draw(st.sampled_from([200, 333])),
        "beyond": draw(st.sampled_from(BEYOND)),
        "activation": draw(st.sampled_from(["relu", "elu"])),
        "reweight": draw(st.sampled_from([True, True, False])),
        "causal": draw(st.booleans()),
    }
    pad = torch.tensor([draw(st.integers(0, m - 1)) for _ in range(b)])[:, None]
    if draw(st.booleans()):
        options["padding_mask"] = torch.arange(m)[None] >= pad
        options["positions"] = draw(st.sampled_from([None, 3, torch.arange(m)[None] - pad]))
    if draw(st.booleans()):
        options["documents"] = (torch.arange(m) // draw(st.sampled_from([1, 5, 30, 70]))).expand(b, m)
    elif draw(st.booleans()):
        options["positions"] = (torch.arange(m - n, m)[None], torch.arange(m)[None])
    return b, times * g, g, n, m, options


@given(st.integers(0, 2**32 - 1), calls(), st.sampled_from([16, 64]), st.sampled_from([1, 2**12, 2**19]))
@settings(max_examples=40, deadline=None)
def test_chunked_equals_reference_for_any_combination(seed: int, call: tuple, chunk: int, elements: int) -> None:
    torch.manual_seed(seed)
    b, h, g, n, m, options = call
    inputs = softmax_inputs(n, m, b=b, h=h, g=g)
    with torch.no_grad():
        for x in inputs[:2]:
            x += 0.5  # a row that meets its keys in rounding error only has no digits to compare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farspan.ops.cosformer.chunked.CHUNK", chunk)
        patch.setattr("farspan.ops.cosformer.chunked.ELEMENTS", elements)
        assert differs(inputs, **options) <= 1e-11


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from(BEYOND))
@settings(max_examples=30, deadline=None)
def test_any_cutting_of_a_stream_gives_the_same(seed: int, pieces: list[int], beyond: str) -> None:
    torch.manual_seed(seed)
    inputs = tuple(x.detach() for x in softmax_inputs(sum(pieces), b=2))
    options = {"max_length": 300 if beyond == "raise" else 11, "beyond": beyond}
    whole = cosformer_attention(*inputs, **options)
    assert (in_pieces(inputs, pieces, **options)[0] - whole).abs().max() <= 1e-12


def test_a_state_can_be_asked_by_more_keys_than_queries_and_selected() -> None:
    q, k, v = (x.detach() for x in softmax_inputs(40, b=3))
    whole = cosformer_attention(q, k, v, max_length=64)
    _, state = cosformer_attention(*(x[:, :, :15] for x in (q, k, v)), max_length=64, return_state=True)
    end = cosformer_attention(q[:, :, -2:], k[:, :, 15:], v[:, :, 15:], max_length=64, state=state)
    assert (end - whole[:, :, -2:]).abs().max() <= 1e-12
    rows = torch.tensor([2, 0])
    chosen = cosformer_attention(*(x[rows, :, 15:] for x in (q, k, v)), max_length=64, state=state.select(rows))
    assert (chosen - whole[rows, :, 15:]).abs().max() <= 1e-12


def test_training_keeps_no_more_than_a_state_a_segment() -> None:
    """Saved for backward: inputs, outputs, and the sums at each segment; never N×2d×d, nor the features."""
    q, k, v = (x.float().detach().requires_grad_() for x in softmax_inputs(4096, h=2, g=2, d=32))
    saved: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        cosformer_attention(q, k, v, max_length=4096)
    assert sum(saved.values()) <= 2 * (q.nbytes + k.nbytes + v.nbytes)


@pytest.mark.slow
def test_it_compiles_without_a_graph_break() -> None:
    inputs = softmax_inputs(200, b=2)
    compiled = torch.compile(cosformer_attention, fullgraph=True, backend="aot_eager")
    assert largest_difference(compiled, cosformer_attention, inputs, max_length=200, beyond="decay") <= 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length must be a whole number ≥ 1, the M of the model, got 0"),
        ({"max_length": 2.5}, "max_length must be .* got 2.5"),
        ({"beyond": "raised"}, "beyond must be one of .* got 'raised'; did you mean 'raise"),
        ({"activation": "gelu"}, "activation must be one of 'relu', 'elu', got 'gelu'"),
        ({"backend": "chunkd"}, "did you mean 'chunked'"),
        ({"causal": False, "return_state": True}, "state needs causal=True"),
        ({"backend": "reference", "return_state": True}, "backend='reference' keeps no state"),
        ({"positions": "even", "causal": False}, "positions given as a word must be 'proportional'"),
        ({"positions": "proportional"}, "with causal=False, got 'proportional' and causal=True"),
        ({"documents": torch.tensor([[0, 1, 0, 1, 1]])}, "documents must be adjacent runs .* comes back in row 0"),
        ({"documents": torch.zeros(1, 5, dtype=torch.long), "return_state": True}, "documents cannot be combined"),
        ({"positions": (torch.arange(5), torch.arange(5)), "return_state": True}, "state needs aligned positions"),
        ({"padding_mask": torch.ones(1, 4, dtype=torch.bool)}, r"padding_mask must have shape .* \(1, 5\)"),
    ],
)
def test_bad_calls_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosformer_attention(*softmax_inputs(5), **{"max_length": 8, **options})


def test_a_stream_that_goes_back_is_refused() -> None:
    q, k, v = softmax_inputs(5)
    _, state = cosformer_attention(q, k, v, max_length=2, beyond="decay", positions=10_000, return_state=True)
    for back in (0, torch.arange(5)):
        with pytest.raises(ValueError, match=r"must not go back .* stands at 10004, got a step of -10004; leave"):
            cosformer_attention(q, k, v, max_length=2, beyond="decay", positions=back, state=state)


def test_positions_of_two_and_three_rows_are_refused() -> None:
    places = torch.arange(5).expand(2, 5), torch.arange(5).expand(3, 5)
    with pytest.raises(
        ValueError, match="positions must have 1 or 3 rows, like the batch, got 2 of queries, 3 of keys"
    ):
        cosformer_attention(*softmax_inputs(5, b=3), max_length=8, positions=places)


def test_a_state_of_another_attention_is_refused() -> None:
    inputs = softmax_inputs(5)
    _, state = cosformer_attention(*inputs, max_length=16, return_state=True)
    with pytest.raises(
        ValueError, match=r"state was made by 'cosformer, M = 16.* cannot continue as 'cosformer, M = 32"
    ):
        cosformer_attention(*inputs, max_length=32, state=state)
    with pytest.raises(ValueError, match="state must have batch, key heads and value width"):
        cosformer_attention(*softmax_inputs(5, b=2), max_length=16, state=state)
