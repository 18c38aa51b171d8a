"""When a model decodes on the half-width kernel, when it does not, and what is refused."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan import FarspanCache, FarspanForCausalLM
from farspan.layers import Attention
from tests.models.half_width import DEVICE, NOPE, decoding_on, expected_of, model_of, steps
from tests.models.small import make, tokens


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
