"""The model: what else is in a batch changes nothing, and it is a good citizen of transformers."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM
from tests.models.small import (
    BOTH,
    CONFIGURATIONS,
    LEFT,
    LINEAR,
    MIXED,
    NAMES,
    NOPE,
    PER_QUERY,
    RIGHT,
    TIGHT,
    chunked,
    make,
    name_of,
    poisoned,
    tokens,
)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_neither_padding_nor_batch_mates_nor_history_change_a_row(options: dict) -> None:
    """NaN in padding; in chunks, the first is all padding in one row, and the last two are single tokens."""
    model = make(**options)
    x = model.model.embed_tokens(tokens(2, 20))

    def check(logits: torch.Tensor, mask: torch.Tensor) -> None:
        for row, real in enumerate(mask.bool()):
            assert (logits[row, real] - alone[row]).abs().max() <= TIGHT

    for mask in (LEFT, RIGHT, BOTH):
        alone = [model(inputs_embeds=row[real][None]).logits[0] for row, real in zip(x, mask.bool(), strict=True)]
        model(tokens(1, 200))  # an unrelated longer call
        for use_cache in (False, True):
            check(model(inputs_embeds=poisoned(x, mask), attention_mask=mask, use_cache=use_cache).logits, mask)
        for length in (None, 24) if mask is LEFT else ():
            check(chunked(model, poisoned(x, mask), [4, 14, 1, 1], mask, length=length), mask)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
def test_gradients_are_those_of_finite_padding(options: dict) -> None:
    model, labels = make(**options).train(), tokens(2, 20)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    labels = labels.masked_fill(BOTH == 0, -100)
    found = []
    for inputs in (x, poisoned(x, BOTH)):
        inputs = inputs.clone().requires_grad_()
        model.zero_grad()
        model(inputs_embeds=inputs, attention_mask=BOTH, labels=labels).loss.backward()
        found.append([inputs.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    for want, got in zip(*found, strict=True):
        assert got.isfinite().all()
        assert (got - want).abs().max() <= TIGHT


@pytest.mark.parametrize("attention", [*NAMES, MIXED, {"kind": "cosformer", "rotary": False}, "linear-coca"], ids=str)
@torch.no_grad()
def test_packed_documents_equal_separate_ones(attention: object) -> None:
    model = make(attention)
    documents = [tokens(1, n) for n in (11, 5, 20)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    x = torch.cat(documents, dim=1)
    separate = torch.cat([model(d).logits for d in documents], dim=1)
    for options in ({}, {"attention_mask": torch.ones_like(x), "use_cache": False}):
        packed = model(x, position_ids=positions, **options)
        assert (packed.logits - separate).abs().max() <= TIGHT
        assert packed.past_key_values is None  # packed documents cannot be continued
    with pytest.raises(ValueError, match="position_ids must go on by one where a cache is used"):
        model(x, position_ids=positions, past_key_values=FarspanCache(model.config))


def test_packed_documents_stay_apart_beside_a_padded_row() -> None:
    """Padding in one row must not join the documents of another."""
    model, x = make("coca-exact"), tokens(2, 12)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].repeat(2, 1)
    mask = torch.ones_like(x)
    mask[1, -1] = 0
    changed = x.clone()
    changed[0, :5] = (x[0, :5] + 1) % 50
    for given in (None, torch.ones_like(x), mask):
        first, second = (model(ids, position_ids=positions, attention_mask=given).logits[0, 5:] for ids in (x, changed))
        assert torch.equal(first, second)


@torch.no_grad()
def test_positions_with_gaps_are_used_as_given() -> None:
    model, x = make("rope"), tokens(1, 12)
    spread = model(x, position_ids=torch.arange(12)[None] * 3).logits
    assert (spread - model(x).logits).abs().max() > 1e-3
    assert (model(x, position_ids=torch.arange(12)[None] + 50).logits - model(x).logits).abs().max() <= 1e-7


@torch.no_grad()
def test_embeddings_may_be_given_instead_of_tokens() -> None:
    model, x = make(MIXED), tokens(2, 20)
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(x)).logits, model(x).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(x, inputs_embeds=model.model.embed_tokens(x))


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_a_block_run_alone_is_the_block_in_the_model(options: dict, padded: bool) -> None:
    model, x = make(**options), tokens(2, 20)
    mask = torch.ones_like(x)
    mask[1, :6] = 0 if padded else 1
    states = model(x, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == 4
    for i, block in enumerate(model.model.layers):
        out = block(states[i], model.model.context(states[i], mask))
        out = model.model.norm(out) if i == 2 else out  # transformers gives the last state after the norm
        assert torch.equal(out[mask.bool()], states[i + 1][mask.bool()])


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@torch.no_grad()
def test_blocks_run_one_by_one_decode_as_the_model_does(padded: bool) -> None:
    model, x = make(MIXED), tokens(2, 20)
    mask = torch.ones_like(x)
    mask[1, :6] = 0 if padded else 1
    cache, parts, seen = FarspanCache(model.config), [], 0
    for piece in x.split([17, 1, 2], dim=1):
        seen += piece.shape[1]
        hidden = model.model.embed_tokens(piece)
        context = model.model.context(hidden, mask[:, :seen], past_key_values=cache)
        for block in model.model.layers:
            hidden = block(hidden, context, past_key_values=cache)
        parts.append(model.lm_head(model.model.norm(hidden)))
    difference = torch.cat(parts, dim=1) - model(x, attention_mask=mask).logits
    assert difference[mask.bool()].abs().max() <= TIGHT


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True, "log_length": True},
        {"coca_activation": "softplus", "rope_parameters": PER_QUERY},
        {"attention": ["cosformer", NOPE, "pope"], "cosformer_max_length": 64, "kv_shift": True},
        {"attention": "linear-coca"},
    ],
    ids=name_of,
)
def test_autocast_trains(options: dict) -> None:
    model, x = make(dtype=torch.float32, **options).train(), tokens(2, 24)
    exact = model(x, labels=x).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    assert (loss - exact).abs() < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_llama_weights_give_llama_logits() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
        )
    ).eval()
    ours = make("rope", tie_word_embeddings=False, dtype=torch.float32)
    ours.load_state_dict(llama.state_dict())
    x = tokens(2, 200)
    assert (ours(x).logits - llama(x).logits).abs().max() <= 1e-5


YARN = {"rope_type": "yarn", "factor": 4.0}
NTK = {"rope_type": "ntk", "factor": 4.0, "rope_theta": 100.0}
BLOCK = ["input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm"]


@pytest.mark.parametrize(
    ("attention", "query", "key", "width"),
    [
        *((name, 32, "k", 16) for name in ("rope", "alibi", "cosformer")),
        *((name, 32, "t", 8) for name in ("coca-exact", "coca-slack", "linear-coca")),
        ("coca-strict", 16, "t", 8),
    ],
)
def test_weights_keep_the_names_and_shapes_of_saved_models(attention: str, query: int, key: str, width: int) -> None:
    """Checkpoints of version 0.1 have these."""
    shapes = {"q_proj": (query, 32), f"{key}_proj": (width, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    attended = {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    others = ["lm_head", "model.embed_tokens", "model.norm", *(f"model.layers.0.{name}" for name in BLOCK)]
    state = make(attention, num_hidden_layers=1).state_dict()
    assert set(state) == {f"{name}.weight" for name in others} | set(attended)
    assert {name: tuple(state[name].shape) for name in attended} == attended
    options = {"qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    more = set(make(attention, num_hidden_layers=1, **options).state_dict()) - set(state)
    optional = {f"self_attn.{name}_norm.weight" for name in ("q", key)}
    optional |= {f"self_attn.{name}_proj.bias" for name in ("q", key, "v", "o")}
    optional |= {f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")}
    assert more == {f"model.layers.0.{name}" for name in optional}


@pytest.mark.parametrize(
    "options",
    [{"attention": MIXED, "rope_parameters": PER_QUERY}, {"attention": "linear-coca", "rope_parameters": YARN}],
    ids=name_of,
)
def test_save_and_load_through_the_auto_classes(options: dict, tmp_path: Path) -> None:
    model, x = make(**options), tokens(1, 20)
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert AutoConfig.from_pretrained(tmp_path).attention_specs == model.config.attention_specs
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_config_may_repeat_what_attention_says_and_loads_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other tools write and set `layer_types` and `sliding_window`; static NTK is unknown to transformers."""
    config = FarspanConfig.preset("tiny", attention="hybrid-rope", window=8, rope_parameters=NTK)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 4, "layer_types": None}))
    with caplog.at_level(logging.WARNING):
        loaded = AutoConfig.from_pretrained(tmp_path)
    assert not caplog.text
    assert loaded.sliding_window == 8
    assert loaded.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert loaded.rotary() == config.rotary()


@pytest.mark.parametrize(
    "options",
    [{"attention": MIXED}, {"attention": "alibi"}, {"attention": LINEAR, "cosformer_beyond": "decay"}],
    ids=name_of,
)
def test_gradient_checkpointing_changes_no_gradient(options: dict) -> None:
    model, x = make(**options).train(), tokens(2, 24)
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.zero_grad()
        model(x, labels=x).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=TIGHT) for a, b in zip(*gradients, strict=True))


def test_presets_have_as_many_parameters_as_they_say() -> None:
    def size(preset: str, attention: str) -> int:
        return FarspanForCausalLM(FarspanConfig.preset(preset, attention=attention)).num_parameters()

    with torch.device("meta"):
        assert 345e6 < size("350m", "rope") < 360e6
        assert 123.5e6 < size("124m", "rope") < 124.5e6
        assert size("350m", "rope") - size("350m", "coca-exact") == 24 * 1024 * 512  # T is half as wide as K


@pytest.mark.parametrize(
    ("attention", "scaling"), [(MIXED, PER_QUERY), ("linear-coca", {"rope_type": "ntk", "factor": 4.0})], ids=str
)
@torch.no_grad()
def test_another_scaling_can_be_set_on_a_finished_model(attention: object, scaling: dict) -> None:
    model, x = make(attention), tokens(1, 40)
    stretched = make(attention, rope_parameters=scaling)
    stretched.load_state_dict(model.state_dict())
    before = model(x).logits
    model.set_rope_parameters(**scaling)
    assert torch.equal(model(x).logits, stretched(x).logits)
    with pytest.raises(ValueError, match="scaling factor must be at least 1"):
        model.set_rope_parameters(rope_type="linear", factor=0.1)
    assert torch.equal(model(x).logits, stretched(x).logits)
    model.set_rope_parameters(rope_type="default")
    assert torch.equal(model(x).logits, before)


def test_a_model_without_numbers_has_shapes() -> None:
    """Autocast does not know the meta device."""
    assert make().to("meta")(tokens(1, 6).to("meta")).logits.shape[:2] == (1, 6)
