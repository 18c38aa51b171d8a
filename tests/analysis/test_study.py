"""Rank correlation with its interval."""

import math
from typing import Any

import pytest
import torch

from farspan.analysis import rank_correlation


def correlation(x: list[float], y: list[float]) -> dict[str, Any]:
    return rank_correlation(torch.tensor(x)[:, None], torch.tensor(y)[:, None])


def test_a_monotone_relation_is_found_whatever_its_shape_and_ties_share_their_rank() -> None:
    x = torch.randn(40, dtype=torch.float64)
    result = rank_correlation(x[:, None], -x[:, None].exp())
    assert result["rho"] == pytest.approx(-1)
    assert (result["null"], result["n"], result["resampled"]) == (False, 40, 40)
    assert correlation([3.0, 1.0, 3.0, 5.0], [2.5, 1.0, 2.5, 9.0])["rho"] == pytest.approx(1)


def test_an_unrelated_pair_is_reported_as_null_about_as_often_as_promised() -> None:
    """95% intervals of unrelated values must hold 0 in about 19 of 20 draws."""
    draws = [torch.randn(2, 40, 1, generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
    nulls = [rank_correlation(x, y, seed)["null"] for seed, (x, y) in enumerate(draws)]
    assert 33 <= sum(nulls) <= 40


def test_resampling_layers_widens_the_interval_where_heads_of_a_layer_are_alike() -> None:
    """Eight layers of ten near-copies hold eight facts, not eighty."""
    x, y = (torch.randn(8, 1) + 0.01 * torch.randn(8, 10) for _ in range(2))
    heads, layers = (rank_correlation(*pair) for pair in ((x.view(-1, 1), y.view(-1, 1)), (x, y)))
    assert layers["ci95"][1] - layers["ci95"][0] > 1.5 * (heads["ci95"][1] - heads["ci95"][0])
    assert (layers["n"], layers["resampled"], layers["rho"]) == (80, 8, pytest.approx(heads["rho"]))


def test_values_that_do_not_vary_have_no_correlation() -> None:
    result = correlation([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert math.isnan(result["rho"])
    assert result["null"]
