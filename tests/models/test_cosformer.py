"""cosFormer in the model: generation from sums of constant size, and the bidirectional heads."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, DynamicCache

from farspan import FarspanCache, FarspanConfig, FarspanForMaskedLM, FarspanForSequenceClassification
from tests.models.small import MIXED, TIGHT, make, tokens


def encoder(
    kind: type, attention: object = "cosformer", **options: object
) -> FarspanForMaskedLM | FarspanForSequenceClassification:
    config = make(attention, cosformer_max_length=64, **options).config
    return kind(config).double().eval()


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
