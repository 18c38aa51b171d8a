"""The law that a model's angles follow is the one that was asked for."""

import pytest

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.evaluation.laws import give_law, law_of


def model(**rope: object) -> FarspanForCausalLM:
    values = {"rope_parameters": {"rope_theta": 500.0, **rope}} if rope else {}
    return FarspanForCausalLM(FarspanConfig.preset("tiny", num_hidden_layers=1, **values))


@pytest.mark.parametrize("law", ["none", "ntk-4", "ntk-2.5/per_request", "yarn-4", "none+log", "ntk-4/per_request+log"])
@pytest.mark.parametrize("own", [{}, {"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}])
def test_a_law_of_the_models_own_is_replaced(own: dict[str, object], law: str) -> None:
    made = model(**own)
    theta = made.config.rotary().base
    give_law(made, law)
    assert law_of(made.config) == law
    assert made.model.layers[0].self_attn.rotary.scaling == made.config.rotary().scaling
    assert made.config.rotary().base == theta


def test_its_own_law_is_left_as_it_is() -> None:
    made = model(rope_type="yarn", factor=4.0, beta_fast=16.0)
    before = made.config.rotary().scaling
    give_law(made, "yarn-4")
    assert made.config.rotary().scaling == before


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(ValueError, match="law must be none, ntk-FACTOR or yarn-FACTOR, got 'pi-4'"):
        give_law(model(), "pi-4")
