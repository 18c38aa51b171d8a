"""A model that decodes on the half-width kernel gives the numbers it gives without, and turns no cached key."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanCache, FarspanForCausalLM
from farspan.benchmark.clock import captured
from farspan.layers import Attention
from tests.models.small import LOCAL, PER_QUERY, PER_REQUEST, make, name_of, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOPE = {"kind": "coca", "rotary": False}
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


def model_of(**options: Any) -> FarspanForCausalLM:
    options = {"attention": ["coca-exact"], "num_key_value_heads": 1, "dtype": torch.float32, **options}
    return make(num_hidden_layers=len(options["attention"]), **options).to(DEVICE)


def expected_of(model: FarspanForCausalLM, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call gives without the kernel, and with it."""
    results = []
    for backend in ("sdpa", "triton"):
        with decoding_on(model, backend):
            results.append(call())
    return results[0], results[1]


@contextmanager
def decoding_on(model: FarspanForCausalLM, backend: str) -> Iterator[None]:
    before, model.config.decode_backend = model.config.decode_backend, backend
    yield
    model.config.decode_backend = before


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


def steps(
    model: FarspanForCausalLM, x: torch.Tensor, pieces: list[int], mask: torch.Tensor | None, length: int | None
) -> torch.Tensor:
    """Logits of a text read piece by piece."""
    cache, parts, seen = FarspanCache(model.config, max_length=length), [], 0
    for piece in x.split(pieces, dim=1):
        seen += piece.shape[1]
        options = {} if mask is None else {"attention_mask": mask[:, :seen]}
        parts.append(model(piece, past_key_values=cache, **options).logits)
    return torch.cat(parts, dim=1)


def left_padding(rows: int, length: int, pad: int) -> torch.Tensor:
    return (torch.arange(length, device=DEVICE)[None] >= torch.arange(rows, device=DEVICE)[:, None] * pad).long()


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


@torch.no_grad()
def test_what_the_kernel_is_not_for_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, gradients, packed documents, a rotated cache, other implementations of attention."""
    model, rotated = (model_of(cache_layout=layout, decode_backend="triton") for layout in ("half", "rotated"))
    x = tokens(1, 12).to(DEVICE)
    packed = torch.cat((torch.arange(4), torch.arange(3)))[None].to(DEVICE)

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(Attention, "decode", refuse)
    model(x[:, :9])  # times four heads a key head
    with torch.enable_grad():
        model(x[:, :1]).logits.sum().backward()
    model(x[:, :7], position_ids=packed, use_cache=False)
    steps(rotated, x, [10, 1, 1], None, None)
    with pytest.raises(AssertionError, match="the kernel ran"):
        model(x[:, :8])
    model.set_attn_implementation("sdpa")
    steps(model, x, [10, 1, 1], None, None)


@torch.no_grad()
def test_what_cannot_run_is_refused_with_the_reason() -> None:
    model, x = make(decode_backend="triton"), tokens(1, 3)
    with pytest.raises(
        ValueError, match=r"^decode_backend='triton' takes .*, got torch\.float64; use decode_backend='sdpa'"
    ):
        model(x)
    with pytest.raises(ValueError, match="decode_backend must be one of 'auto', 'sdpa', 'triton', got 'tritn'"):
        make(decode_backend="tritn")


def test_the_choice_is_of_this_machine_and_never_saved(tmp_path) -> None:
    model = make(decode_backend="triton")
    model.save_pretrained(tmp_path)
    assert "decode_backend" not in (tmp_path / "config.json").read_text()
    assert FarspanForCausalLM.from_pretrained(tmp_path).config.decode_backend == "auto"
    assert FarspanForCausalLM.from_pretrained(tmp_path, decode_backend="triton").config.decode_backend == "triton"
    model.set_rope_parameters(rope_type="ntk", factor=2.0)
    assert model.config.decode_backend == copy.deepcopy(model.config).decode_backend == "triton"


def test_a_frozen_model_decodes_on_the_kernel_in_grad_mode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a gradient is wanted: of a weight before or in the layer, of the input, or of what is cached."""
    model, x = model_of(attention=[NOPE, "coca-exact"], decode_backend="triton"), tokens(1, 1).to(DEVICE)
    ran, decode = [], Attention.decode
    monkeypatch.setattr(Attention, "decode", lambda self, *a, **o: ran.append(self.layer_idx) or decode(self, *a, **o))

    def taken(**options: Any) -> list[int]:
        ran.clear()
        model(x, **options)
        return list(ran)

    assert taken() == []
    model.requires_grad_(False)
    assert taken() == [0, 1]
    model.model.layers[0].mlp.requires_grad_()
    assert taken() == [0]
    model.requires_grad_(False).model.layers[1].self_attn.t_proj.requires_grad_()
    assert taken() == [0]
    model.requires_grad_(False)
    cache = FarspanCache(model.config)
    for layer in range(2):
        cache.update(*(torch.rand(1, 1, 5, d, device=DEVICE, requires_grad=layer == 0) for d in (4, 8)), layer)
    assert taken(past_key_values=cache) == []
    assert taken() == [0, 1]


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


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        ({"attention": [LOCAL, "rope", NOPE], "rope_parameters": PER_QUERY}, "dynamic"),
        ({"attention": [LOCAL, "coca-exact"]}, "static"),
        ({"attention": ["coca-exact"], "rope_parameters": PER_REQUEST}, "static"),
    ],
    ids=str,
)
@torch.no_grad()
def test_generate_gives_the_same_tokens(options: dict, cache: str) -> None:
    model, x = model_of(**options), tokens(2, 13).to(DEVICE)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    mask = left_padding(2, 13, 3)
    assert torch.equal(*expected_of(model, lambda: model.generate(x, attention_mask=mask, **settings)))


@pytest.mark.parametrize(
    ("attention", "padded"),
    [
        ([LOCAL, "coca-exact"], False),
        ([LOCAL, "coca-exact"], True),
        ([LOCAL, LOCAL], True),
        (["linear-coca"], True),
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
    with decoding_on(model, "sdpa"):
        static = model.generate(x, attention_mask=mask, disable_compile=True, **settings)
        shapes = [None if given is None else tuple(given.shape) for given in masks[1:]]
        growing = model.generate(x, attention_mask=mask, **(settings | {"cache_implementation": "dynamic"}))
    assert shapes == [(2, 18) if padded else None] * 4
    assert torch.equal(static, growing)


@torch.no_grad()
def test_beams_give_the_same_tokens() -> None:
    model, x = model_of(attention=[LOCAL, "coca-exact"], rope_parameters=PER_QUERY), tokens(1, 13).to(DEVICE)
    settings = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*expected_of(model, lambda: model.generate(x, **settings)))


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_of_a_step_follows_the_text() -> None:
    model, x = model_of(attention=["coca-exact", NOPE], rope_parameters=PER_QUERY), tokens(2, 14).to(DEVICE)
    cache, parts = FarspanCache(model.config, max_length=20), []
    model(x[:, :10], past_key_values=cache)
    token, logits = x[:, 10:11].clone(), torch.empty(2, 97, device=DEVICE)
    with decoding_on(model, "triton"):
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
    mask = left_padding(2, 11, 3)
    cache, parts = FarspanCache(model.config, max_length=16), []
    model(x[:, :5], past_key_values=cache, **({"attention_mask": mask[:, :5]} if masked else {}))
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=graphs)
    with decoding_on(model, "triton"):
        for i in range(5, 11):
            extra = {"attention_mask": torch.nn.functional.pad(mask[:, : i + 1], (0, 15 - i))} if masked else {}
            parts.append(step(x[:, i : i + 1], past_key_values=cache, **extra).logits)
    want = model(x, **({"attention_mask": mask} if masked else {})).logits[:, 5:]
    assert (torch.cat(parts, dim=1) - want).abs().max() <= 1e-5
    assert graphs.frame_count <= 4


def test_autocast_decides_by_the_dtype_that_attention_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 weights under autocast, as `farspan eval` has them, decode on the kernel where bfloat16 does."""
    model, ids, asked = model_of(), tokens(1, 1).to(DEVICE), []
    decide = Attention.takes_half_width

    def noted(self: Attention, n: int, dtype: torch.dtype, *args: Any, **options: Any) -> bool:
        asked.append(dtype)
        return decide(self, n, dtype, *args, **options)

    monkeypatch.setattr(Attention, "takes_half_width", noted)
    for dtype in (torch.float32, torch.bfloat16):
        asked.clear()
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
            model(ids, past_key_values=FarspanCache(model.config))
        assert set(asked) == {dtype}


@torch.no_grad()
def test_autocast_gives_the_kernel_what_it_gives_sdpa() -> None:
    model, ids = model_of(), tokens(2, 12).to(DEVICE)

    def last() -> torch.Tensor:
        cache = FarspanCache(model.config)
        with torch.autocast(DEVICE, torch.bfloat16):
            model(ids[:, :-1], past_key_values=cache)
            assert cache.layers[0].keys.dtype == torch.bfloat16
            return model(ids[:, -1:], past_key_values=cache).logits.float()

    plain, kernel = expected_of(model, last)
    assert (plain - kernel).abs().max() <= 0.03 * plain.abs().max()


@torch.no_grad()
def test_a_cache_of_another_dtype_than_autocasts_is_refused() -> None:
    model, ids, cache = model_of(), tokens(1, 6).to(DEVICE), FarspanCache(model_of().config)
    model(ids[:, :-1], past_key_values=cache)
    with (
        decoding_on(model, "triton"),
        torch.autocast(DEVICE, torch.bfloat16),
        pytest.raises(
            ValueError, match=r"past_key_values must hold what attention works in, torch\.bfloat16, got torch\.fl"
        ),
    ):
        model(ids[:, -1:], past_key_values=cache)


def test_a_model_without_numbers_has_shapes() -> None:
    """Autocast does not know the meta device."""
    assert model_of().to("meta")(tokens(1, 6).to("meta")).logits.shape[:2] == (1, 6)
