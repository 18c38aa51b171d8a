"""Models on CoCA's kernels give the numbers they give without; interpreted where there is no GPU."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanCache, FarspanForCausalLM, layers
from farspan.bench.timing import captured
from farspan.ops import coca, rotary
from farspan.ops.dispatch import Table
from tests.models.small import LOCAL, PER_QUERY, PER_REQUEST, chunked, compiled_steps, make, name_of, tokens
from tests.ops.kernels import DEVICE, decoding

NOPE = {"kind": "coca", "rotary": False}


def model_of(**options: Any) -> FarspanForCausalLM:
    options = {"attention": ["coca-exact"], "num_key_value_heads": 1, "dtype": torch.float32, **options}
    return make(num_hidden_layers=len(options["attention"]), **options).to(DEVICE)


def without_and_with_kernel(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return what a call gives without the kernel, and with it."""
    found = []
    for backend in ("sdpa", "triton"):
        with decoding(backend):
            found.append(call())
    return found


def check_near(want: torch.Tensor, got: torch.Tensor) -> None:
    assert 0 < (got - want).abs().max() <= 1e-5  # not zero, or nothing has been compared


class Allocations(TorchDispatchMode):
    """Note the elements of the largest new tensor, and count the kernel's calls."""

    def __init__(self, *held: torch.Tensor) -> None:
        super().__init__()
        self.known, self.largest, self.calls = {x.untyped_storage().data_ptr() for x in held}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += func.name() == "farspan::half_width_attention"
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.numel())
        return out


def kernel_calls(call: Callable[[], object]) -> int:
    """Count how often a call runs the half-width kernel."""
    with decoding("triton"), Allocations() as made:
        call()
    return made.calls


def left_padding(rows: int, length: int, pad: int) -> torch.Tensor:
    return (torch.arange(length, device=DEVICE)[None] >= torch.arange(rows, device=DEVICE)[:, None] * pad).long()


CASES: list[tuple[dict[str, Any], int | None, bool]] = [
    ({"attention": ["coca-exact"]}, None, False),
    ({"attention": ["coca-slack"], "num_attention_heads": 2, "num_key_value_heads": 2}, 24, False),
    ({"attention": ["coca-strict"], "num_key_value_heads": 2, "coca_activation": "softplus"}, 24, True),
    ({"attention": ["coca-slack", NOPE, "rope"], "rope_parameters": PER_QUERY}, None, True),
    ({"attention": ["coca-slack", NOPE, "rope"], "rope_parameters": PER_QUERY}, 24, True),
    ({"attention": ["coca-exact"], "rope_parameters": PER_REQUEST}, None, True),
    ({"attention": ["coca-exact"], "rope_parameters": PER_REQUEST}, 24, False),
    ({"attention": ["coca-exact"], "rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "qk_norm": True}, 24, True),
    ({"attention": [LOCAL, "coca-exact"]}, 24, True),
    ({"attention": ["coca-slack", NOPE], "log_length": True}, None, True),
]
"""A model, the slots of its cache (None = growing), and whether there is padding. A step of a kernel takes a tenth of a
second in the interpreter, per layer, row and key head."""


@pytest.mark.parametrize(
    ("options", "length", "padded"), CASES, ids=lambda x: name_of(x) if isinstance(x, dict) else str(x)
)
@torch.no_grad()
def test_decoding_on_the_kernel_equals_decoding_without(
    options: dict, length: int | None, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens at once cross a doubling of dynamic NTK. Windows keep features, which need no kernel."""
    x, rotated, features = tokens(2, 17).to(DEVICE), [], coca.coca_features
    mask = left_padding(2, 17, 2) if padded else None
    model = model_of(**options)
    with decoding("sdpa"):
        want = chunked(model, x, [13, 1, 1, 2], mask, length=length)
    monkeypatch.setattr(
        coca, "coca_features", lambda q, t, *a, **o: rotated.append(t.shape[2]) or features(q, t, *a, **o)
    )
    with decoding("triton"):
        got = chunked(model, x, [13, 1, 1, 2], mask, length=length)
    check_near(want[:, 13:], got[:, 13:])
    assert max(rotated, default=0) <= 13  # the prompt's keys may be rotated, but no cached ones again


@pytest.mark.parametrize("length", [None, 20], ids=["growing", "static"])
@torch.no_grad()
def test_padding_after_real_tokens_is_continued(length: int | None) -> None:
    """Where ranks and slots differ, each key has its own position."""
    model, x = model_of(attention=["coca-slack", NOPE], rope_parameters=PER_QUERY), tokens(2, 15).to(DEVICE)
    mask = torch.ones_like(x)
    mask[1, 7:12] = 0
    want, got = without_and_with_kernel(lambda: chunked(model, x, [12, 1, 2], mask, length=length))
    check_near(want[:, 12:], got[:, 12:])
    alone = model(torch.cat((x[1:, :7], x[1:, 12:]), dim=1)).logits
    assert (got[1, 12:] - alone[0, 7:]).abs().max() <= 1e-5


@pytest.mark.parametrize(("rows", "length"), [(1, None), (2, None), (2, 20)])
@torch.no_grad()
def test_positions_of_ones_own_are_kept(rows: int, length: int | None) -> None:
    """Each row begins elsewhere, which slack shows."""
    model, x = model_of(attention=["coca-slack"]), tokens(2, 16).to(DEVICE)
    positions = torch.tensor([[100], [40_000]][:rows], device=DEVICE) + torch.arange(16, device=DEVICE)
    options = {"length": length, "positions": positions}
    want, got = without_and_with_kernel(lambda: chunked(model, x, [13, 1, 2], **options)[:, 13:])
    check_near(want, got)
    assert (want - model(x).logits[:, 13:]).abs().max() > 1e-3


@pytest.mark.parametrize(("length", "rope"), [(None, None), (110, PER_QUERY)], ids=["growing", "static"])
@torch.no_grad()
def test_a_step_makes_nothing_as_large_as_the_cache(
    length: int | None, rope: dict | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.cache.CHEAP", 0)
    model = model_of(attention=["coca-exact", NOPE], rope_parameters=rope, num_attention_heads=1)
    x, found = tokens(1, 102).to(DEVICE), {}
    for backend in ("sdpa", "triton"):
        cache = FarspanCache(model.config, max_length=length)
        model(x[:, :100], past_key_values=cache)
        model(x[:, 100:101], past_key_values=cache)  # a growing cache allocates
        held = [*model.parameters(), *(x for layer in cache.layers for x in (layer.keys, layer.values))]
        with decoding(backend), Allocations(*held) as made:
            model(x[:, 101:], past_key_values=cache)
        found[backend] = made.calls, made.largest
    assert found["triton"][0] == 2
    assert found["triton"][1] <= (length or 101)  # a static cache has one row of positions for all layers
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
    with decoding("triton"):
        parts = [model(x[:, i : i + 1], past_key_values=cache).logits for i in (13, 14)]
    assert (torch.cat(parts, dim=1) - model(x).logits[:, 13:]).abs().max() <= 1e-5


# When the kernel is taken


@torch.no_grad()
def test_what_the_kernel_is_not_for_goes_on_as_before() -> None:
    """Prompts, gradients, packed documents, other implementations of attention."""
    model, x = model_of(), tokens(1, 12).to(DEVICE)
    packed = torch.zeros(1, 2, dtype=torch.long, device=DEVICE)

    def trains() -> None:
        with torch.enable_grad():
            model(x[:, :1]).logits.sum().backward()

    assert kernel_calls(lambda: model(x[:, :3])) == 0  # with four heads per key head
    assert kernel_calls(lambda: model(x[:, :2])) == 1
    assert kernel_calls(trains) == 0
    assert kernel_calls(lambda: model(x[:, :2], position_ids=packed, use_cache=False)) == 0
    model.set_attn_implementation("sdpa")
    assert kernel_calls(lambda: chunked(model, x, [10, 1, 1])) == 0


def test_a_frozen_model_decodes_on_the_kernel_in_grad_mode_too() -> None:
    """Unless a gradient is wanted: of a weight before or in the layer, or of what is cached."""
    model, x = model_of(attention=[NOPE, "coca-exact"]), tokens(1, 1).to(DEVICE)
    assert kernel_calls(lambda: model(x)) == 0
    model.requires_grad_(False).model.layers[0].mlp.requires_grad_()
    assert kernel_calls(lambda: model(x)) == 1
    model.requires_grad_(False)
    cache = FarspanCache(model.config)
    for layer in range(2):
        cache.update(*(torch.rand(1, 1, 5, d, device=DEVICE, requires_grad=layer == 0) for d in (4, 8)), layer)
    assert kernel_calls(lambda: model(x, past_key_values=cache)) == 0
    assert kernel_calls(lambda: model(x)) == 2


@torch.no_grad()
def test_under_autocast_the_kernel_gets_what_sdpa_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 weights under autocast, as `farspan eval` has them, decode on the kernel where bfloat16 does."""
    ids, seen, op, model = tokens(2, 12).to(DEVICE), [], layers.coca_attention, model_of()
    monkeypatch.setattr(layers, "coca_attention", lambda q, *a, **o: seen.append(q.dtype) or op(q, *a, **o))

    def last() -> torch.Tensor:
        cache = FarspanCache(model.config)
        with torch.autocast(DEVICE, torch.bfloat16):
            model(ids[:, :-1], past_key_values=cache)
            logits = model(ids[:, -1:], past_key_values=cache).logits.float()
        assert set(seen) == {cache.layers[0].keys.dtype} == {torch.bfloat16}
        with pytest.raises(ValueError, match=r"cache holds torch\.bfloat16, got torch\.float32"):
            model(ids[:, -1:], past_key_values=cache)
        return logits

    plain, kernel = without_and_with_kernel(last)
    assert (plain - kernel).abs().max() <= 0.03 * plain.abs().max()


# Generation and graphs


@pytest.mark.parametrize(
    ("attention", "padded"),
    [
        ([LOCAL, "coca-exact"], False),
        ([LOCAL, "coca-exact"], True),
        ([LOCAL, LOCAL], True),
        (["linear-coca", LOCAL], True),
    ],
    ids=str,
)
@torch.no_grad()
def test_generate_hands_every_static_step_the_same_shapes(
    attention: list[Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or transformers, which compiles the step on a GPU, would record a graph for each token."""
    model, x = model_of(attention=attention), tokens(2, 13).to(DEVICE)
    forward, masks = model.forward, []
    monkeypatch.setattr(
        model, "forward", lambda **inputs: masks.append(inputs.get("attention_mask")) or forward(**inputs)
    )
    mask = left_padding(2, 13, 3) if padded else torch.ones_like(x)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    static = model.generate(x, attention_mask=mask, disable_compile=True, **settings)
    shapes = [None if given is None else tuple(given.shape) for given in masks[1:]]
    growing = model.generate(x, attention_mask=mask, **(settings | {"cache_implementation": "dynamic"}))
    assert shapes == [(2, 18) if padded else None] * 4
    assert torch.equal(static, growing)


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_of_a_step_follows_the_sequence() -> None:
    model = model_of(attention=["coca-exact", NOPE], rope_parameters=PER_QUERY, num_key_value_heads=2)
    x = tokens(2, 14).to(DEVICE)
    cache, parts = FarspanCache(model.config, max_length=20), []
    model(x[:, :10], past_key_values=cache)
    token, logits = x[:, 10:11].clone(), torch.empty(2, 97, device=DEVICE)
    with decoding("triton"):
        replay = captured(lambda: logits.copy_(model(token, past_key_values=cache).logits[:, -1]))
    for layer in cache.layers:
        layer.cumulative_length.fill_(10)  # before the graph was captured, the step ran once
    for i in range(10, 14):
        token.copy_(x[:, i : i + 1])
        replay()
        parts.append(logits.clone())
    assert (torch.stack(parts, dim=1) - model(x).logits[:, 10:]).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "masked"),
    [({"attention": [LOCAL]}, False), ({"attention": ["coca-slack"], "rope_parameters": PER_QUERY}, True)],
    ids=str,
)
@torch.no_grad()
def test_a_compiled_step_is_one_graph(options: dict, masked: bool) -> None:
    """No graph break, and no new graph for each token, also while a window fills up and after."""
    model, x = model_of(**options), tokens(2, 11).to(DEVICE)
    mask = left_padding(2, 11, 3) if masked else None
    with decoding("triton"):
        found, graphs = compiled_steps(model, x, 5, 16, mask)
    assert (found - model(x, attention_mask=mask).logits[:, 5:]).abs().max() <= 1e-5
    assert graphs <= 4


PREPARED: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("options", PREPARED, ids=name_of)
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
