"""What padding holds, even NaN, reaches neither real tokens nor gradients."""

import pytest
import torch

from farspan import FarspanForMaskedLM, FarspanForSequenceClassification
from tests.models.small import CONFIGURATIONS, LINEAR, MIXED, TIGHT, chunked, make, name_of, tokens

LEFT = torch.tensor([[1] * 20, [0] * 5 + [1] * 15])
RIGHT = LEFT.flip(1)
BOTH = torch.tensor([[0] * 3 + [1] * 17, [0] * 2 + [1] * 14 + [0] * 4])


def poisoned(embeddings: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put NaN, inf and -inf into the padding, a different one in each column."""
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=embeddings.dtype)
    bad = bad.repeat(embeddings.shape[-1])[: embeddings.shape[-1]]
    return torch.where(mask.bool()[..., None], embeddings, bad)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=name_of)
@torch.no_grad()
def test_nan_in_padding_changes_no_logits_and_does_not_stay_in_a_cache(options: dict) -> None:
    """The first chunk is all padding in one row; the last two are single tokens."""
    model = make(**options)
    x = model.model.embed_tokens(tokens(2, 20))
    for mask in (LEFT, RIGHT, BOTH):
        want = model(inputs_embeds=x, attention_mask=mask, use_cache=False).logits
        bad, real = poisoned(x, mask), mask.bool()
        for use_cache in (False, True):
            got = model(inputs_embeds=bad, attention_mask=mask, use_cache=use_cache).logits
            assert (got - want)[real].abs().max() <= TIGHT
    want = model(inputs_embeds=x, attention_mask=LEFT).logits
    for length in (None, 24):
        got = chunked(model, poisoned(x, LEFT), [4, 14, 1, 1], LEFT, length=length)
        assert (got - want)[LEFT.bool()].abs().max() <= TIGHT


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


@pytest.mark.parametrize("kind", [FarspanForMaskedLM, FarspanForSequenceClassification])
@pytest.mark.parametrize(
    "options", [{"attention": MIXED}, {"attention": LINEAR, "cosformer_beyond": "decay"}], ids=name_of
)
@torch.no_grad()
def test_nan_in_padding_changes_no_encoder(kind: type, options: dict) -> None:
    config = make(**options).config
    config.learned_positions = 20
    model = kind(config).double().eval()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    for mask in (LEFT, BOTH):
        want, got = (model(inputs_embeds=e, attention_mask=mask).logits for e in (x, poisoned(x, mask)))
        if kind is FarspanForMaskedLM:
            want, got = want[mask.bool()], got[mask.bool()]
        assert (got - want).abs().max() <= TIGHT


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_nan_in_padding_changes_no_other_implementation(implementation: str) -> None:
    model, x = make(MIXED), torch.randn(2, 20, 32, dtype=torch.float64)
    model.set_attn_implementation(implementation)
    for mask in (LEFT, RIGHT):
        want, got = (model(inputs_embeds=e, attention_mask=mask).logits for e in (x, poisoned(x, mask)))
        assert (got - want)[mask.bool()].abs().max() <= TIGHT
