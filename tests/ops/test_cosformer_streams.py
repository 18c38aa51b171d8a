"""cosFormer's state: a stream of calls equals one call, however it is split and at any position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.ops import cosformer_attention, cosformer_attention_reference
from farspan.ops.cosformer import BEYOND
from farspan.ops.masking import make_mask
from tests.helpers import softmax_inputs
from tests.ops.cosformer import PAST_M, in_pieces


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("size", [1, 64])
def test_a_stream_in_pieces_equals_the_whole(beyond: str, size: int) -> None:
    inputs = softmax_inputs(20 if size == 1 else 135, b=2)
    options = {"max_length": 150 if beyond == "raise" else 10, "beyond": beyond}
    whole = cosformer_attention(*inputs, **options)
    parts, _ = in_pieces(inputs, size, **options)
    assert (parts - whole).abs().max() <= 1e-12
    weights = torch.randn_like(whole)
    pairs = zip(*(torch.autograd.grad(out, inputs, weights) for out in (whole, parts)), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-12


def test_padding_in_a_stream_may_arrive_in_its_own_pieces() -> None:
    inputs = tuple(x.detach() for x in softmax_inputs(60, b=2))
    keep = torch.ones(2, 60, dtype=torch.bool)
    keep[0, :25], keep[1, 40:] = False, False
    for beyond in BEYOND:
        whole = cosformer_attention(*inputs, max_length=60, beyond=beyond, padding_mask=keep)
        parts, _ = in_pieces(inputs, 10, max_length=60, beyond=beyond, padding_mask=keep)
        assert (parts - whole).abs().max() <= 1e-12


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


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from(BEYOND))
@settings(max_examples=15, deadline=None)
def test_any_split_of_a_stream_gives_the_same(seed: int, pieces: list[int], beyond: str) -> None:
    torch.manual_seed(seed)
    inputs = tuple(x.detach() for x in softmax_inputs(sum(pieces), b=2))
    options = {"max_length": 300 if beyond == "raise" else 11, "beyond": beyond}
    whole = cosformer_attention(*inputs, **options)
    assert (in_pieces(inputs, pieces, **options)[0] - whole).abs().max() <= 1e-12


def test_a_state_takes_more_keys_than_queries() -> None:
    q, k, v = (x.detach() for x in softmax_inputs(40, b=3))
    whole = cosformer_attention(q, k, v, max_length=64)
    _, state = cosformer_attention(*(x[:, :, :15] for x in (q, k, v)), max_length=64, return_state=True)
    end = cosformer_attention(q[:, :, -2:], k[:, :, 15:], v[:, :, 15:], max_length=64, state=state)
    assert (end - whole[:, :, -2:]).abs().max() <= 1e-12


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


@pytest.mark.parametrize("beyond", BEYOND)
def test_a_mask_of_the_new_tokens_continues_a_stream(beyond: str) -> None:
    """The mask has the positions of the new tokens; rows differ in their padding."""
    q, k, v = (x.detach() for x in softmax_inputs(30, b=2))
    keep = torch.arange(30)[None] >= torch.tensor([[0], [12]])
    positions = torch.arange(30)[None] - torch.tensor([[0], [12]])
    options = {"max_length": 30, "beyond": beyond}
    whole = cosformer_attention(q, k, v, padding_mask=keep, positions=positions, **options)
    state, parts, begin = None, [], 0
    for end in (10, 11, 25, 30):
        part = slice(begin, end)
        mask = make_mask(
            end - begin, end - begin, 2, q.device, positions=positions[:, part], padding_mask=keep[:, part]
        )
        new = (x[:, :, part] for x in (q, k, v))
        out, state = cosformer_attention(*new, mask=mask, state=state, return_state=True, **options)
        parts.append(out)
        begin = end
    assert (torch.cat(parts, dim=2) - whole).abs().max() <= 1e-12


@pytest.mark.parametrize("activation", ["relu", "elu"])
def test_a_padded_step_of_nan_changes_nothing_but_the_position(activation: str) -> None:
    inputs = softmax_inputs(12)
    with torch.no_grad():
        inputs[1][:, :, 7], inputs[2][:, :, 7] = torch.nan, torch.inf
    keep = (torch.arange(12) != 7)[None]
    options = {"max_length": 20, "activation": activation, "padding_mask": keep}
    parts, state = in_pieces(inputs, 1, **options)
    whole = cosformer_attention(*inputs, **options)
    assert (parts - whole).abs().max() <= 1e-12
    assert all(x.isfinite().all() for x in state[:5])
    gradients = torch.autograd.grad(parts.square().sum(), inputs)
    assert all(x.isfinite().all() for x in gradients)
    assert all((x[:, :, 7] == 0).all() for x in gradients[1:])


def test_a_detached_state_stops_the_gradient() -> None:
    q, k, v = softmax_inputs(10)
    _, state = cosformer_attention(q, k, v, max_length=64, return_state=True)
    assert state.numerator.requires_grad
    later = softmax_inputs(3)
    kept, cut = (cosformer_attention(*later, max_length=64, state=s) for s in (state, state.detach()))
    assert torch.equal(kept, cut)
    assert torch.autograd.grad(kept.sum(), k)[0].abs().sum() > 0
    assert torch.autograd.grad(cut.sum(), (*later, k), allow_unused=True)[-1] is None
