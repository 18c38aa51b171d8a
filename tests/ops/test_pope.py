"""Polar attention: its formula, and what sets it apart."""

import math

import pytest
import torch

from farspan.ops import Rotary, coca_attention, pope_attention


def inputs(n: int, m: int | None = None, r: int = 8, b: int = 1) -> tuple[torch.Tensor, ...]:
    m = m or n
    shapes = ((b, 4, n, r), (b, 2, m, r), (b, 2, m, 6), (4, r))
    q, k, v, phase = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    return tuple(x.requires_grad_() for x in (q.abs(), k.abs(), v, phase))


def test_one_score_is_the_cosine_of_the_formula() -> None:
    q, k, v, phase = (x.detach() for x in inputs(2, r=1))
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


def test_only_distances_count() -> None:
    q, k, v, phase = inputs(30)
    here, there = (pope_attention(q, k, v, rotary=Rotary(16), phase=phase, positions=start) for start in (0, 1000))
    assert (here - there).abs().max() <= 1e-9


def test_bad_input_gets_one_line() -> None:
    q, k, v, phase = inputs(5)
    with pytest.raises(ValueError, match="phase needs angles, got rotary=None"):
        pope_attention(q, k, v, rotary=None, phase=phase)
    with pytest.raises(ValueError, match=r"^phase must have shape \(4, 8\), one per head and frequency, got \(3, 8\)"):
        pope_attention(q, k, v, rotary=Rotary(16), phase=phase[:3])
    with pytest.raises(ValueError, match="rotary must have dim 16, twice the width of q, got 8"):
        pope_attention(q, k, v, rotary=Rotary(8))
