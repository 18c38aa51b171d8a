"""A model that decodes on the half-width kernel gives the numbers it gives without, and rotates no cached key."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanCache, FarspanForCausalLM
from tests.models.half_width import (
    DEVICE,
    NOPE,
    Allocations,
    left_padding,
    model_of,
    on,
    steps,
    without_and_with_kernel,
)
from tests.models.small import PER_QUERY, PER_REQUEST, name_of, tokens

CASES: list[tuple[dict[str, Any], int | None, bool]] = [
    ({"attention": ["coca-exact"]}, None, False),
    ({"attention": ["coca-slack"], "num_attention_heads": 2, "num_key_value_heads": 2}, 24, False),
    ({"attention": ["coca-strict"], "num_key_value_heads": 2}, 24, True),
    ({"attention": [{"kind": "coca", "form": "slack", "window": 8}, {"kind": "coca", "window": 16}]}, None, True),
    ({"attention": [{"kind": "coca", "form": "slack", "window": 8}, {"kind": "coca", "window": 16}]}, 24, False),
    ({"attention": ["coca-slack", NOPE, "rope"], "rope_parameters": PER_QUERY}, None, True),
    ({"attention": ["coca-slack", NOPE, "rope"], "rope_parameters": PER_QUERY}, 24, True),
    ({"attention": ["coca-exact"], "rope_parameters": PER_REQUEST}, None, True),
    ({"attention": ["coca-exact"], "rope_parameters": PER_REQUEST}, 24, False),
    ({"attention": ["coca-exact"], "rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "qk_norm": True}, 24, True),
    ({"attention": [{"kind": "coca", "window": 1}, {"kind": "coca", "window": 2}]}, 24, True),
    ({"attention": ["coca-slack", NOPE], "log_length": True}, None, True),
]
"""A model, the slots of its cache (None = growing), and whether there is padding. A step of a kernel takes a tenth of a
second in the interpreter, per layer, row and key head."""


@pytest.mark.parametrize(
    ("options", "length", "padded"), CASES, ids=lambda x: name_of(x) if isinstance(x, dict) else str(x)
)
@torch.no_grad()
def test_decoding_on_the_kernel_equals_decoding_without(options: dict, length: int | None, padded: bool) -> None:
    """Three tokens at once cross a doubling of dynamic NTK; one window is full before, one in the midst."""
    x, mask = tokens(2, 18).to(DEVICE), left_padding(2, 18, 2) if padded else None
    want, got = without_and_with_kernel(
        model_of(**options), lambda model: steps(model, x, [13, 1, 1, 3], mask, length)[:, 13:]
    )
    assert 0 < (got - want).abs().max() <= 1e-5  # not zero, or nothing has been compared


@pytest.mark.parametrize("length", [None, 20], ids=["growing", "static"])
@torch.no_grad()
def test_padding_after_real_tokens_is_continued(length: int | None) -> None:
    """Where ranks and slots differ, each key has its own position."""
    model, x = model_of(attention=["coca-slack", NOPE], rope_parameters=PER_QUERY), tokens(2, 15).to(DEVICE)
    mask = torch.ones_like(x)
    mask[1, 7:12] = 0
    want, got = without_and_with_kernel(model, lambda model: steps(model, x, [12, 1, 2], mask, length)[:, 12:])
    assert 0 < (got - want).abs().max() <= 1e-5
    alone = on("sdpa", model)(torch.cat((x[1:, :7], x[1:, 12:]), dim=1)).logits
    assert (got[1] - alone[0, 7:]).abs().max() <= 1e-5


@pytest.mark.parametrize(("rows", "length"), [(1, None), (2, None), (2, 20)])
@torch.no_grad()
def test_positions_of_ones_own_are_kept(rows: int, length: int | None) -> None:
    """Each row begins elsewhere, which slack shows."""
    model, x = model_of(attention=["coca-slack"]), tokens(2, 16).to(DEVICE)
    start = torch.tensor([[100], [40_000]][:rows], device=DEVICE)

    def read(model: FarspanForCausalLM) -> torch.Tensor:
        cache, parts, seen = FarspanCache(model.config, max_length=length), [], 0
        for piece in x.split([13, 1, 2], dim=1):
            positions = start + seen + torch.arange(piece.shape[1], device=DEVICE)[None]
            parts.append(model(piece, past_key_values=cache, position_ids=positions).logits)
            seen += piece.shape[1]
        return torch.cat(parts, dim=1)[:, 13:]

    want, got = without_and_with_kernel(model, read)
    assert 0 < (got - want).abs().max() <= 1e-5
    assert (want - model(x).logits[:, 13:]).abs().max() > 1e-3


@torch.no_grad()
def test_gaps_without_a_cache_are_kept_too() -> None:
    model, x = model_of(), tokens(1, 6).to(DEVICE)
    positions = torch.tensor([[0, 3, 4, 9, 20, 21]], device=DEVICE)
    want, got = without_and_with_kernel(model, lambda model: model(x, position_ids=positions, use_cache=False).logits)
    assert 0 < (got - want).abs().max() <= 1e-5
    assert (want - model(x).logits).abs().max() > 1e-3


@pytest.mark.parametrize(("length", "rope"), [(None, None), (110, PER_QUERY)], ids=["growing", "static"])
@torch.no_grad()
def test_a_step_makes_nothing_as_large_as_the_cache(
    length: int | None, rope: dict | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.cache.CHEAP", 0)
    made_by = model_of(attention=["coca-exact", NOPE], rope_parameters=rope, num_attention_heads=1)
    x, found = tokens(1, 102).to(DEVICE), {}
    for backend in ("sdpa", "triton"):
        model = on(backend, made_by)
        cache = FarspanCache(model.config, max_length=length)
        model(x[:, :100], past_key_values=cache)
        model(x[:, 100:101], past_key_values=cache)  # a growing cache allocates
        held = [*model.parameters(), *(x for layer in cache.layers for x in (layer.keys, layer.values))]
        with Allocations(*held) as made:
            model(x[:, 101:], past_key_values=cache)
        found[backend] = made.calls, made.largest
    assert found["triton"][0] == 2
    assert found["triton"][1] <= (length or 101)  # a static cache has one row of positions for all layers
    assert found["sdpa"][0] == 0
    assert found["sdpa"][1] >= 102 * 32  # the keys, 32 wide


@torch.no_grad()
def test_a_static_cache_is_read_as_far_as_it_is_filled() -> None:
    """What lies beyond may be anything, even while only the device knows where it begins."""
    model, x = model_of(attention=[NOPE, "coca-slack"], decode_backend="triton"), tokens(2, 15).to(DEVICE)
    cache = FarspanCache(model.config, max_length=50)
    model(x[:, :13], past_key_values=cache)
    for layer in cache.layers:
        layer.keys[:, :, 15:] = layer.values[:, :, 15:] = torch.nan
    parts = [model(x[:, i : i + 1], past_key_values=cache).logits for i in (13, 14)]
    assert (torch.cat(parts, dim=1) - model(x).logits[:, 13:]).abs().max() <= 1e-5


@pytest.mark.parametrize("attention", ["coca-exact", "coca-slack"])
@torch.no_grad()
def test_bfloat16_error_is_at_most_twice_that_without_the_kernel(attention: str) -> None:
    model, x = model_of(attention=[attention], dtype=torch.bfloat16), tokens(1, 44).to(DEVICE)
    exact = model_of(attention=[attention], dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    truth = exact(x).logits[:, 40:]
    theirs, ours = (
        (logits - truth).abs()
        for logits in without_and_with_kernel(model, lambda model: steps(model, x, [40, 1, 1, 1, 1])[:, 40:])
    )
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()
