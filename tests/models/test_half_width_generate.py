"""Generation on the half-width kernel: the same tokens, and one graph for every step."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanCache
from farspan.bench.timing import captured
from tests.models.half_width import DEVICE, NOPE, left_padding, model_of, on, without_and_with_kernel
from tests.models.small import LOCAL, PER_QUERY, PER_REQUEST, tokens


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
    x, mask = tokens(2, 13).to(DEVICE), left_padding(2, 13, 3)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    assert torch.equal(
        *without_and_with_kernel(model_of(**options), lambda model: model.generate(x, attention_mask=mask, **settings))
    )


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
    model, x = model_of(attention=attention, decode_backend="sdpa"), tokens(2, 13).to(DEVICE)
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


@torch.no_grad()
def test_beams_give_the_same_tokens() -> None:
    model, x = model_of(attention=[LOCAL, "coca-exact"], rope_parameters=PER_QUERY), tokens(1, 13).to(DEVICE)
    settings = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*without_and_with_kernel(model, lambda model: model.generate(x, **settings)))


@pytest.mark.gpu
@torch.no_grad()
def test_a_cuda_graph_of_a_step_follows_the_sequence() -> None:
    model = model_of(attention=["coca-exact", NOPE], rope_parameters=PER_QUERY, decode_backend="triton")
    x = tokens(2, 14).to(DEVICE)
    cache, parts = FarspanCache(model.config, max_length=20), []
    model(x[:, :10], past_key_values=cache)
    token, logits = x[:, 10:11].clone(), torch.empty(2, 97, device=DEVICE)
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
    model, x = model_of(decode_backend="triton", **options), tokens(2, 11).to(DEVICE)
    mask = left_padding(2, 11, 3)
    cache, parts = FarspanCache(model.config, max_length=16), []
    model(x[:, :5], past_key_values=cache, **({"attention_mask": mask[:, :5]} if masked else {}))
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=graphs)
    for i in range(5, 11):
        extra = {"attention_mask": torch.nn.functional.pad(mask[:, : i + 1], (0, 15 - i))} if masked else {}
        parts.append(step(x[:, i : i + 1], past_key_values=cache, **extra).logits)
    want = on("sdpa", model)(x, **({"attention_mask": mask} if masked else {})).logits[:, 5:]
    assert (torch.cat(parts, dim=1) - want).abs().max() <= 1e-5
    assert graphs.frame_count <= 4
