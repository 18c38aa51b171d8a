"""CoCA and its polar form: the dot-product form equals the equations, which have the properties of the paper."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.ops import Rotary, coca_attention, coca_attention_reference, coca_features, pope_attention
from farspan.ops.masking import AttentionMask, make_mask
from farspan.ops.reference import rotations, scores_closed, scores_exact, scores_slack
from tests.helpers import coca_inputs

FORMS = ["exact", "slack"]
CPU = torch.device("cpu")


def features(q: torch.Tensor, t: torch.Tensor, mask: AttentionMask, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    angles = mask.angles(Rotary(q.shape[-1]))
    return coca_features(q, t, angles.query(q.dtype), angles.key(q.dtype), form=form)


def test_equation_17_is_equation_9() -> None:
    q, t, _ = coca_inputs(31)
    rotary, mask = Rotary(8), make_mask(31, 31, 1, CPU)
    distance = torch.arange(31)[:, None] - torch.arange(31.0, dtype=torch.float64)
    nine = scores_exact(q, t, *rotations(rotary, mask, 8, q.dtype))
    assert (nine - scores_closed(q, t, distance, rotary.frequencies())).abs().max() <= 1e-12


def test_strict_makes_slack_and_exact_coincide() -> None:
    """Theorem 1: with q tied (Eq. 11), Eq. 10 is Eq. 9."""
    q, t, v = coca_inputs(40)
    tied = torch.cat((q[..., :4], q[..., :4]), dim=-1)
    exact, slack = (coca_attention(tied, t, v, rotary=Rotary(8), form=form) for form in FORMS)
    assert (exact - slack).abs().max() <= 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_shifting_all_positions_changes_slack_but_not_exact(form: str) -> None:
    q, t, _ = coca_inputs(50, h=2)
    scores = []
    for start in (0, 1000):
        q_, k_ = features(q, t, make_mask(50, 50, 1, CPU, positions=start), form)
        scores.append(q_ @ k_.mT)
    change = (scores[0] - scores[1]).abs().max()
    assert change <= 1e-9 if form == "exact" else change > 0.1


def test_slack_scores_are_the_published_expansion() -> None:
    """t/2·{(a+b)²cosΔ - (b²-a²)sinΔ + (a-b)²cosΣ + (b²-a²)sinΣ}: the Σ terms are the absolute ones."""
    q, t, _ = coca_inputs(9, h=2, g=2)
    theta, at = Rotary(8).frequencies(), torch.arange(9.0, dtype=torch.float64)
    delta, total = ((at[:, None, None] + sign * at[None, :, None]) * theta for sign in (-1, 1))
    a, b = (x[:, :, :, None] for x in q.chunk(2, dim=-1))
    absolute = (a - b) ** 2 * total.cos() + (b * b - a * a) * total.sin()
    relative = (a + b) ** 2 * delta.cos() - (b * b - a * a) * delta.sin()
    expansion = (t[:, :, None] / 2 * (relative + absolute)).sum(-1)
    rotated = rotations(Rotary(8), make_mask(9, 9, 1, CPU), 8, q.dtype)
    assert (expansion - scores_slack(q, t, *rotated)).abs().max() <= 1e-12


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
@settings(max_examples=25, deadline=None)
def test_initial_angle_is_zero_and_every_term_falls_until_pi(seed: int, q_size: float, t_size: float) -> None:
    """Check the products of the features, pair by pair: a query at distances 0 … 63 from one key."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 1, 1, 16, generator=generator, dtype=torch.float64) * q_size
    t = torch.rand(1, 1, 1, 8, generator=generator, dtype=torch.float64) * t_size
    pair = (torch.arange(64), torch.zeros(1, dtype=torch.long))
    q_, k_ = features(q.expand(1, 1, 64, 16), t, make_mask(64, 1, 1, CPU, positions=pair), "exact")
    terms = (q_ * k_)[0, 0].unflatten(-1, (2, 8)).sum(-2)  # (distance, pair)
    square = q[0, 0, 0].unflatten(-1, (2, 8)).square().sum(0)
    assert torch.allclose(terms[0], t[0, 0, 0] * square, rtol=1e-12)  # cos of the initial angle is 1
    within = torch.arange(1, 64)[:, None] * Rotary(16).frequencies() <= math.pi
    falls = terms[1:] <= terms[:-1] + 1e-9 * terms[0]
    assert falls[within].all()
    assert (terms <= terms[0] * (1 + 1e-12)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1.0, 300.0, 1000.0])
def test_float16_does_not_overflow_where_squares_would(form: str, size: float) -> None:
    q, t, v = coca_inputs(40, h=4, g=2, d=16, dtype=torch.float32)
    q, t, v = (q * size).half().detach(), (t / size**2).half().detach(), v.half().detach()
    q.requires_grad_()
    out = coca_attention(q, t, v, rotary=Rotary(16), form=form)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16), form=form)
    assert (out.double() - truth).abs().max() <= 0.05 * truth.abs().max()


def polar_inputs(n: int, m: int | None = None, r: int = 8, b: int = 1) -> tuple[torch.Tensor, ...]:
    m = m or n
    shapes = ((b, 4, n, r), (b, 2, m, r), (b, 2, m, 6), (4, r))
    q, k, v, phase = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    return tuple(x.requires_grad_() for x in (q.abs(), k.abs(), v, phase))


def test_one_score_is_the_cosine_of_the_formula() -> None:
    q, k, v, phase = (x.detach() for x in polar_inputs(2, r=1))
    out = pope_attention(q, k, v, rotary=Rotary(2), phase=phase, scale=1.0)
    for head in range(4):
        near = q[0, head, 1, 0] * k[0, head // 2, 1, 0] * math.cos(float(phase[head, 0]))
        far = q[0, head, 1, 0] * k[0, head // 2, 0, 0] * math.cos(1.0 + float(phase[head, 0]))
        weights = torch.stack((far, near)).softmax(0)
        assert torch.allclose(out[0, head, 1], weights @ v[0, head // 2])


def test_magnitudes_of_squares_make_exact_coca() -> None:
    """Eq. 17 is the polar score with ‖q_j‖² as the magnitudes of the query."""
    q, t, v = torch.randn(1, 4, 9, 8).double(), torch.rand(1, 2, 9, 4).double(), torch.randn(1, 2, 9, 8).double()
    a, b = q.chunk(2, dim=-1)
    polar = pope_attention(a**2 + b**2, t, v, rotary=Rotary(8), scale=8**-0.5)
    assert torch.allclose(polar, coca_attention(q, t, v, rotary=Rotary(8)), atol=1e-12)
