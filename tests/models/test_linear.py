"""What every linear attention does in the model: sums of constant size, any cache, one graph, gradients."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from farspan import FarspanCache
from tests.models.small import LOCAL, TIGHT, make, tokens

NEAR = [("cosformer", {"cosformer_max_length": 64}), ("linear-coca", {})]
"""Each on texts that it was made for."""


@pytest.mark.parametrize(
    ("attention", "options", "parts", "sums"),
    [
        ("cosformer", {"cosformer_beyond": "decoupled"}, 2, 1),  # its denominator is not rotated
        ("cosformer", {"cosformer_beyond": "raised-cosine"}, 3, 3),
        ("cosformer", {"cosformer_beyond": "decay"}, 3, 3),
        ("linear-coca", {}, 1, 0.5),  # a feature has half the width, turned two
    ],
)
@torch.no_grad()
def test_generation_holds_the_same_bytes_however_far_it_has_come(
    attention: str, options: dict[str, Any], parts: int, sums: float
) -> None:
    """At position 1 000 and, the text having begun at 999 000, at position 1 000 000."""
    model, x = make(attention, **options), tokens(1, 6)
    held = []
    for begin in (1_000, 1_000_000):
        cache = FarspanCache(model.config)
        for i in range(0, 30, 6):
            positions = torch.arange(begin + i, begin + i + 6)[None]
            logits = model(x, position_ids=positions, past_key_values=cache).logits
            held.append(cache.nbytes)
        assert logits.isfinite().all()
    assert set(held) == {8 * 3 * 2 * (parts * 8 * 8 + sums * 8)}  # float64, layers, key heads, Σ φ⊗v and Σ ψ


@pytest.mark.parametrize(("attention", "options"), [("cosformer", {"cosformer_beyond": "decay"}), ("linear-coca", {})])
@torch.no_grad()
def test_beam_search_does_not_depend_on_the_cache(attention: str, options: dict[str, Any]) -> None:
    model, x = make([attention, LOCAL, attention], **options), tokens(2, 10)
    search = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(x, use_cache=False, **search)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(x, cache_implementation=cache, **search), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "options"), [("cosformer", {"cosformer_beyond": "decoupled"}), ("linear-coca", {})]
)
@torch.no_grad()
def test_static_decoding_compiles_once(attention: str, options: dict[str, Any]) -> None:
    model, x = make([attention, LOCAL], num_hidden_layers=2, **options), tokens(2, 20)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    cache = FarspanCache(model.config, max_length=24)
    model(x[:, :5], past_key_values=cache, attention_mask=mask[:, :5])
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    step, parts = torch.compile(model, fullgraph=True, backend=graphs), []
    for i in range(5, 20):
        seen = torch.nn.functional.pad(mask[:, : i + 1], (0, 23 - i))
        parts.append(step(x[:, i : i + 1], past_key_values=cache, attention_mask=seen).logits)
    assert (torch.cat(parts, dim=1) - model(x, attention_mask=mask).logits[:, 5:]).abs().max() <= TIGHT
    assert graphs.frame_count <= 4


@pytest.mark.parametrize(("attention", "options"), NEAR)
def test_gradient_checkpointing_changes_no_gradient(attention: str, options: dict[str, Any]) -> None:
    model, x = make(attention, **options).train(), tokens(2, 24)
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.zero_grad()
        model(x, labels=x).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(("attention", "options"), NEAR)
def test_autocast_trains(attention: str, options: dict[str, Any]) -> None:
    model, x = make(attention, dtype=torch.float32, **options).train(), tokens(2, 24)
    exact = model(x, labels=x).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    assert (loss - exact).abs() < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())
