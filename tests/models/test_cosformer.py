"""cosFormer in the model: generation from sums of constant size, and the bidirectional heads."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, DynamicCache

from farspan import FarspanCache, FarspanConfig, FarspanForMaskedLM, FarspanForSequenceClassification
from tests.models.test_modeling import LOCAL, MIXED, TIGHT, make, tokens

PAST_M = ["decoupled", "raised-cosine", "decay"]


def encoder(
    kind: type, attention: object = "cosformer", **options: object
) -> FarspanForMaskedLM | FarspanForSequenceClassification:
    config = make(attention, cosformer_max_length=64, **options).config
    return kind(config).double().eval()


@pytest.mark.parametrize("beyond", PAST_M)
@torch.no_grad()
def test_generation_holds_the_same_bytes_however_far_it_has_come(beyond: str) -> None:
    """At position 1 000 and, the text having begun at 999 000, at position 1 000 000."""
    model, x = make("cosformer", cosformer_beyond=beyond), tokens(1, 6)
    held = []
    for begin in (1_000, 1_000_000):
        cache = FarspanCache(model.config)
        for i in range(0, 30, 6):
            positions = torch.arange(begin + i, begin + i + 6)[None]
            logits = model(x, position_ids=positions, past_key_values=cache).logits
            held.append(cache.nbytes)
        assert logits.isfinite().all()
    assert len(set(held)) == 1
    assert held[0] == 8 * 3 * (2 * 8 * 8 + 2 * 8) * {"decoupled": 2, "raised-cosine": 3, "decay": 3}[beyond] - (
        8 * 3 * 2 * 8 if beyond == "decoupled" else 0  # its denominator is not rotated
    )


@torch.no_grad()
def test_a_model_past_its_m_names_the_remedy() -> None:
    model = make("cosformer")  # M is the length of training, 8
    model(tokens(1, 8))
    with pytest.raises(ValueError, match=r"max_length is M = 8 and this text spans 9 positions.*beyond='decoupled'"):
        model(tokens(1, 9))
    with pytest.raises(ValueError, match="max_length is M = 8"):
        model.generate(tokens(1, 5), max_new_tokens=8, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match="max_length is M = 8"):
        model.generate(tokens(1, 5), max_new_tokens=8, pad_token_id=0, cache_implementation="static")
    model.generate(tokens(1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0)


@torch.no_grad()
def test_beam_search_does_not_depend_on_the_cache() -> None:
    model, x = make(["cosformer", LOCAL, "cosformer"], cosformer_beyond="decay"), tokens(2, 10)
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(x, use_cache=False, **options)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(x, cache_implementation=cache, **options), plain)


@torch.no_grad()
def test_sums_cannot_be_cropped_and_other_caches_cannot_hold_them() -> None:
    model, x = make("cosformer", cosformer_max_length=64), tokens(1, 10)
    cache = model(x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot forget 3 tokens, they are summed"):
        cache.crop(-3)
    with pytest.raises(ValueError, match=r"must be a FarspanCache .* got DynamicCache; build FarspanCache\(config\)"):
        model(x, past_key_values=DynamicCache())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation 'sdpa' cannot run cosFormer; use 'farspan'"):
        model(x)


@torch.no_grad()
def test_a_cache_can_be_reset() -> None:
    model, x = make("cosformer", cosformer_max_length=64), tokens(1, 10)
    for length in (None, 40):
        cache = FarspanCache(model.config, max_length=length)
        model(tokens(1, 7), past_key_values=cache)
        cache.reset()
        assert (model(x, past_key_values=cache).logits - model(x).logits).abs().max() <= TIGHT


@pytest.mark.parametrize("kind", [FarspanForMaskedLM, FarspanForSequenceClassification])
@pytest.mark.parametrize("attention", ["cosformer", "coca-exact", MIXED], ids=str)
@torch.no_grad()
def test_padding_changes_no_head(kind: type, attention: object) -> None:
    model, x = encoder(kind, attention), tokens(1, 20)
    alone = model(x).logits[0]
    for left, right in ((6, 0), (0, 6), (3, 3)):
        padded = torch.nn.functional.pad(x, (left, right), value=5)
        mask = torch.nn.functional.pad(torch.ones_like(x), (left, right))
        batch = model(padded.repeat(2, 1), attention_mask=torch.cat((mask, torch.ones_like(mask)))).logits[0]
        got = batch[left : left + 20] if kind is FarspanForMaskedLM else batch
        assert (got - alone).abs().max() <= TIGHT


@pytest.mark.parametrize("kind", [FarspanForMaskedLM, FarspanForSequenceClassification])
@torch.no_grad()
def test_heads_look_both_ways(kind: type) -> None:
    config = FarspanConfig.preset("tiny", attention="cosformer")
    model = kind(config).eval()
    assert config.causal  # the caller's configuration is untouched
    assert not model.config.causal
    x = torch.randint(1, 500, (1, 12))
    y = x.clone()
    y[0, -1] += 1
    hidden = [model.model(t).last_hidden_state[0, 0] for t in (x, y)]
    assert (hidden[0] - hidden[1]).abs().max() > 1e-5


def test_the_pad_token_says_what_is_padding_when_no_mask_does() -> None:
    model, x = encoder(FarspanForSequenceClassification, pad_token_id=0), tokens(1, 20)
    padded = torch.nn.functional.pad(x, (0, 5), value=0)
    assert (model(padded).logits - model(x).logits).abs().max() <= TIGHT
    with pytest.raises(ValueError, match="at least one token in each row"):
        model(x * 0)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"num_labels": 3}, torch.tensor([0, 2])),
        ({"num_labels": 1}, torch.tensor([0.5, 2.0], dtype=torch.float64)),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, torch.ones(2, 4, dtype=torch.float64)),
    ],
    ids=["classes", "regression", "multi-label"],
)
def test_classification_trains(options: dict, labels: torch.Tensor) -> None:
    model = encoder(FarspanForSequenceClassification, **options).train()
    loss = model(tokens(2, 16), labels=labels).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_masked_tokens_alone_make_the_loss() -> None:
    model, x = encoder(FarspanForMaskedLM), tokens(2, 16)
    labels = torch.full_like(x, -100)
    labels[:, 3] = x[:, 3]
    output = model(x, labels=labels)
    want = torch.nn.functional.cross_entropy(output.logits[:, 3].float(), x[:, 3])
    assert torch.allclose(output.loss.float(), want)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        (FarspanForMaskedLM, AutoModelForMaskedLM),
        (FarspanForSequenceClassification, AutoModelForSequenceClassification),
    ],
)
def test_save_and_load_through_the_auto_classes(kind: type, auto: type, tmp_path) -> None:
    model, x = encoder(kind, cosformer_beyond="decay", num_labels=5), tokens(2, 20)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path).double().eval()
    assert type(loaded) is kind
    assert not loaded.config.causal
    assert loaded.config.cosformer_beyond == "decay"
    assert torch.allclose(loaded(x).logits, model(x).logits, atol=1e-12)


def test_an_encoder_takes_the_blocks_of_a_decoder(tmp_path) -> None:
    decoder = make("cosformer", cosformer_max_length=64)
    decoder.save_pretrained(tmp_path)
    encoder_ = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    assert torch.equal(encoder_.model.layers[0].mlp.up_proj.weight, decoder.model.layers[0].mlp.up_proj.weight)
    assert encoder_.model.layers[0].self_attn.causal is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cosformer_beyond": "clip"}, "cosformer_beyond must be one of 'raise'"),
        ({"cosformer_activation": "exp"}, "cosformer_activation must be one of 'relu', 'elu'"),
        ({"cosformer_max_length": 0}, "cosformer_max_length must be at least 1 or None, got 0"),
        ({"attention": [{"kind": "cosformer", "window": 3}] * 3}, "window cannot be combined"),
    ],
)
def test_bad_configurations_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"attention": "cosformer", **options})


@pytest.mark.slow
@torch.no_grad()
def test_static_decoding_compiles_once() -> None:
    options = {"cosformer_beyond": "decoupled", "num_hidden_layers": 2}
    model, x = make(["cosformer", LOCAL], **options), tokens(2, 20)
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


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model, x = make("cosformer", cosformer_max_length=64).train(), tokens(2, 24)
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.zero_grad()
        model(x, labels=x).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*gradients, strict=True))


def test_autocast_trains() -> None:
    model, x = make("cosformer", cosformer_max_length=64, dtype=torch.float32).train(), tokens(2, 24)
    exact = model(x, labels=x).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    assert (loss - exact).abs() < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())
