"""Rank correlation with its interval, and the effective window."""

import math

import pytest
import torch

from farspan.analysis import effective_window, rank_correlation
from farspan.analysis.study import ranks, spearman
from farspan.analysis.window import EffectiveWindow


def test_spearman_equals_the_textbook_formula_without_ties() -> None:
    x, y = torch.randn(2, 30, dtype=torch.float64)
    d = ranks(x) - ranks(y)
    assert float(spearman(x, y)) == pytest.approx(1 - 6 * float(d.square().sum()) / (30 * (30**2 - 1)))


def test_a_monotone_relation_is_found_whatever_its_shape() -> None:
    x = torch.randn(40, dtype=torch.float64)
    result = rank_correlation(x.tolist(), (-x.exp()).tolist())
    assert result.rho == pytest.approx(-1)
    assert (result.null, result.n, result.groups) == (False, 40, 40)


def test_an_unrelated_pair_is_reported_as_null_about_as_often_as_promised() -> None:
    """95% intervals of unrelated values must hold 0 in about 19 of 20 draws."""
    nulls = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 40, generator=generator)
        nulls += rank_correlation(x.tolist(), y.tolist(), resamples=100, seed=seed).null
    assert 33 <= nulls <= 40


def test_resampling_layers_widens_the_interval_where_heads_of_a_layer_are_alike() -> None:
    """Eight layers of ten near-copies hold eight facts, not eighty."""
    layer = torch.arange(8).repeat_interleave(10)
    x = torch.randn(8)[layer] + 0.01 * torch.randn(80)
    y = torch.randn(8)[layer] + 0.01 * torch.randn(80)
    heads = rank_correlation(x.tolist(), y.tolist(), resamples=400)
    layers = rank_correlation(x.tolist(), y.tolist(), groups=layer.tolist(), resamples=400)
    assert layers.high - layers.low > 1.5 * (heads.high - heads.low)
    assert layers.groups == 8


def test_values_that_do_not_vary_have_no_correlation() -> None:
    result = rank_correlation([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert math.isnan(result.rho)
    assert result.null


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [([1, 2], [1, 2, 3], "paired"), ([1, 2], [1, 2], "at least 3"), ([1, 2, math.nan], [1, 2, 3], "finite")],
)
def test_what_cannot_be_correlated_is_refused(x: list[float], y: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_correlation(x, y)


def test_effective_window_bounds() -> None:
    edges = [64, 128, 256]
    all_found = [(d, True) for d in (10, 100, 200)]
    assert effective_window(all_found, edges) == EffectiveWindow(256, None, 3)
    none_found = [(d, False) for d in (10, 100, 200)]
    assert effective_window(none_found, edges) == EffectiveWindow(0, 0, 3)
    lucky = [(10, True), (100, False), (100, False), (100, True), (200, False)]
    assert effective_window(lucky, edges) == EffectiveWindow(64, 128, 5)
    late = [(10, True), (100, False), (200, True)]  # one find far out forbids an upper bound before it
    assert effective_window(late, edges) == EffectiveWindow(64, None, 3)
    with pytest.raises(ValueError, match="at least one"):
        effective_window([], edges)
