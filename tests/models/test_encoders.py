"""The bidirectional heads: padding, losses, saving, and the blocks of a decoder."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from farspan import FarspanConfig, FarspanForMaskedLM, FarspanForSequenceClassification
from tests.models.small import MIXED, TIGHT, make, tokens

HEADS = [FarspanForMaskedLM, FarspanForSequenceClassification]


def encoder(
    kind: type, attention: object = "cosformer", **options: object
) -> FarspanForMaskedLM | FarspanForSequenceClassification:
    config = make(attention, cosformer_max_length=64, **options).config
    return kind(config).double().eval()


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("learned", [0, 20])
@pytest.mark.parametrize("attention", ["cosformer", "coca-exact", "linear-coca", MIXED], ids=str)
@torch.no_grad()
def test_padding_changes_no_head(kind: type, learned: int, attention: object) -> None:
    """A table of learned positions has as many rows as the sequence has tokens: padding takes none of them."""
    config, x = make(attention, cosformer_max_length=64).config, tokens(1, 20)
    config.learned_positions = learned
    model = kind(config).double().eval()
    alone = model(x).logits[0]
    for left, right in ((6, 0), (0, 6), (3, 3)):
        padded, mask = F.pad(x, (left, right), value=5), F.pad(torch.ones_like(x), (left, right))
        mate = F.pad(mask[:, 6:], (0, 6))
        got = model(torch.cat((padded, padded)), attention_mask=torch.cat((mask, mate))).logits[0]
        got = got[left : left + 20] if kind is FarspanForMaskedLM else got
        assert (got - alone).abs().max() <= TIGHT


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("attention", ["cosformer", "linear-coca"])
@torch.no_grad()
def test_heads_look_both_ways(kind: type, attention: str) -> None:
    config = FarspanConfig.preset("tiny", attention=attention)
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
    padded = F.pad(x, (0, 5), value=0)
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
    want = F.cross_entropy(output.logits[:, 3].float(), x[:, 3])
    assert torch.allclose(output.loss.float(), want)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("kind", "auto"), list(zip(HEADS, (AutoModelForMaskedLM, AutoModelForSequenceClassification), strict=True))
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
    x, y = tokens(1, 12), tokens(1, 12)
    y[:, 0] = x[:, 0]
    first = [encoder_.model(t).last_hidden_state[:, 0] for t in (x, y)]
    assert (first[0] - first[1]).abs().max() > 1e-5  # it looks both ways
