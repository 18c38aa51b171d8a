"""The streaming census against its definition, and against angles that were planted."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.analysis import census as census_module
from farspan.analysis.census import BINS, CIRCLE, Census, share
from farspan.analysis.factors import SCALINGS, Factors, frequencies, scaled
from farspan.ops.rotary import Rotary
from tests.analysis.reference import count_crossings, initial_angles, probabilities, scores
from tests.analysis.small import KINDS, N, same, seen, small, text

L0 = 16


def thetas(rotary: Rotary) -> Tensor:
    last = torch.tensor([N - 1])
    return torch.cat([frequencies(scaled(rotary, method, 4.0, L0), N, last) for method in SCALINGS])


def census_of(made: Factors, queries: Tensor) -> Census:
    census = Census(thetas(made.rotary), (L0 - 1, N - 1), L0, made.query.shape[0], made.query.real.dtype)
    census.add(made, queries)
    return census


@pytest.mark.parametrize(("attention", "method"), [*((kind, "dynamic") for kind in KINDS), ("rope", "yarn")], ids=str)
def test_logits_are_the_layers_own_scores(attention: Any, method: str) -> None:
    model = small(attention, rope_parameters={"rope_type": method, "factor": 4.0, "rope_theta": 100.0})
    made, q, k = seen(model, text(N))
    layer: Any = model.model.layers[1].self_attn
    logits = made.logits(torch.arange(N))
    mask = logits.isfinite()
    assert torch.equal(mask[0], probabilities(layer, q, k)[0] > 0)
    assert float((logits - scores(layer, q, k) * layer.scaling)[mask].abs().max()) < 1e-11


@pytest.mark.parametrize("attention", KINDS, ids=str)
@pytest.mark.parametrize("at_once", [2**18, 100])
def test_census_equals_brute_force(attention: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census_module, "AT_ONCE", at_once)
    monkeypatch.setattr(census_module, "LOGITS_AT_ONCE", at_once)
    model = small(attention)
    made, q, k = seen(model, text(N))
    layer: Any = model.model.layers[1].self_attn
    queries = torch.tensor([0, 3, 16, 17, 30, N - 1])
    census = census_of(made, queries)

    angle, energy = initial_angles(layer, q, k)
    p = probabilities(layer, q, k)
    weights = [(p > 0).double()[..., None].expand_as(angle), energy * (p > 0)[..., None], p[..., None].expand_as(angle)]
    distance = (torch.arange(N)[:, None] - torch.arange(N))[None, :, :, None]
    tau = torch.where(angle > math.pi, (CIRCLE - angle), 0.0) / census.theta[:, None, None, None]  # scaling h n m j
    for w, weight in enumerate(weights):
        picked = weight[:, queries]
        same(census.totals[w], picked.sum((1, 2)))
        same(census.past[w], (picked * (angle > math.pi)[:, queries]).sum((1, 2)))
        for b in range(BINS):
            bin_ = (angle * (BINS / CIRCLE)).floor() == b
            same(census.histogram[w, ..., b], (picked * bin_[:, queries]).sum((1, 2)))
        for scaling in range(len(SCALINGS)):
            inside = ((distance < tau[scaling]) & (angle > math.pi))[:, queries]
            same(census.zone[scaling, w], (picked * inside).sum((1, 2)))
    plain = weights[0][:, queries]
    for scaling in range(len(SCALINGS)):
        same(census.damped[scaling], (plain * tau[scaling].ceil().clamp(max=L0)[:, queries]).sum((1, 2)))
    assert census.queries == len(queries)
    assert census.pairs == int((p[0, queries] > 0).sum())


@pytest.mark.parametrize("reach", [L0 - 1, N - 1])
def test_crossings_equal_a_walk_along_the_circle(reach: int) -> None:
    made, q, k = seen(small("rope"), text(N))
    queries = torch.tensor([2, 20, N - 1])
    census = census_of(made, queries)
    layer: Any = small("rope").model.layers[1].self_attn
    angle, _ = initial_angles(layer, q, k)
    for scaling in (0, 1, 2):
        mean, ever = census.crossings(scaling, reach)
        for head in (0, 3):
            for pair in range(4):
                found = [
                    count_crossings(float(angle[head, m, n, pair]), float(census.theta[scaling, pair]), reach)
                    for m in queries.tolist()
                    for n in range(m + 1)
                ]
                counted = torch.tensor(found, dtype=torch.float64)
                same(mean[:, head, pair], counted.mean(0))
                same(ever[:, head, pair], (counted > 0).double().mean(0))


@pytest.mark.parametrize("attention", ["coca-exact", "coca-strict", "coca-slack"])
def test_a_coca_models_census_is_exactly_zero(attention: str) -> None:
    """By construction (k = q∘t, t ≥ 0): this guards the capture of t, its sign, and the census' arithmetic."""
    model = small(attention).float()  # rounding has its chance, too
    for index in (0, 1):
        made, _, _ = seen(model, text(N), index)
        census = census_of(made, torch.arange(N))
        assert not census.past.any()
        assert not census.zone.any()
        assert not census.damped.any()
        assert torch.equal(census.histogram[:, ..., 0], census.totals)


def test_planted_angles_come_back() -> None:
    """Constant queries and keys (biases only) at chosen angles: the census must return exactly those."""
    model = small("rope", qkv_bias=True, num_key_value_heads=4)
    layer: Any = model.model.layers[1].self_attn
    planted = torch.rand(4, 4, dtype=torch.float64) * CIRCLE  # head, pair
    rotated = torch.rand(4, 4, dtype=torch.float64) * CIRCLE
    with torch.no_grad():
        layer.q_proj.weight.zero_(), layer.k_proj.weight.zero_()
        for proj, angle, size in ((layer.q_proj, rotated + planted, 2.0), (layer.k_proj, rotated, 3.0)):
            proj.bias.copy_(torch.cat((angle.cos(), angle.sin()), dim=-1).flatten() * size)
    made, _, _ = seen(model, text(N))
    census = census_of(made, torch.arange(N))
    anomalous = (planted > math.pi).double()
    same(share(census.past, census.totals), anomalous.expand(3, -1, -1))
    same(census.totals[1] / census.pairs, torch.full((4, 4), 6.0, dtype=torch.float64))
    tau = (anomalous * (CIRCLE - planted) / census.theta[0]).ceil().clamp(max=L0)
    same(census.damped[0] / census.pairs, tau)
    bins = (planted / CIRCLE * BINS).long()
    assert torch.equal(census.histogram[0].argmax(-1), bins)
    assert torch.equal(census.histogram[0].amax(-1), torch.full((4, 4), float(census.pairs), dtype=torch.float64))


def test_widening_is_one_k_and_powers_of_lambda() -> None:
    """App. D.2: linear scaling makes every zone k times wider, NTK the j-th λ^(2j/d) times."""
    rotary, d, k = Rotary(8), 8, 4.0
    theta = thetas(rotary)
    wide = dict(zip(SCALINGS, theta[0] / theta, strict=True))
    same(wide["none"], torch.ones(4))
    same(wide["linear"], torch.full((4,), k))
    for method, stretch in (("ntk", k), ("dynamic_ntk", k * 64 / L0 - (k - 1))):  # 45 tokens: the bucket of 64
        lam = stretch ** (d / (d - 2))
        same(wide[method], lam ** (2 * torch.arange(4, dtype=torch.float64) / d))
    assert bool((wide["yarn"] >= 1).all() and (wide["yarn"] <= k).all())
