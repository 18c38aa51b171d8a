"""The whole analysis: what it sums over, what it raises for, what it holds in memory."""

from itertools import product
from typing import Any

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.analysis import Settings, analyze, rows
from farspan.analysis import census as census_module
from farspan.analysis import curves as curves_module
from farspan.analysis.census import Census
from farspan.analysis.curves import band
from farspan.analysis.factors import SCALINGS, scaled
from farspan.analysis.run import DRIFT_QUERIES, REGIONS
from farspan.bench.timing import peak_bytes
from farspan.evaluation.losses import token_losses
from tests.analysis.small import seen, small, text


def test_every_layer_scaling_and_length_is_there_and_the_model_is_left_as_it_was() -> None:
    model, tokens = small("rope"), [text(70), text(33)]
    before = model(tokens[0][None]).logits
    steps: list[tuple[float, float | None]] = []
    found = analyze(model, tokens, Settings(queries=10), lambda done, total, text="", **_: steps.append((done, total)))
    assert set(found.census) == {(layer, region) for layer in (0, 1) for region in REGIONS}
    assert found.lengths == [16, 32, 64]
    assert set(found.drift) == set(product(SCALINGS, (16, 32, 64), (0, 1)))
    assert all(one.queries for one in (*found.census.values(), *found.drift.values()))
    assert DRIFT_QUERIES > 8  # a half window: all of its queries are taken
    assert found.drift["linear", 32, 0].queries == 16
    assert found.drift["linear", 64, 0].queries == 8  # one of the two texts is that long
    assert found.census[1, "inside"].queries == found.census[1, "past"].queries == 10
    assert steps == [(i + 1, 20) for i in range(20)]
    assert torch.equal(model(tokens[0][None]).logits, before)
    assert not model.model.layers[0].self_attn._forward_pre_hooks


def test_losses_are_those_of_the_bands_under_each_scaling() -> None:
    model, tokens = small("rope"), text(70)
    found, own = analyze(model, [tokens], Settings(queries=2)), model.config.rotary()
    for scaling in SCALINGS:
        model.share_rotary(scaled(own, scaling, 4.0, 16))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        first, last = band(32, 16)
        loss = torch.nn.functional.cross_entropy(logits[first:last], tokens[first + 1 : last + 1], reduction="sum")
        assert found.losses[scaling, 32] == (pytest.approx(float(loss), abs=1e-4), 8)
    model.share_rotary(own)
    with torch.no_grad():  # the control: the same tokens, one window of context
        hidden = model.model(tokens[None, 16:32]).last_hidden_state
        loss = token_losses(model, hidden[:, 8:], tokens[None, 25:33]).sum()
    assert found.losses["control", 32] == (pytest.approx(float(loss), abs=1e-4), 8)


def test_texts_add_up() -> None:
    model, first, second = small("rope"), text(40), text(40)
    settings = Settings(scalings=("none",), queries=50)  # all there are
    apart = [analyze(model, [tokens], settings) for tokens in (first, second)]
    both = analyze(model, [first, second], settings)
    for region in REGIONS:
        one, two = (found.census[1, region] for found in apart)
        assert torch.allclose(both.census[1, region].histogram, one.histogram + two.histogram, atol=1e-9)
    total = sum(found.drift["none", 32, 1].sums for found in apart)
    assert torch.allclose(both.drift["none", 32, 1].sums, total, atol=1e-9)  # type: ignore[arg-type]


def test_spaced_keys_leave_attention_untouched_and_estimate_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = seen(small("rope"), text(400))
    settings = Settings(scalings=("none",), queries=32)
    whole = analyze(small("rope"), [text(400)], settings).census[0, "past"]

    def census(keys: int) -> Census:
        monkeypatch.setattr(census_module, "KEYS", keys)
        made_census = Census(whole.theta, (15, 399), 16, 4, torch.float64)
        made_census.add(made, torch.arange(300, 400, 7))
        return made_census

    every, spaced = census(1000), census(100)
    assert torch.equal(every.past[2], spaced.past[2])
    assert spaced.pairs < every.pairs / 3
    shares = [c.past[0].sum() / c.totals[0].sum() for c in (every, spaced)]
    assert abs(float(shares[0] - shares[1])) < 0.02


def test_rows_hold_what_the_sums_say() -> None:
    found = analyze(small("coca-slack"), [text(40)], Settings(queries=6))
    made = rows(found, "mine")
    kinds = [row["kind"] for row in made]
    assert {k: kinds.count(k) for k in dict.fromkeys(kinds)} == {
        **{"model": 1, "census": 4, "borders": 15, "curve": 2, "drift": 20, "loss": 10}
    }
    assert all(value == 0 for row in made if row["kind"] == "census" for value in row["past_pi"].values())


@pytest.mark.parametrize(
    ("model", "length", "settings", "message"),
    [
        (lambda: small("alibi"), 40, {}, "must have rotary layers .* got alibi"),
        (lambda: small([{"kind": "rope", "rotary": False}] * 2), 40, {}, "must have rotary layers"),
        (lambda: small("linear-coca"), 40, {}, "must have rotary layers with a softmax to analyze, got linear-coca"),
        (lambda: small(["rope", "linear-coca"]), 40, {"scalings": ("none",), "layers": (1,)}, "got 1"),
        (lambda: small("rope"), 31, {}, "two windows = 32 tokens, got 31"),
        (lambda: small("rope"), 40, {"layers": (0, 2)}, r"rotary layers of this model \(0, 1\), got 2"),
        (lambda: small(["alibi", "rope"]), 40, {"layers": (0,)}, "got 0"),
        (lambda: poisoned(lambda layer: layer.self_attn.q_proj), 40, {}, "must be finite, got NaN or inf in layer 1"),
        (lambda: poisoned(lambda layer: layer.mlp.down_proj), 40, {}, "got NaN or inf after the last layer"),
    ],
)
def test_models_that_cannot_be_analyzed_raise(model: Any, length: int, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        analyze(model(), [text(length)], Settings(**settings))


def poisoned(find: Any) -> FarspanForCausalLM:
    model = small("rope")
    find(model.model.layers[1]).weight.data[0, 0] = torch.nan
    return model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scalings": ("linear",)}, "scalings must"),
        ({"scalings": ("none", "nkt")}, "scalings must"),
        ({"queries": 1}, "queries must be at least 2"),
        ({"factor": 1e30}, "factor must lie"),
    ],
)
def test_bad_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_memory_grows_with_the_text_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    for module in (census_module, curves_module):  # small blocks, so that what grows is seen
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", 2**17)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = FarspanForCausalLM(FarspanConfig(attention="rope", vocab_size=64, train_length=512, **sizes)).eval()
    settings = Settings(scalings=("none",), queries=4)
    short, long = (peak_bytes(lambda n=n: analyze(model, [text(n)], settings), "cpu") for n in (2048, 16384))
    assert long < 8.5 * short
    assert long < 16384**2 * 4 / 20  # one head's scores alone would be 1.1 GB
