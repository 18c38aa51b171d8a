"""Score curves, their bounds, and attention past the window, each against its definition."""

from typing import Any

import pytest
import torch

from farspan.analysis import curves as module
from farspan.analysis.curves import FIRST, QUANTILES, Decay, Drift, distances
from farspan.analysis.factors import Factors
from farspan.ops.rotary import Rotary
from tests.analysis.reference import decay_bounds, probabilities, scores
from tests.analysis.small import KINDS, N, same, seen, small, text


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("at_once", [2**21, 50])
def test_curves_equal_brute_force(attention: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCTS_AT_ONCE", at_once)
    model = small(attention)
    made, q, k = seen(model, text(N))
    layer: Any = model.model.layers[1].self_attn
    decay = Decay(distances(N))
    decay.add(made)
    row = decay.row()
    logits = scores(layer, q, k) * layer.scaling
    for i, s in enumerate(row["distance"]):
        if made.window is not None and s >= made.window:
            assert row["samples"][i] == 0
            assert row["mean"][i].isnan()
            continue
        diagonal = logits.diagonal(-s, 1, 2).flatten()
        assert row["samples"][i] == diagonal.numel()
        same(row["mean"][i], diagonal.mean())
        wanted = diagonal.quantile(torch.tensor(QUANTILES, dtype=torch.float64))
        same(torch.stack([values[i] for values in row["quantiles"].values()]), wanted)


@pytest.mark.parametrize("attention", ["rope", "coca-exact"])
def test_mean_bounds_equal_brute_force(attention: str) -> None:
    made, _, _ = seen(small(attention), text(20))
    decay = Decay([0, 3, 19])
    decay.add(made)
    theta, row = made.rotary.frequencies(), decay.row()
    for i, s in enumerate(decay.at):
        found = []
        for head in range(4):
            for m in range(s, 20):
                h = made.query[head, m] * made.key[head // 2, m - s].conj()
                a, eq19, eq20 = decay_bounds(h, s, theta)
                assert a <= eq19 * (1 + 1e-12)
                assert attention == "rope" or a <= eq20 * (1 + 1e-12)
                found.append((eq19 * made.scale, eq20 * made.scale))
        bounds = torch.stack((row["bound_eq19"][i], row["bound_eq20"][i]))
        same(bounds, torch.tensor(found, dtype=torch.float64).mean(0))


@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_eq19_and_eq21_hold_on_every_score_and_eq20_for_coca(attention: Any) -> None:
    for index in (0, 1):
        made, _, _ = seen(small(attention), text(200), index)
        decay = Decay(distances(200))
        decay.add(made)
        assert sum(decay.row()["samples"]) > 2000
        assert decay.broken["eq19"] == decay.broken["eq21"] == 0
        assert attention not in ("coca-exact", "coca-strict") or decay.broken["eq20"] == 0


def test_a_broken_bound_is_counted() -> None:
    """Eq. 20 needs Θ_j = 0."""
    one = torch.ones(1, 9, 1, dtype=torch.complex128)  # one pair at Θ = π/2: |a(s)| = |sin s|, bounded by |cos s|?
    rotated = Factors(0, one * 1j, one, one * 1j, None, Rotary(2), 1.0, None)
    decay = Decay([1, 2, 3])
    decay.add(rotated)
    assert decay.broken == {"eq19": 0, "eq20": 8 + 7, "eq21": 0}  # at distances 1 and 2, not at 3


def test_a_long_text_is_sampled_evenly() -> None:
    made, _, _ = seen(small("rope"), text(100))
    decay = Decay([0, 7])
    decay.add(made, count=10)
    assert decay.row()["samples"] == [40, 40]


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("at_once", [2**23, 1])
def test_drift_equals_brute_force(attention: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    model = small(attention)
    made, q, k = seen(model, text(N))
    layer: Any = model.model.layers[1].self_attn
    queries = torch.tensor([0, 20, 21, N - 1])
    drift = Drift(4, 16)
    drift.add(made, queries)
    p = probabilities(layer, q, k)[:, queries]
    logits = (scores(layer, q, k)[:, queries] * layer.scaling).masked_fill(p == 0, -torch.inf)
    entropy, count = -(p * p.clamp(min=1e-300).log()).sum(-1), (p > 0).sum(-1).double()
    distance = queries[:, None] - torch.arange(N)
    row = drift.row()
    same(row["entropy"], entropy.mean(1))
    same(row["even"], torch.where(count > 1, entropy / count.log(), 0.0).mean(1))
    same(row["first"], p[..., :FIRST].sum(-1).mean(1))
    same(row["far"], (p * (distance >= 16)).sum(-1).mean(1))
    same(row["logit_top"], logits.amax(-1).mean())
