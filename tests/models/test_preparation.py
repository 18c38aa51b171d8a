"""A model whose queries and keys are made ready by the kernel is the model it is without; interpreted without a GPU."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanCache, FarspanForCausalLM
from farspan import frame
from farspan.ops.coca import preparation
from tests.models.small import LOCAL, PER_QUERY, make, name_of, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGURATIONS: list[dict[str, Any]] = [
    {"attention": "coca-exact"},
    {"attention": [LOCAL, "rope", "coca-slack"]},
    {"attention": "coca-slack", "rope_parameters": PER_QUERY},
    {"attention": "coca-strict", "cache_layout": "rotated", "qk_norm": True},
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Any:
    """by("kernel") or by("torch"): who prepares both forms from now on, whatever the device."""

    def choose(who: str) -> None:
        for room in (preparation, frame):
            monkeypatch.setattr(room, "preparation_refusal", lambda *_: None if who == "kernel" else "not asked")

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


@pytest.mark.parametrize("options", CONFIGURATIONS[2:], ids=name_of)
@pytest.mark.parametrize("length", [None, 24])
@torch.no_grad()
def test_chunks_equal_the_whole(options: dict[str, Any], length: int | None, by: Any) -> None:
    model, x = small(options), tokens(1, 20).to(DEVICE)
    by("kernel")
    whole = model(x).logits
    cache = FarspanCache(model.config, max_length=length)
    parts = [model(piece, past_key_values=cache).logits for piece in x.split([9, 1, 10], dim=1)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-4


def test_layers_share_phases_and_tables_are_made_for_others_alone(by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    by("kernel")
    made: list[str] = []
    right = frame.phase_plan, frame.Rotary.plan
    monkeypatch.setattr(frame, "phase_plan", lambda *a, **o: made.append("phases") or right[0](*a, **o))
    monkeypatch.setattr(frame.Rotary, "plan", lambda *a, **o: made.append("tables") or right[1](*a, **o))
    for attention, wanted in (("coca-exact", ["phases"]), (["coca-exact", "rope", "coca-slack"], ["phases", "tables"])):
        made.clear()
        small({"attention": attention})(tokens(1, 9).to(DEVICE))
        assert made == wanted
    made.clear()
    small({"attention": ["coca-slack", "coca-strict", "coca-strict"]})(tokens(1, 9).to(DEVICE))
    assert made == ["phases", "tables"]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["kernel", "torch"])
def test_two_graphs_serve_texts_of_every_length(who: str, by: Any) -> None:
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
