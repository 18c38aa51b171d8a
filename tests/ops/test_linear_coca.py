"""Linear CoCA: exact CoCA's factors as weights, on the code of cosFormer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.ops import DynamicNTK, Rotary, YaRN, linear_coca_attention, linear_coca_attention_reference
from farspan.ops.reference import scores_closed
from tests.helpers import coca_inputs, largest_difference, masks


def inputs(*shape: int, **options: int) -> tuple[torch.Tensor, ...]:
    """Return q, t > 0 and v: at t = 0 a lone key has no weight, and gradients are 1/ε."""
    q, t, v = coca_inputs(*shape, **options)
    return q, (t.detach() + 0.1).requires_grad_(), v


def test_the_weight_is_equation_17_and_the_denominator_its_value_without_angles() -> None:
    q, t, v = inputs(20, h=2, g=2)
    distance = (torch.arange(20)[:, None] - torch.arange(20)).double()
    theta = Rotary(8).frequencies()
    weights = scores_closed(q, t, distance, theta).tril()
    totals = scores_closed(q, t, distance * 0, theta).tril().sum(-1, keepdim=True)
    assert (linear_coca_attention(q, t, v, rotary=Rotary(8)) - weights @ v / totals).abs().max() <= 1e-12


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 70), min_size=1, max_size=5))
@settings(max_examples=10, deadline=None)
def test_any_split_of_a_stream_gives_the_same(seed: int, pieces: list[int]) -> None:
    torch.manual_seed(seed)
    sequences = tuple(x.detach() for x in inputs(sum(pieces), b=2))
    whole, state, parts, held = linear_coca_attention(*sequences, rotary=Rotary(8)), None, [], set()
    for q, t, v in zip(*(x.split(pieces, dim=2) for x in sequences), strict=True):
        out, state = linear_coca_attention(q, t, v, rotary=Rotary(8), state=state, return_state=True)
        parts.append(out)
        held.add(state.nbytes)
    assert (torch.cat(parts, dim=2) - whole).abs().max() <= 1e-12
    assert len(held) == 1


@pytest.mark.parametrize("scaling", [None, YaRN(4, 16)], ids=["plain", "yarn"])
def test_outputs_stay_within_the_values_at_any_length(scaling: object) -> None:
    q, t, v = (x.detach().float() for x in coca_inputs(2000, d=16))
    v[:, :, 0] = 10.0  # all that the first query sees, at distance 0
    out = linear_coca_attention(q, t, v, rotary=Rotary(16, scaling=scaling), positions=10**6)
    assert out.abs().max() <= v.abs().max() * (1 + 1e-5)


def test_features_have_the_width_of_the_head() -> None:
    _, state = linear_coca_attention(*inputs(5, d=8), rotary=Rotary(8), return_state=True)
    assert state.numerator.shape == (1, 2, 8, 8)
    assert state.denominator.shape == (1, 2, 4)


def test_frequencies_that_change_raise() -> None:
    with pytest.raises(ValueError, match="rotary must have fixed frequencies, got dynamic NTK"):
        linear_coca_attention(*inputs(5), rotary=Rotary(8, scaling=DynamicNTK(4, 8)))
    with pytest.raises(ValueError, match="rotary must have dim 8"):
        linear_coca_attention(*inputs(5), rotary=Rotary(16))
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'chunked', 'reference', got 'triton'"):
        linear_coca_attention(*inputs(5), rotary=Rotary(8), backend="triton")


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
    q, t, v = inputs = [x.to(dtype).requires_grad_() for x in (q, t, v)]
    out = linear_coca_attention(q, t.relu(), v, rotary=Rotary(64), causal=causal)
    assert (out[:, :, ::3] == 0).all()
    assert (out[:, 2:] == 0).all()  # its key head is dead throughout
    assert out.isfinite().all()
    assert out[:, :2, 2::3].abs().sum() > 0
    gradients = torch.autograd.grad(out.float().sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_small_coefficients_keep_their_digits_at_ordinary_queries(dtype: torch.dtype) -> None:
    q, t, v = (x.detach() for x in coca_inputs(8, d=64))
    t = t.abs() * 3e-3
    want = linear_coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(64))
    out = linear_coca_attention(q.to(dtype), t.to(dtype), v.to(dtype), rotary=Rotary(64))
    assert (out - want).abs().max() <= (1e-2 if dtype == torch.float16 else 1e-4) * want.abs().max()


@pytest.mark.parametrize("name", ["causal", "bidirectional", "left padding", "documents"])
def test_without_a_rotary_the_output_is_a_mean_of_values(name: str) -> None:
    options = {"rotary": None, **masks(3, 37)[name]}
    ops = linear_coca_attention, linear_coca_attention_reference
    assert largest_difference(*ops, inputs(37, b=3), **options) <= 1e-12
    q, t, _ = inputs(37)
    ones = linear_coca_attention(q, t, torch.ones(1, 2, 37, 8, dtype=q.dtype), rotary=None)
    assert (ones - 1).abs().max() <= 1e-12


def test_it_compiles_without_a_break() -> None:
    rotary = Rotary(8, scaling=YaRN(4.0, 16))

    def both(*sequences: torch.Tensor) -> torch.Tensor:
        out, state = linear_coca_attention(*(x[:, :, :30] for x in sequences), rotary=rotary, return_state=True)
        rest = linear_coca_attention(*(x[:, :, 30:] for x in sequences), rotary=rotary, state=state, return_state=True)
        return torch.cat((out, rest[0]), dim=2)

    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert largest_difference(compiled, both, inputs(50)) <= 1e-12
