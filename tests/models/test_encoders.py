"""The bidirectional heads: padding, learned positions, losses, saving, and the blocks of a decoder."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from farspan import (
    FarspanCache,
    FarspanConfig,
    FarspanForCausalLM,
    FarspanForMaskedLM,
    FarspanForSequenceClassification,
    FarspanModel,
)
from tests.models.small import LINEAR, MIXED, TIGHT, make, name_of, poisoned, tokens

HEADS = [FarspanForMaskedLM, FarspanForSequenceClassification]
PLAIN = {"kind": "cosformer", "rotary": False}
EVEN = ["cosformer", PLAIN, "linear-coca", "coca-exact", "coca-strict", "alibi"]
"""Attentions whose weights are the same to the left and to the right."""


def encoder(
    kind: type = FarspanForMaskedLM, attention: object = "cosformer", learned: int = 0, **options: object
) -> FarspanForMaskedLM | FarspanForSequenceClassification:
    config = make(attention, cosformer_max_length=64, **options).config
    config.learned_positions = learned
    model = kind(config).double().eval()
    assert config.causal  # the caller's configuration is untouched
    assert not model.config.causal
    return model


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("learned", [0, 20])
@pytest.mark.parametrize(
    "options",
    [
        *({"attention": attention} for attention in ("cosformer", "coca-exact", "linear-coca", MIXED)),
        {"attention": LINEAR, "cosformer_beyond": "decay"},
    ],
    ids=name_of,
)
@torch.no_grad()
def test_padding_changes_no_head_whatever_it_holds(kind: type, learned: int, options: dict) -> None:
    """A table of learned positions has as many rows as the sequence has tokens: padding takes none of them."""
    model, x = encoder(kind, learned=learned, **options), tokens(1, 20)
    alone = model(x).logits[0]
    for left, right in ((6, 0), (0, 6), (3, 3)):
        padded, mask = F.pad(x, (left, right), value=5), F.pad(torch.ones_like(x), (left, right))
        masks = torch.cat((mask, F.pad(mask[:, 6:], (0, 6))))
        embedded = poisoned(model.model.embed_tokens(padded.expand(2, -1)), masks)
        got = model(inputs_embeds=embedded, attention_mask=masks).logits[0]
        got = got[left : left + 20] if kind is FarspanForMaskedLM else got
        assert (got - alone).abs().max() <= TIGHT


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
    model = encoder(FarspanForSequenceClassification, learned=20, **options).train()
    loss = model(tokens(2, 16), labels=labels).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    moved = model.model.embed_positions.weight.grad.abs().sum(-1) > 0
    assert moved.tolist() == [True] * 16 + [False] * 4


def test_masked_tokens_alone_make_the_loss() -> None:
    model, x = encoder(), tokens(2, 16)
    labels = torch.full_like(x, -100)
    labels[:, 3] = x[:, 3]
    output = model(x, labels=labels)
    want = F.cross_entropy(output.logits[:, 3].float(), x[:, 3])
    assert torch.allclose(output.loss.float(), want)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("kind", "auto"), list(zip(HEADS, (AutoModelForMaskedLM, AutoModelForSequenceClassification), strict=True))
)
def test_save_and_load_through_the_auto_classes(kind: type, auto: type, tmp_path: Path) -> None:
    model, x = encoder(kind, learned=24, cosformer_beyond="decay", num_labels=5), tokens(2, 20)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path).double().eval()
    assert type(loaded) is kind
    assert not loaded.config.causal
    assert (loaded.config.cosformer_beyond, loaded.config.learned_positions) == ("decay", 24)
    assert torch.equal(loaded(x).logits, model(x).logits)
    bare = AutoModel.from_pretrained(tmp_path).double().eval()
    assert torch.equal(bare(x).last_hidden_state, model.model(x).last_hidden_state)


def test_an_encoder_takes_the_blocks_of_a_decoder_and_new_positions(tmp_path: Path) -> None:
    decoder = make("cosformer", cosformer_max_length=64)
    decoder.save_pretrained(tmp_path)
    encoder_ = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2, learned_positions=64)
    assert torch.equal(encoder_.model.layers[0].mlp.up_proj.weight, decoder.model.layers[0].mlp.up_proj.weight)
    learned = encoder_.model.embed_positions.weight
    assert learned.std().item() == pytest.approx(decoder.config.initializer_range, rel=0.1)
    x, y = tokens(1, 12), tokens(1, 12)
    y[:, 0] = x[:, 0]
    first = [encoder_.model(t).last_hidden_state[:, 0] for t in (x, y)]
    assert (first[0] - first[1]).abs().max() > 1e-5  # it looks both ways


# Learned positions


@pytest.mark.parametrize("attention", EVEN, ids=str)
@torch.no_grad()
def test_an_even_attention_cannot_tell_left_from_right_without_learned_positions(attention: object) -> None:
    x = tokens(2, 20)
    blind, sighted = encoder(attention=attention), encoder(attention=attention, learned=24)
    assert (blind(x.flip(1)).logits.flip(1) - blind(x).logits).abs().max() <= TIGHT
    assert (sighted(x.flip(1)).logits.flip(1) - sighted(x).logits).abs().max() > 0.1
    blind, sighted = (encoder(FarspanForSequenceClassification, attention, learned=n) for n in (0, 24))
    assert (blind(x.flip(1)).logits - blind(x).logits).abs().max() <= TIGHT
    assert (sighted(x.flip(1)).logits - sighted(x).logits).abs().max() > 0.01


@torch.no_grad()
def test_learned_positions_are_added_to_the_tokens_and_to_given_embeddings() -> None:
    with_them, x = encoder(learned=24), tokens(2, 20)
    without = encoder()
    without.load_state_dict(with_them.state_dict(), strict=False)
    embedded, learned = with_them.model.embed_tokens(x), with_them.model.embed_positions.weight
    want = without(inputs_embeds=embedded + learned[:20]).logits
    assert torch.equal(with_them(x).logits, want)
    assert torch.equal(with_them(inputs_embeds=embedded).logits, want)


@torch.no_grad()
def test_given_positions_choose_the_rows_and_packed_documents_start_again() -> None:
    model, x = encoder(attention=PLAIN, learned=24), tokens(1, 20)
    later = model(x[:, :8], position_ids=torch.arange(16, 24)[None]).logits
    assert (later - model(x[:, :8]).logits).abs().max() > 0.1
    padded, mask = F.pad(x[:, :8], (2, 3)), F.pad(torch.ones(1, 8, dtype=torch.long), (2, 3))
    positions = F.pad(torch.arange(16, 24)[None], (2, 3))
    got = model(padded, attention_mask=mask, position_ids=positions).logits[:, 2:10]
    assert (got - later).abs().max() <= TIGHT
    packed = model(x, position_ids=torch.cat((torch.arange(12), torch.arange(8)))[None]).logits
    apart = [model(part).logits for part in x.split([12, 8], dim=1)]
    assert (packed - torch.cat(apart, dim=1)).abs().max() <= TIGHT


@torch.no_grad()
def test_sequences_that_leave_the_table_name_the_remedy() -> None:
    model, x = encoder(learned=8), tokens(2, 9)
    message = "learned_positions is 8 and a token has position {}, counted from 0; shorten the sequence, or train"
    with pytest.raises(ValueError, match=message.format(8)):
        model(x)
    mask = torch.ones_like(x)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match=message.format(8)):  # the other row is too long
        model(x, attention_mask=mask)
    for first, last in ((-1, -1), (2, 9)):
        with pytest.raises(ValueError, match=message.format(last)):
            model(x[:, :8], position_ids=torch.arange(first, first + 8)[None])
    mask[1, -1] = 0
    assert model(x, attention_mask=mask).logits.isfinite().all()
    with pytest.raises(ValueError, match="past_key_values must be None where learned_positions are used"):
        model(x[:, :4], past_key_values=FarspanCache(model.config))
    for kind in (FarspanForCausalLM, FarspanModel):
        with pytest.raises(ValueError, match=r"learned_positions must be 0 in a causal model, got 8: .* leave it out"):
            kind(FarspanConfig.preset("tiny", learned_positions=8))


@torch.no_grad()
def test_one_graph_holds_learned_positions() -> None:
    model, x = encoder(FarspanForSequenceClassification, learned=24, pad_token_id=0), tokens(2, 20)
    x[0, 13:] = 0
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    assert (compiled(x).logits - model(x).logits).abs().max() <= TIGHT
    assert graphs.frame_count == 1
