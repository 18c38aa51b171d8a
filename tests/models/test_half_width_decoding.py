"""A model that decodes on the half-width kernel gives the numbers it gives without, and turns no cached key."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

import farspan.ops.triton.coca_decode  # noqa: F401 (makes the operator whose calls are counted)
from farspan import FarspanCache, FarspanForCausalLM
from tests.models.half_width import DEVICE, NOPE, decoding_on, expected_of, left_padding, model_of, steps
from tests.models.small import PER_QUERY, PER_REQUEST, name_of, tokens

PLAIN, PADDED, STATIC, BOTH = (None, False), (None, True), (24, False), (24, True)
CASES: list[tuple[dict[str, Any], tuple[tuple[int | None, bool], ...]]] = [
    ({"attention": ["coca-exact"]}, (PLAIN,)),
    ({"attention": ["coca-slack"], "num_attention_heads": 2, "num_key_value_heads": 2}, (STATIC,)),
    ({"attention": ["coca-strict"], "num_key_value_heads": 2}, (BOTH,)),
    ({"attention": [{"kind": "coca", "form": "slack", "window": 8}, {"kind": "coca", "window": 16}]}, (PADDED, STATIC)),
    ({"attention": ["coca-slack", NOPE, "rope"], "rope_parameters": PER_QUERY}, (PLAIN, PADDED, STATIC, BOTH)),
    ({"attention": ["coca-exact"], "rope_parameters": PER_REQUEST}, (PADDED, STATIC)),
    ({"attention": ["coca-exact"], "rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "qk_norm": True}, (BOTH,)),
    ({"attention": [{"kind": "coca", "window": 1}, {"kind": "coca", "window": 2}]}, (BOTH,)),
    ({"attention": ["coca-slack", NOPE], "log_length": True}, (PADDED, BOTH)),
]
"""A model, and the caches (growing, or static of a length) and paddings to try it with. A step of a kernel costs a
tenth of a second in the interpreter, for each layer, row and key head."""


class Allocations(TorchDispatchMode):
    """The largest tensor made, and how often the kernel ran."""

    def __init__(self, model: FarspanForCausalLM, cache: FarspanCache) -> None:
        super().__init__()
        held = [*model.parameters(), *(x for layer in cache.layers for x in (layer.keys, layer.values))]
        self.known, self.largest, self.calls = {x.untyped_storage().data_ptr() for x in held}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += func is torch.ops.farspan.half_width_attention.default
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize(
    ("options", "length", "padded"),
    [(options, *where) for options, places in CASES for where in places],
    ids=lambda x: name_of(x) if isinstance(x, dict) else str(x),
)
@torch.no_grad()
def test_decoding_on_the_kernel_equals_decoding_without(options: dict, length: int | None, padded: bool) -> None:
    """Three tokens at once cross a doubling of dynamic NTK; one window is full before, one in the midst."""
    model, x = model_of(**options), tokens(2, 18).to(DEVICE)
    mask = left_padding(2, 18, 2) if padded else None
    want, got = expected_of(model, lambda: steps(model, x, [13, 1, 1, 3], mask, length)[:, 13:])
    assert 0 < (got - want).abs().max() <= 1e-5  # not zero, or nothing has been compared


@pytest.mark.parametrize("length", [None, 20], ids=["growing", "static"])
@torch.no_grad()
def test_padding_after_real_tokens_is_continued(length: int | None) -> None:
    """Where ranks and slots part, each key has its own position."""
    model, x = model_of(attention=["coca-slack", NOPE], rope_parameters=PER_QUERY), tokens(2, 15).to(DEVICE)
    mask = torch.ones_like(x)
    mask[1, 7:12] = 0
    want, got = expected_of(model, lambda: steps(model, x, [12, 1, 2], mask, length)[:, 12:])
    assert 0 < (got - want).abs().max() <= 1e-5
    with decoding_on(model, "sdpa"):
        alone = model(torch.cat((x[1:, :7], x[1:, 12:]), dim=1)).logits
    assert (got[1] - alone[0, 7:]).abs().max() <= 1e-5


@pytest.mark.parametrize("length", [None, 20], ids=["growing", "static"])
@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_positions_of_ones_own_are_kept(rows: int, length: int | None) -> None:
    """Each row begins elsewhere, which slack shows."""
    model, x = model_of(attention=["coca-slack"]), tokens(2, 16).to(DEVICE)
    start = torch.tensor([[100], [40_000]][:rows], device=DEVICE)

    def read() -> torch.Tensor:
        cache, parts, seen = FarspanCache(model.config, max_length=length), [], 0
        for piece in x.split([13, 1, 2], dim=1):
            places = start + seen + torch.arange(piece.shape[1], device=DEVICE)[None]
            parts.append(model(piece, past_key_values=cache, position_ids=places).logits)
            seen += piece.shape[1]
        return torch.cat(parts, dim=1)[:, 13:]

    want, got = expected_of(model, read)
    assert 0 < (got - want).abs().max() <= 1e-5
    assert (want - model(x).logits[:, 13:]).abs().max() > 1e-3


@torch.no_grad()
def test_gaps_without_a_cache_are_kept_too() -> None:
    model, x = model_of(), tokens(1, 6).to(DEVICE)
    places = torch.tensor([[0, 3, 4, 9, 20, 21]], device=DEVICE)
    want, got = expected_of(model, lambda: model(x, position_ids=places, use_cache=False).logits)
    assert 0 < (got - want).abs().max() <= 1e-5
    assert (want - model(x).logits).abs().max() > 1e-3


@pytest.mark.parametrize(("length", "law"), [(None, None), (110, PER_QUERY)], ids=["growing", "static"])
@torch.no_grad()
def test_a_step_makes_nothing_as_long_as_the_cache(length: int | None, law: dict | None) -> None:
    model = model_of(attention=["coca-exact", NOPE], rope_parameters=law, num_attention_heads=1)
    x, found = tokens(1, 102).to(DEVICE), {}
    for backend in ("sdpa", "triton"):
        cache = FarspanCache(model.config, max_length=length)
        model(x[:, :100], past_key_values=cache)
        with decoding_on(model, backend):
            model(x[:, 100:101], past_key_values=cache)  # a growing cache makes room
            with Allocations(model, cache) as made:
                model(x[:, 101:], past_key_values=cache)
        found[backend] = made.calls, made.largest
    assert found["triton"][0] == 2
    assert found["triton"][1] < 102
    assert found["sdpa"][0] == 0
    assert found["sdpa"][1] >= 102 * 32  # the keys, 32 wide


@torch.no_grad()
def test_a_static_cache_is_read_as_far_as_it_is_filled() -> None:
    """What lies beyond may be anything, even while only the device knows where it begins."""
    model, x = model_of(attention=[NOPE, "coca-slack"]), tokens(2, 15).to(DEVICE)
    cache = FarspanCache(model.config, max_length=50)
    model(x[:, :13], past_key_values=cache)
    for layer in cache.layers:
        layer.keys[:, :, 15:] = layer.values[:, :, 15:] = torch.nan
    with decoding_on(model, "triton"):
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
        for logits in expected_of(model, lambda: steps(model, x, [40, 1, 1, 1, 1], None, None)[:, 40:])
    )
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()
