"""Quantisers replace a model's nn.Linear by their own: bitsandbytes, torchao, quanto, and torch's, which runs here."""

import copy
import warnings

import pytest
import torch
from torch import nn

from farspan import FarspanForCausalLM
from tests.models.small import MIXED, make, tokens

ATTENTIONS = ["rope", "coca-exact", "coca-strict", "coca-slack", "cosformer", "linear-coca", MIXED]


def quantised(model: FarspanForCausalLM) -> FarspanForCausalLM:
    """A copy with 8-bit weights, its activations rounded as they come."""
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao is to take over; it is no dependency of ours
        return quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_every_matrix_is_a_plain_linear_or_the_embedding(attention: object) -> None:
    """A quantiser looks for the type itself; a subclass or a bare parameter would be passed over in silence."""
    model = make(attention, qk_norm=True)
    held = {id(module.weight) for module in model.modules() if type(module) in (nn.Linear, nn.Embedding)}
    assert {id(p) for p in model.parameters() if p.ndim > 1} == held


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
@torch.no_grad()
def test_a_quantised_model_stays_near_and_generates(attention: object) -> None:
    model, x = make(attention, dtype=torch.float32, train_length=64), tokens(2, 20)
    small = quantised(model)
    assert not any(type(module) is nn.Linear for module in small.modules())
    exact, rounded = model(x).logits, small(x).logits
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < 0.1  # over eight seeds RoPE is at 0.04 to 0.05, linear CoCA at 0.05 to 0.09
    out = small.generate(x, max_new_tokens=6, do_sample=False, pad_token_id=0)
    again = small(out[:, :-1], use_cache=False).logits[:, 19:]
    chosen = again.gather(-1, out[:, 20:, None])[..., 0]
    assert (again.amax(-1) - chosen <= 0.1 * exact.std()).all()  # the cache is read back, to within the rounding
