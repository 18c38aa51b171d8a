"""Frequencies follow their scaling method, angles keep their digits, per-query frequencies follow the query."""

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
    dispatch,
)
from farspan.ops.coca import COCA
from farspan.ops.masking import make_mask
from farspan.ops.rotary import Angles, Scaling, cos_sin, fixed_point
from tests.helpers import coca_inputs

CPU = torch.device("cpu")


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
    ("scaling", "length", "rope"),
    [
        (Linear(4), None, {"rope_type": "linear", "factor": 4.0}),
        (DynamicNTK(4, 512, "per_request"), 2048, {"rope_type": "dynamic", "factor": 4.0}),
        (YaRN(8, 512), None, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}),
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
def test_scaling_agrees_with_transformers(scaling: Scaling, length: int | None, rope: dict) -> None:
    theirs, factor = transformers_frequencies(**rope)
    ours = Rotary(64, scaling=scaling).frequencies(length)
    assert torch.allclose(ours, theirs.double(), rtol=1e-6)
    assert scaling.attention_factor == pytest.approx(factor)


def test_ntk_keeps_the_highest_frequency_and_stretches_the_lowest_by_the_factor() -> None:
    plain, stretched = Rotary(64).frequencies(), Rotary(64, scaling=NTK(8)).frequencies()
    assert stretched[0] == plain[0]
    assert plain[-1] / stretched[-1] == pytest.approx(8, rel=1e-9)


def test_dynamic_ntk_is_plain_up_to_the_training_length() -> None:
    rotary = Rotary(64, scaling=DynamicNTK(4, 512))
    assert torch.equal(rotary.frequencies(512), Rotary(64).frequencies())
    assert rotary.frequencies(513)[-1] < Rotary(64).frequencies()[-1]


def test_buckets_agree_as_integers_and_as_tensors_at_every_border() -> None:
    scaling = DynamicNTK(4, 12)
    borders = [p for k in range(20) for p in (12 * 2**k - 1, 12 * 2**k, 12 * 2**k + 1)] + [-5, 0]
    assert scaling.buckets(torch.tensor(borders)).tolist() == [scaling.bucket(p) for p in borders]
    assert all(scaling.bucket(p) > p and (scaling.bucket(p) == 12 or scaling.bucket(p) // 2 <= p) for p in borders)


def test_angles_keep_their_digits_at_a_hundred_thousand() -> None:
    position = 131_071
    cos, _ = cos_sin(torch.tensor([[position]]), Rotary(64).frequencies(), 1.0, torch.float32).unbind(-2)
    exact = [math.cos(position * 10_000 ** (-2 * j / 64)) for j in range(32)]
    assert torch.allclose(cos.flatten().double(), torch.tensor(exact, dtype=torch.float64), atol=1e-7)


def test_fixed_point_steps_are_exact_where_float32_angles_are_not() -> None:
    theta = Rotary(128).frequencies()
    for position in (1, 131_071, 2**31 - 1, -7):
        phase = (fixed_point(theta)[0] * position).double() / 2.0**64
        error = torch.remainder(phase - theta * position / (2 * torch.pi) + 0.5, 1) - 0.5
        assert error.abs().max() <= 2.0**-53 * abs(position) + 2**-52


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_angles_are_never_narrower_than_float32(dtype: torch.dtype) -> None:
    angles = make_mask(2, 4, 1, CPU).angles(Rotary(8))
    work = torch.float64 if dtype == torch.float64 else torch.float32
    assert angles.key(dtype).dtype == angles.query(dtype).dtype == work
    assert angles.rotate_keys(torch.ones(1, 1, 4, 8, dtype=dtype)).dtype == dtype
    assert angles.rotate_queries(torch.ones(1, 1, 2, 8, dtype=dtype)).dtype == dtype


SCALINGS = [None, YaRN(4, 16), DynamicNTK(4, 16, "per_request"), DynamicNTK(4, 16)]
PLACES = {
    "from 0": None,
    "from 131,000": 131_000,
    "rows": torch.arange(40) * 3 + torch.tensor([[0], [100_000]]),
    "pair": (torch.arange(70, 81) + torch.tensor([[0], [900]]), torch.arange(40) * 3 + torch.tensor([[0], [100_000]])),
}


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("name", PLACES)
def test_tables_and_steps_are_the_same_angles(scaling: Scaling | None, name: str) -> None:
    """Torch code reads the tables, kernels the steps; both are position·θ of the mask's positions."""
    mask = make_mask(11, 40, 2, CPU, positions=PLACES[name])
    angles = mask.angles(Rotary(16, scaling=scaling))
    for positions, table in (
        (mask.query_positions, angles.query(torch.float64)),
        (mask.key_positions, angles.key(torch.float64)),
    ):
        by_step = positions[:, None, :, None] * angles.steps[:, None, None, :]  # wraps at whole turns
        phase = by_step.double() / 2.0**64 * 2 * math.pi
        want = torch.stack((phase.cos(), phase.sin()), dim=-2) * angles.rotary.factor
        assert (table - want).abs().max() <= 1e-9  # float64 at 131,000
        x = torch.randn(2, 3, positions.shape[1], 16, dtype=torch.float64)
        rotated = angles.rotate_queries(x) if table.shape[2] == 11 else angles.rotate_keys(x)
        (a, b), (cos, sin) = x.chunk(2, dim=-1), table.unbind(-2)
        assert (rotated - torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)).abs().max() <= 1e-12


def test_prefill_runs_one_call_for_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    choose = dispatch.Table.choose

    def spy(table: dispatch.Table, call: dispatch.Call) -> dispatch.Implementation:
        if table is COCA:
            calls.append((call.q.shape[2], call.k.shape[2]))
        return choose(table, call)

    monkeypatch.setattr(dispatch.Table, "choose", spy)
    coca_attention(*coca_inputs(64), rotary=Rotary(8, scaling=DynamicNTK(4, 8)))
    assert calls == [(8, 8), (8, 16), (16, 32), (32, 64)]


@pytest.mark.parametrize("factor", [0.5, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "scaling", [Linear, NTK, lambda f: DynamicNTK(f, 512), lambda f: YaRN(f, 512), lambda f: Llama3(f, 512)]
)
def test_a_factor_below_one_raises(scaling: type, factor: float) -> None:
    with pytest.raises(ValueError, match=r"scaling factor must be at least 1, got .*; it is the new length"):
        scaling(factor)


def test_bad_modes_and_widths_raise() -> None:
    with pytest.raises(ValueError, match="did you mean 'per_query'"):
        DynamicNTK(4, 512, "per_qery")
    with pytest.raises(ValueError, match="head_dim must be even to form rotary pairs, got 63"):
        Rotary(63)
    with pytest.raises(ValueError, match="train_length must be at least 1, got 0"):
        YaRN(4, 0)
    with pytest.raises(ValueError, match="low_freq_factor must lie between 0 and 4"):
        Llama3(8, 512, low_rotations=5)
    with pytest.raises(ValueError, match="NTK scaling needs at least two rotary pairs"):
        Rotary(2, scaling=NTK(2)).frequencies()


@pytest.mark.parametrize("heads", [4, 2])
def test_a_new_token_s_query_and_key_rotate_together_as_they_do_apart(heads: int) -> None:
    """Also for queries and keys that are not contiguous."""
    angles = make_mask(1, 9, 3, CPU, positions=7).angles(Rotary(8))
    q, k = torch.randn(3, 1, 4, 8).transpose(1, 2), torch.randn(3, 1, heads, 8).transpose(1, 2)
    one = Angles(Rotary(8), make_mask(1, 1, 3, CPU, positions=15))
    assert torch.equal(one.key(q.dtype), angles.query(q.dtype))
    for together, apart in zip(one.rotate_together(q, k), (one.rotate_keys(q), one.rotate_keys(k)), strict=True):
        assert torch.equal(together, apart)
        assert together.is_contiguous()
    assert all(torch.equal(x, y) for x, y in zip(one.rotate_new(q, k), one.rotate_together(q, k), strict=True))
