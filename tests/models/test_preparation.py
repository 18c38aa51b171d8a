"""A model whose queries and keys come from the feature kernel is the model without; interpreted without a GPU."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanForCausalLM, layers
from farspan.ops import coca, rotary
from farspan.ops.dispatch import Table
from tests.models.small import LOCAL, PER_QUERY, chunked, make, name_of, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGURATIONS: list[dict[str, Any]] = [
    {"attention": [LOCAL, "rope", "coca-slack"]},
    {"attention": ["coca-slack", "coca-exact", "coca-exact"], "rope_parameters": PER_QUERY},
    {"attention": "coca-strict", "qk_norm": True},
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """by("kernel") or by("torch"): what computes the features of "auto" calls from now on, on any device."""
    entries = {entry.name: entry for entry in coca.COCA.entries}
    fused = entries["fused"]._replace(
        device=None, why_not=lambda call: "nothing to rotate" if call.rotary is None else None
    )

    def choose(who: str) -> None:
        table = Table(*([fused] if who == "kernel" else []), entries["sdpa"], key_name="t")
        monkeypatch.setattr(coca, "COCA", table)
        monkeypatch.setattr(
            layers, "why_not_feature_kernel", lambda *_: None if who == "kernel" else "torch was asked for"
        )

    return choose


def small(options: dict[str, Any]) -> FarspanForCausalLM:
    return make(**options, dtype=torch.float32).to(DEVICE)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients_are_those_of_plain_torch(options: dict[str, Any], padded: bool, by: Any) -> None:
    model, x = small(options), tokens(2, 30).to(DEVICE)
    mask = (torch.arange(30) >= torch.tensor([[0], [11]])).long().to(DEVICE) if padded else None
    found = []
    for who in ("kernel", "torch"):
        by(who)
        model.zero_grad()
        logits = model(x, attention_mask=mask, use_cache=False).logits
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    strict = "coca-strict" in str(options)
    assert torch.equal(found[0][0], found[1][0]) == strict  # two ways, and for strict CoCA one
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


@torch.no_grad()
def test_chunks_and_other_attention_implementations_take_its_features(by: Any) -> None:
    x = tokens(1, 20).to(DEVICE)
    model, mixed = small(CONFIGURATIONS[1]), small(CONFIGURATIONS[0])
    by("torch")
    want = mixed(x).logits
    by("kernel")
    for length in (None, 24):
        assert (chunked(model, x, [9, 1, 10], length=length) - model(x).logits).abs().max() <= 1e-4
    mixed.set_attn_implementation("sdpa")
    assert 0 < (mixed(x).logits - want).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("who", "attention", "tables"),
    [
        ("kernel", "coca-exact", 0),
        ("kernel", ["coca-exact", "rope", "coca-slack"], 1),
        ("kernel", ["coca-slack", "coca-strict", "coca-strict"], 1),
        ("torch", ["coca-exact", "rope", "coca-slack"], 1),
    ],
    ids=str,
)
@torch.no_grad()
def test_layers_share_angles_and_the_kernel_needs_no_tables(
    who: str, attention: Any, tables: int, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(who)
    model, made, compute = small({"attention": attention}), [], rotary.cos_sin
    monkeypatch.setattr(rotary, "cos_sin", lambda *args: made.append(args) or compute(*args))
    model(tokens(1, 20).to(DEVICE), use_cache=False)  # too many for a decoding step
    assert len(made) == tables


@pytest.mark.slow
@pytest.mark.parametrize("who", ["kernel", "torch"])
def test_two_graphs_serve_sequences_of_every_length(who: str, by: Any) -> None:
    """Block by block, as in training: one for the first length, one for all others."""
    by(who)
    model = small({"attention": "coca-slack", "num_hidden_layers": 2})
    same = copy.deepcopy(model)
    graphs = CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")
    for block in model.model.layers:
        block.compile(backend=graphs, fullgraph=True)
    for n in (20, 30, 27, 11):
        x, found = tokens(2, n).to(DEVICE), []
        for one in (model, same):
            one.zero_grad()
            one(x, use_cache=False).logits.square().mean().backward()
            found.append([p.grad for p in one.parameters()])
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))
    assert graphs.frame_count == 2
