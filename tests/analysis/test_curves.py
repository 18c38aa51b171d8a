"""Score curves, and attention past the window, each against its definition; the bounds of the decay."""

from typing import Any

import pytest
import torch

from farspan.analysis import curves as module
from farspan.analysis.curves import FIRST, QUANTILES, Decay, Drift, distances
from tests.analysis.reference import probabilities, scores
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
