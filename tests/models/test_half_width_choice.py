"""When a model decodes on the half-width kernel, when it does not, and what raises."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanCache, FarspanForCausalLM, layers
from tests.models.half_width import DEVICE, NOPE, kernel_calls, model_of, steps, without_and_with_kernel
from tests.models.small import make, tokens


@torch.no_grad()
def test_what_the_kernel_is_not_for_goes_on_as_before() -> None:
    """Prompts, gradients, packed documents, other implementations of attention."""
    model, x = model_of(decode_backend="triton"), tokens(1, 12).to(DEVICE)
    packed = torch.cat((torch.arange(4), torch.arange(3)))[None].to(DEVICE)

    def trains() -> None:
        with torch.enable_grad():
            model(x[:, :1]).logits.sum().backward()

    assert kernel_calls(lambda: model(x[:, :9])) == 0  # with four heads per key head
    assert kernel_calls(lambda: model(x[:, :8])) == 1
    assert kernel_calls(trains) == 0
    assert kernel_calls(lambda: model(x[:, :7], position_ids=packed, use_cache=False)) == 0
    model.set_attn_implementation("sdpa")
    assert kernel_calls(lambda: steps(model, x, [10, 1, 1])) == 0


@torch.no_grad()
def test_what_cannot_run_raises_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"^backend='triton' .*, got torch\.float64; use backend='sdpa'"):
        make(decode_backend="triton")(tokens(1, 3))
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


def test_a_frozen_model_decodes_on_the_kernel_in_grad_mode_too() -> None:
    """Unless a gradient is wanted: of a weight before or in the layer, of the input, or of what is cached."""
    model, x = model_of(attention=[NOPE, "coca-exact"], decode_backend="triton"), tokens(1, 1).to(DEVICE)

    def taken(**options: Any) -> int:
        return kernel_calls(lambda: model(x, **options))

    assert taken() == 0
    model.requires_grad_(False)
    assert taken() == 2
    model.model.layers[0].mlp.requires_grad_()
    assert taken() == 1
    model.requires_grad_(False).model.layers[1].self_attn.t_proj.requires_grad_()
    assert taken() == 1
    model.requires_grad_(False)
    cache = FarspanCache(model.config)
    for layer in range(2):
        cache.update(*(torch.rand(1, 1, 5, d, device=DEVICE, requires_grad=layer == 0) for d in (4, 8)), layer)
    assert taken(past_key_values=cache) == 0
    assert taken() == 2


def test_autocast_decides_by_the_dtype_that_attention_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 weights under autocast, as `farspan eval` has them, decode on the kernel where bfloat16 does."""
    model, ids, seen, op = model_of(), tokens(1, 1).to(DEVICE), [], layers.coca_attention
    monkeypatch.setattr(layers, "coca_attention", lambda q, *a, **o: seen.append(q.dtype) or op(q, *a, **o))
    for dtype in (torch.float32, torch.bfloat16):
        seen.clear()
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
            model(ids, past_key_values=FarspanCache(model.config))
        assert seen == [dtype]


@torch.no_grad()
def test_autocast_gives_the_kernel_what_it_gives_sdpa() -> None:
    ids = tokens(2, 12).to(DEVICE)

    def last(model: FarspanForCausalLM) -> torch.Tensor:
        cache = FarspanCache(model.config)
        with torch.autocast(DEVICE, torch.bfloat16):
            model(ids[:, :-1], past_key_values=cache)
            assert cache.layers[0].keys.dtype == torch.bfloat16
            return model(ids[:, -1:], past_key_values=cache).logits.float()

    plain, kernel = without_and_with_kernel(model_of(), last)
    assert (plain - kernel).abs().max() <= 0.03 * plain.abs().max()


@torch.no_grad()
def test_a_cache_of_another_dtype_than_autocasts_raises() -> None:
    model, ids = model_of(decode_backend="triton"), tokens(1, 6).to(DEVICE)
    cache = FarspanCache(model.config)
    model(ids[:, :-1], past_key_values=cache)
    with (
        torch.autocast(DEVICE, torch.bfloat16),
        pytest.raises(ValueError, match=r"cache holds torch\.float32, got torch\.bfloat16"),
    ):
        model(ids[:, -1:], past_key_values=cache)
