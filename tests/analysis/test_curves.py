"""Score curves, their bounds, attention past the window and slack's parts, each against its definition."""

from typing import Any

import pytest
import torch

from farspan.analysis import curves as module
from farspan.analysis.curves import FIRST, QUANTILES, Decay, Drift, Microscope, distances
from farspan.analysis.factors import Factors, factors
from farspan.layers import CocaAttention
from farspan.ops.masking import make_mask
from farspan.ops.reference import rotations, scores_exact
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


def test_slack_splits_into_a_relative_and_an_absolute_part() -> None:
    model = small("coca-slack")
    made, q, t = seen(model, text(N))
    queries = torch.arange(N)
    whole, relative, absolute = (made.logits(queries, part=part) for part in ("all", "relative", "absolute"))
    mask = whole.isfinite()
    same((relative + absolute)[mask], whole[mask])
    moved = made.logits(queries, shift=11, part="relative")
    same(moved[mask], relative[mask])
    a, b = q[0].chunk(2, dim=-1)  # docs/math.md, literally, for one pair of query and key
    t, theta, (m, n) = t[0].repeat_interleave(2, 0), Rotary(8).frequencies(), (30, 12)
    a, b, t, delta, sigma = a[2, m], b[2, m], t[2, n], (m - n) * theta, (m + n) * theta
    first = t / 2 * ((a + b) ** 2 * delta.cos() - (b**2 - a**2) * delta.sin())
    second = t / 2 * ((a - b) ** 2 * sigma.cos() + (b**2 - a**2) * sigma.sin())
    same(relative[2, m, n], first.sum() * made.scale)
    same(absolute[2, m, n], second.sum() * made.scale)


def test_the_microscope_sees_what_was_split_and_moved() -> None:
    made, _, _ = seen(small("coca-slack"), text(N))
    queries = torch.tensor([3, 17, 40])
    slack = Microscope(4, 16)
    slack.add(made, queries)
    relative, absolute = (made.logits(queries, part=part) for part in ("relative", "absolute"))
    squares = [x.masked_fill(x.isinf(), 0.0).square().sum((1, 2)) for x in (relative, absolute)]
    same(slack.row()["absolute_share"], squares[1] / (squares[0] + squares[1]))
    here, there = (made.logits(queries, shift=shift).softmax(-1) for shift in (0, 16))
    same(slack.row()["moved_share"], (here - there).abs().sum(-1).mean(-1) / 2)
    size, rising, rotated = torch.zeros(3, 4, dtype=torch.float64)
    for m in queries.tolist():
        for n in range(m + 1):
            h = made.query[:, m] * made.key[:, n].repeat_interleave(2, 0).conj()
            size += h.abs().sum(-1)
            rising += (h.abs() * (h.imag < 0)).sum(-1)
            rotated += (h.abs() * h.angle().abs()).sum(-1)
    same(slack.row()["rising_share"], rising / size)
    same(slack.row()["mean_angle"], rotated / size)
    assert float(slack.row()["absolute_share"].min()) > 0.01


def test_a_tied_query_leaves_slack_nothing_absolute() -> None:
    """Eq. 11: with q equal on both members of each pair slack is exact."""
    layer = CocaAttention(24, 4, form="slack", num_key_heads=2, head_dim=8).double()
    with torch.no_grad():
        rows = layer.q_proj.weight.view(4, 2, 4, 24)
        rows[:, 1] = rows[:, 0]
    q, t, _ = layer.project(torch.randn(1, 20, 24, dtype=torch.float64))
    made = factors(layer, 0, q.detach(), t.detach())
    slack = Microscope(4, 16)
    slack.add(made, torch.arange(20))
    assert float(slack.row()["absolute_share"].max()) < 1e-25
    assert float(slack.row()["mean_angle"].max()) < 1e-15
    query, key = rotations(layer.rotary, make_mask(20, 20, 1, q.device), 8, q.dtype)
    mask = made.logits(torch.arange(20)).isfinite()
    wanted = scores_exact(q, t, query, key)[0].detach() * layer.scaling
    same(made.logits(torch.arange(20))[mask], wanted[mask])
