"""Frequencies follow their laws; angles keep their digits; segments follow the query."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from farspan.ops import (
    NTK,
    DynamicNTK,
    Linear,
    Llama3,
    Rotary,
    YaRN,
    coca_attention,
    coca_attention_reference,
    rope_attention,
)
from farspan.ops.rotary import Angles, rotate, table
from tests.helpers import coca_inputs, largest_difference


def transformers_frequencies(**rope: object) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10_000.0, **rope},
    )
    length = 2048 if rope["rope_type"] == "dynamic" else None
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu", seq_len=length)


@pytest.mark.parametrize(
    ("law", "length", "rope"),
    [
        (Linear(4), None, {"rope_type": "linear", "factor": 4.0}),
        (DynamicNTK(4, 512, "per_request"), 2048, {"rope_type": "dynamic", "factor": 4.0}),
        (
            YaRN(8, 512),
            None,
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
        ),
        (
            Llama3(8, 512),
            None,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 512,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ],
    ids=["linear", "dynamic", "yarn", "llama3"],
)
def test_laws_agree_with_transformers(law: Linear | DynamicNTK | YaRN | Llama3, length: int | None, rope: dict) -> None:
    theirs, factor = transformers_frequencies(**rope)
    ours = Rotary(64, scaling=law).frequencies(length)
    assert torch.allclose(ours, theirs.double(), rtol=1e-6)
    assert law.attention_factor == pytest.approx(factor)


def test_llama3_is_its_definition_pair_by_pair() -> None:
    """Fast pairs stay, slow ones are divided, and between them the weight is linear in the turns."""
    ours = Rotary(64, scaling=Llama3(8, 512, 1.0, 4.0)).frequencies().tolist()
    kinds = set()
    for j, found in enumerate(ours):
        plain = 10_000 ** (-2 * j / 64)
        turns = 512 * plain / (2 * math.pi)
        share = 1.0 if turns > 4 else 0.0 if turns < 1 else (turns - 1) / 3
        kinds.add("fast" if share == 1 else "slow" if share == 0 else "between")
        assert found == pytest.approx(share * plain + (1 - share) * plain / 8, rel=1e-14)
    assert kinds == {"fast", "slow", "between"}


def test_ntk_keeps_the_highest_frequency_and_stretches_the_lowest_by_the_factor() -> None:
    plain, stretched = Rotary(64).frequencies(), Rotary(64, scaling=NTK(8)).frequencies()
    assert stretched[0] == plain[0]
    assert plain[-1] / stretched[-1] == pytest.approx(8, rel=1e-9)


def test_dynamic_ntk_is_plain_up_to_the_training_length() -> None:
    law = DynamicNTK(4, 512)
    assert torch.equal(Rotary(64, scaling=law).frequencies(512), Rotary(64).frequencies())
    assert Rotary(64, scaling=law).frequencies(513)[-1] < Rotary(64).frequencies()[-1]


def test_buckets_agree_as_integers_and_as_tensors_at_every_border() -> None:
    law = DynamicNTK(4, 12)
    borders = [p for k in range(20) for p in (12 * 2**k - 1, 12 * 2**k, 12 * 2**k + 1)] + [-5, 0]
    assert law.buckets(torch.tensor(borders)).tolist() == [law.bucket(p) for p in borders]
    assert all(law.bucket(p) > p and (law.bucket(p) == 12 or law.bucket(p) // 2 <= p) for p in borders)


def test_angles_keep_their_digits_at_a_hundred_thousand() -> None:
    position = 131_071
    angles = table(torch.tensor([[position]]), Rotary(64).frequencies(), 1.0, torch.float32)
    exact = [math.cos(position * 10_000 ** (-2 * j / 64)) for j in range(32)]
    assert torch.allclose(angles.cos.flatten().double(), torch.tensor(exact, dtype=torch.float64), atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_angles_are_never_narrower_than_float32(dtype: torch.dtype) -> None:
    part = Rotary(8).plan(0, 4, 4, dtype=dtype)[0]
    assert part.key.both.dtype == torch.float32
    assert rotate(torch.ones(1, 1, 4, 8, dtype=dtype), part.key).dtype == dtype


def test_rotation_keeps_length_and_composes() -> None:
    x, theta = torch.randn(1, 2, 5, 8, dtype=torch.float64), Rotary(8).frequencies()
    once, thrice = (table(torch.full((1, 5), n), theta, 1.0, torch.float64) for n in (1, 3))
    assert torch.allclose(rotate(x, thrice).norm(dim=-1), x.norm(dim=-1))
    assert torch.allclose(rotate(rotate(rotate(x, once), once), once), rotate(x, thrice))
    assert isinstance(once, Angles)


@pytest.mark.parametrize("mode", ["per_query", "per_request"])
@pytest.mark.parametrize("form", ["exact", "slack"])
@pytest.mark.parametrize("shape", [(40, 40), (13, 40), (1, 40)], ids=str)
def test_dynamic_ntk_equals_its_definition(mode: str, form: str, shape: tuple[int, int]) -> None:
    rotary = Rotary(8, scaling=DynamicNTK(4, 6, mode))
    for options in ({}, {"causal": False}, {"window": 9}):
        inputs = coca_inputs(*shape)
        assert (
            largest_difference(coca_attention, coca_attention_reference, inputs, rotary=rotary, form=form, **options)
            <= 1e-12
        )


def test_per_query_segments_follow_rows_that_cross_a_doubling_at_different_columns() -> None:
    """Left padding shifts the rows against each other, so one column holds queries of two frequencies."""
    rotary, inputs = Rotary(8, scaling=DynamicNTK(4, 6)), coca_inputs(30, b=3)
    pad = torch.tensor([[0], [4], [11]])
    positions, keep = torch.arange(30)[None] - pad, torch.arange(30)[None] >= pad
    options = {"rotary": rotary, "positions": positions, "padding_mask": keep}
    assert largest_difference(coca_attention, coca_attention_reference, inputs, **options) <= 1e-12
    q, t, v = inputs
    out = coca_attention(q, t, v, **options)
    for row, start in enumerate(pad.flatten().tolist()):
        alone = coca_attention(
            q[row : row + 1, :, start:], t[row : row + 1, :, start:], v[row : row + 1, :, start:], rotary=rotary
        )
        assert (out[row, :, start:] - alone[0]).abs().max() <= 1e-12


def test_prefill_runs_one_fused_call_for_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    import farspan.ops.segments as segments

    calls = []
    original = segments.softmax_attention
    monkeypatch.setattr(
        segments,
        "softmax_attention",
        lambda q, k, v, **o: (calls.append((q.shape[2], k.shape[2])), original(q, k, v, **o))[1],
    )
    coca_attention(*coca_inputs(64), rotary=Rotary(8, scaling=DynamicNTK(4, 8)))
    assert calls == [(8, 8), (8, 16), (16, 32), (32, 64)]


def test_per_query_results_do_not_depend_on_what_follows() -> None:
    rotary, (q, t, v) = Rotary(8, scaling=DynamicNTK(4, 6)), coca_inputs(50)
    whole = coca_attention(q, t, v, rotary=rotary)
    for n in (5, 6, 7, 12, 13, 49):
        assert (
            coca_attention(q[:, :, :n], t[:, :, :n], v[:, :, :n], rotary=rotary) - whole[:, :, :n]
        ).abs().max() <= 1e-12


def test_per_request_uses_one_base_from_the_length_of_the_call() -> None:
    law = DynamicNTK(4, 6, "per_request")
    q, t, v = coca_inputs(20)
    fixed = Rotary(8, base=law.base_at(20, 8, 10_000.0))
    for rotary in (Rotary(8, scaling=law), Rotary(8, scaling=law).at_length(20)):
        assert torch.equal(coca_attention(q, t, v, rotary=rotary), coca_attention(q, t, v, rotary=fixed))
    k = torch.randn_like(v)
    assert torch.equal(rope_attention(q, k, v, rotary=Rotary(8, scaling=law)), rope_attention(q, k, v, rotary=fixed))


@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "law", [Linear, NTK, lambda f: DynamicNTK(f, 512), lambda f: YaRN(f, 512), lambda f: Llama3(f, 512)]
)
def test_a_factor_below_one_is_refused(law: type, factor: float) -> None:
    with pytest.raises(ValueError, match=r"scaling factor must be at least 1, got .*; it is the new length"):
        law(factor)


def test_bad_modes_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'per_query'"):
        DynamicNTK(4, 512, "per_qery")
    with pytest.raises(ValueError, match="head_dim must be even to form rotary pairs, got 63"):
        Rotary(63)
    with pytest.raises(ValueError, match="train_length must be at least 1, got 0"):
        YaRN(4, 0)
    with pytest.raises(ValueError, match="low_freq_factor must lie between 0 and high_freq_factor"):
        Llama3(8, 512, low_turns=5)
    with pytest.raises(ValueError, match="NTK scaling needs at least two rotary pairs"):
        Rotary(2, scaling=NTK(2)).frequencies()
