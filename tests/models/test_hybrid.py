"""Layouts by name: local layers, and global ones without positions."""

from pathlib import Path
from typing import Any

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM, FarspanForSequenceClassification
from farspan.layers import HYBRIDS, hybrid


def make(name: str, **options: Any) -> FarspanForCausalLM:
    torch.manual_seed(0)
    small = {"global_every": 2} if name == "hybrid-cosformer" else {"window": 8, "global_every": 2}
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention=name, **small, **options)).eval()
    for key, weight in model.named_parameters():
        if key.endswith("phase"):
            torch.nn.init.normal_(weight)
    return model


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_configuration_holds_the_list_of_layers(name: str, tmp_path: Path) -> None:
    model = make(name)
    local, everywhere = model.config.attention_specs[:2]
    assert local.name == HYBRIDS[name]
    assert local.window == (None if local.linear else 8)
    assert (everywhere.kind, everywhere.window, everywhere.rotary) == ("rope", None, False)
    assert model.config.log_length is True
    model.save_pretrained(tmp_path)
    again = FarspanForCausalLM.from_pretrained(tmp_path)
    assert again.config.attention_specs == model.config.attention_specs
    ids = torch.randint(0, 512, (1, 1000))  # far past training
    with torch.no_grad():
        logits = model(ids).logits
        assert logits.isfinite().all()
        assert torch.equal(again(ids).logits, logits)


@pytest.mark.parametrize("name", ["hybrid-rope", "hybrid-pope"])
def test_compiled_graphs_serve_all_lengths(name: str) -> None:
    """On a CPU one block of queries has its own graph, as have lengths that fill their blocks."""
    model, graphs = make(name), []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (70, 300, 128, 5, 64):
            ids = torch.randint(0, 512, (2, n))
            assert torch.allclose(compiled(ids, use_cache=False).logits, model(ids).logits, atol=1e-5)
    assert len(graphs) <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number of keys ≥ 1 or None, got 0"),
        ({"global_every": 9}, "global_every must be 2 … 4, the number of layers, got 9"),
        ({"global_every": 1}, "global_every must be 2 … 4, the number of layers, got 1"),
        ({"causal": False}, "attention 'hybrid' needs a causal model, got causal=False"),
        ({"attention": "rope", "window": 4}, "window can be given for a hybrid only, got attention 'rope'; elsewhere"),
        ({"attention": "hybrid-pop"}, "attention must be one of .* did you mean 'hybrid-pope'?"),
    ],
    ids=str,
)
def test_bad_options_get_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FarspanConfig.preset("tiny", **{"attention": "hybrid", **options})


def test_an_encoder_cannot_be_a_hybrid() -> None:
    with pytest.raises(ValueError, match="log_length, which hybrids have, needs a causal model"):
        FarspanForSequenceClassification(FarspanConfig.preset("tiny", attention="hybrid"))
    with pytest.raises(ValueError, match="window must be left out of 'hybrid-cosformer', got 8"):
        FarspanConfig.preset("tiny", attention="hybrid-cosformer", window=8)


def test_the_last_layer_of_each_group_is_global() -> None:
    assert [spec.window for spec in hybrid("hybrid-coca-exact", 6, window=64, global_every=3)] == [64, 64, None] * 2
