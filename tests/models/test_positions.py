"""Learned positions: what an encoder cannot see without them, and that they count real tokens."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModel, AutoModelForMaskedLM

from farspan import (
    FarspanCache,
    FarspanConfig,
    FarspanForCausalLM,
    FarspanForMaskedLM,
    FarspanForSequenceClassification,
    FarspanModel,
)
from farspan.training.loop import flops_per_token
from tests.models.small import TIGHT, make, tokens

PLAIN = {"kind": "cosformer", "rotary": False}
EVEN = ["cosformer", PLAIN, "linear-coca", "coca-exact", "coca-strict", "alibi"]
"""Attentions whose weights are the same to the left and to the right."""


def encoder(
    kind: type = FarspanForMaskedLM, attention: object = "cosformer", learned: int = 24, **options: object
) -> FarspanForMaskedLM | FarspanForSequenceClassification:
    config = make(attention, cosformer_max_length=64, **options).config
    config.learned_positions = learned
    return kind(config).double().eval()


@pytest.mark.parametrize("attention", EVEN, ids=str)
@torch.no_grad()
def test_an_even_attention_cannot_tell_left_from_right_without_learned_positions(attention: object) -> None:
    x = tokens(2, 20)
    blind, sighted = encoder(attention=attention, learned=0), encoder(attention=attention)
    assert (blind(x.flip(1)).logits.flip(1) - blind(x).logits).abs().max() <= TIGHT
    assert (sighted(x.flip(1)).logits.flip(1) - sighted(x).logits).abs().max() > 0.1
    blind, sighted = (encoder(FarspanForSequenceClassification, attention, learned=n) for n in (0, 24))
    assert (blind(x.flip(1)).logits - blind(x).logits).abs().max() <= TIGHT
    assert (sighted(x.flip(1)).logits - sighted(x).logits).abs().max() > 0.01
    assert flops_per_token(blind, 20) == flops_per_token(sighted, 20)  # looking positions up counts as no operation


@torch.no_grad()
def test_without_re_weighting_there_is_no_order_at_all_but_the_learned_one() -> None:
    x, order = tokens(2, 20), torch.randperm(20)
    blind, sighted = encoder(attention=PLAIN, learned=0), encoder(attention=PLAIN)
    assert (blind(x[:, order]).logits - blind(x).logits[:, order]).abs().max() <= TIGHT
    assert (sighted(x[:, order]).logits - sighted(x).logits[:, order]).abs().max() > 0.1


@torch.no_grad()
def test_rotary_positions_tell_left_from_right_by_themselves() -> None:
    model, x = encoder(attention="rope", learned=0), tokens(2, 20)
    assert (model(x.flip(1)).logits.flip(1) - model(x).logits).abs().max() > 0.1


@torch.no_grad()
def test_they_are_added_to_the_tokens_and_to_given_embeddings() -> None:
    with_them, x = encoder(), tokens(2, 20)
    without = encoder(learned=0)
    without.load_state_dict(with_them.state_dict(), strict=False)
    embedded, learned = with_them.model.embed_tokens(x), with_them.model.embed_positions.weight
    want = without(inputs_embeds=embedded + learned[:20]).logits
    assert torch.equal(with_them(x).logits, want)
    assert torch.equal(with_them(inputs_embeds=embedded).logits, want)


@torch.no_grad()
def test_packed_documents_start_again() -> None:
    model, x = encoder(learned=12), tokens(1, 20)
    positions = torch.cat((torch.arange(12), torch.arange(8)))[None]
    packed = model(x, position_ids=positions).logits
    apart = [model(part).logits for part in x.split([12, 8], dim=1)]
    assert (packed - torch.cat(apart, dim=1)).abs().max() <= TIGHT


@torch.no_grad()
def test_given_positions_choose_the_rows() -> None:
    model, x = encoder(attention=PLAIN), tokens(1, 8)
    later = model(x, position_ids=torch.arange(16, 24)[None]).logits
    assert (later - model(x).logits).abs().max() > 0.1
    padded, mask = F.pad(x, (2, 3)), F.pad(torch.ones_like(x), (2, 3))
    positions = F.pad(torch.arange(16, 24)[None], (2, 3))
    got = model(padded, attention_mask=mask, position_ids=positions).logits[:, 2:10]
    assert (got - later).abs().max() <= TIGHT


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


def test_a_causal_model_with_them_raises() -> None:
    config = FarspanConfig.preset("tiny", learned_positions=8)
    for kind in (FarspanForCausalLM, FarspanModel):
        with pytest.raises(ValueError, match=r"learned_positions must be 0 in a causal model, got 8: .* leave it out"):
            kind(config)


def test_they_start_like_other_weights_and_are_trained() -> None:
    model = FarspanForSequenceClassification(FarspanConfig.preset("tiny", learned_positions=64, num_labels=3))
    learned = model.model.embed_positions.weight
    assert learned.shape == (64, 128)
    assert learned.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
    model(torch.randint(1, 500, (2, 40)), labels=torch.tensor([0, 2])).loss.backward()
    moved = learned.grad.abs().sum(-1) > 0
    assert moved[:40].all()
    assert not moved[40:].any()


def test_save_and_load_keep_them(tmp_path: Path) -> None:
    model, x = encoder(), tokens(2, 20)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).double().eval()
    assert loaded.config.learned_positions == 24
    assert torch.equal(loaded(x).logits, model(x).logits)
    bare = AutoModel.from_pretrained(tmp_path).double().eval()
    assert torch.equal(bare(x).last_hidden_state, model.model(x).last_hidden_state)
    classifier = FarspanForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(classifier.model.embed_positions.weight, model.model.embed_positions.weight)
    FarspanForCausalLM(FarspanConfig.preset("tiny", attention="cosformer")).save_pretrained(tmp_path)
    fresh = FarspanForSequenceClassification.from_pretrained(tmp_path, learned_positions=64)
    assert fresh.model.embed_positions.weight.std().item() == pytest.approx(0.02, rel=0.05)


@torch.no_grad()
def test_one_graph_holds_them() -> None:
    model, x = encoder(FarspanForSequenceClassification, pad_token_id=0), tokens(2, 20)
    x[0, 13:] = 0
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    assert (compiled(x).logits - model(x).logits).abs().max() <= TIGHT
    assert graphs.frame_count == 1


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
