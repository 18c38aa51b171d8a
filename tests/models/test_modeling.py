"""The model: whatever stands beside a text changes nothing, and it is a good citizen of transformers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from farspan import FarspanCache, FarspanConfig, FarspanForCausalLM, FarspanForMaskedLM
from tests.models.small import CONFIGURATIONS, MIXED, NAMES, PER_QUERY, TIGHT, make, name_of, tokens


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_batch_mates_and_history_change_nothing(options: dict) -> None:
    model = make(**options)
    long, short = tokens(1, 75), tokens(1, 21)
    alone = model(short).logits
    model(tokens(1, 200))  # an unrelated longer call
    x = torch.cat((long, torch.cat((tokens(1, 54), short), dim=1)))
    mask = torch.ones_like(x)
    mask[1, :54] = 0
    batched = model(x, attention_mask=mask).logits
    assert (batched[1, 54:] - alone[0]).abs().max() <= TIGHT
    cache, parts = FarspanCache(model.config), []
    seen = 0
    for piece in x.split([60, 1, 1, 13], dim=1):
        seen += piece.shape[1]
        parts.append(model(piece, attention_mask=mask[:, :seen], past_key_values=cache).logits)
    assert (torch.cat(parts, dim=1)[1, 54:] - alone[0]).abs().max() <= TIGHT
    assert (torch.cat(parts, dim=1)[0] - model(long).logits[0]).abs().max() <= TIGHT


@pytest.mark.parametrize("attention", [*NAMES, MIXED, {"kind": "cosformer", "rotary": False}, "linear-coca"], ids=str)
@torch.no_grad()
def test_packed_documents_equal_separate_ones(attention: object) -> None:
    model = make(attention)
    documents = [tokens(1, n) for n in (11, 5, 20)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    x = torch.cat(documents, dim=1)
    separate = torch.cat([model(d).logits for d in documents], dim=1)
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(x)}):
        if "attention_mask" in options:
            options["use_cache"] = False
        packed = model(x, position_ids=positions, **options)
        assert (packed.logits - separate).abs().max() <= TIGHT
        assert packed.past_key_values is None  # packed documents cannot be continued
    with pytest.raises(ValueError, match="position_ids must go on by one where a cache is used"):
        model(x, position_ids=positions, past_key_values=FarspanCache(model.config))


@torch.no_grad()
def test_positions_with_gaps_are_used_as_given() -> None:
    model, x = make("rope"), tokens(1, 12)
    spread = model(x, position_ids=torch.arange(12)[None] * 3).logits
    assert (spread - model(x).logits).abs().max() > 1e-3
    assert (model(x, position_ids=torch.arange(12)[None] + 50).logits - model(x).logits).abs().max() <= 1e-7


@torch.no_grad()
def test_bidirectional_padding_changes_nothing() -> None:
    model, x = FarspanForMaskedLM(make(MIXED).config).double().eval(), tokens(2, 20)
    mask = torch.ones_like(x)
    mask[0, :6], mask[1, 13:] = 0, 0
    out = model(x, attention_mask=mask).logits
    assert (out[0, 6:] - model(x[:1, 6:]).logits[0]).abs().max() <= TIGHT
    assert (out[1, :13] - model(x[1:, :13]).logits[0]).abs().max() <= TIGHT


@torch.no_grad()
def test_embeddings_may_be_given_instead_of_tokens() -> None:
    model, x = make(MIXED), tokens(2, 20)
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(x)).logits, model(x).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(x, inputs_embeds=model.model.embed_tokens(x))


@pytest.mark.parametrize(
    "options",
    [{}, {"qk_norm": True, "log_length": True}, {"coca_activation": "softplus", "rope_parameters": PER_QUERY}],
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


def test_save_and_load_through_the_auto_classes(tmp_path) -> None:
    model, x = make(MIXED, rope_parameters=PER_QUERY), tokens(1, 20)
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert AutoConfig.from_pretrained(tmp_path).attention_specs == model.config.attention_specs
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("attention", ["coca-exact", "alibi", MIXED], ids=str)
def test_gradient_checkpointing_changes_no_gradient(attention: object) -> None:
    model, x = make(attention).train(), tokens(2, 24)
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.zero_grad()
        model(x, labels=x).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_bidirectional_attention_sees_the_future() -> None:
    x, y = tokens(1, 12), tokens(1, 12)
    y[:, :-1] = x[:, :-1]
    decoder = make()
    encoder = FarspanForMaskedLM(decoder.config).double().eval()
    changes = [(model(x).logits - model(y).logits)[:, :-1].abs().max() for model in (decoder, encoder)]
    assert changes[0] == 0
    assert changes[1] > 1e-3


def test_the_paper_preset_has_350_million_parameters() -> None:
    with torch.device("meta"):
        sizes = {
            name: FarspanForCausalLM(FarspanConfig.preset("350m", attention=name)).num_parameters() for name in NAMES
        }
    assert 345e6 < sizes["rope"] < 360e6
    assert sizes["rope"] - sizes["coca-exact"] == 24 * 1024 * 512  # T is half as wide as K


@torch.no_grad()
def test_another_scaling_law_can_be_set_on_a_finished_model() -> None:
    model, x = make(MIXED), tokens(1, 40)
    stretched = make(MIXED, rope_parameters=PER_QUERY)
    stretched.load_state_dict(model.state_dict())
    before = model(x).logits
    model.set_rope_parameters(**PER_QUERY)
    assert torch.equal(model(x).logits, stretched(x).logits)
    with pytest.raises(ValueError, match="scaling factor must be at least 1"):
        model.set_rope_parameters(rope_type="dynamic", factor=0.1)
    assert torch.equal(model(x).logits, stretched(x).logits)
    model.set_rope_parameters(rope_type="default")
    assert torch.equal(model(x).logits, before)
