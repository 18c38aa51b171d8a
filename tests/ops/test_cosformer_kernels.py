"""cosFormer's Triton kernels compute what the definition says: on a GPU where there is one, else in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import cosformer, cosformer_attention, cosformer_attention_reference, explain
from farspan.ops.masking import make_mask
from farspan.ops.triton import linear
from tests.ops.cosformer import (
    check_against_eager,
    compare,
    inputs,
    meeting,
    saved_bytes,
    short_segments,  # noqa: F401 (a fixture that tests name)
    with_gradients,
)
from tests.ops.kernels import DEVICE, poison  # noqa: F401 (a fixture for every test here)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("dtype", "n"),
    [*((torch.bfloat16, n) for n in (2, 64, 65, 200)), (torch.float32, 65)],
    ids=str,
)
def test_errors_are_at_most_twice_those_of_eager(dtype: torch.dtype, n: int) -> None:
    check_against_eager(n, dtype, h=1, d=64 if n == 65 else 16)


def test_the_first_token_gives_its_value_back_and_no_gradient() -> None:
    """A mean over one key is that key's value, however its weight is rounded."""
    q, k, v = meeting(inputs(65, dtype=torch.bfloat16, h=1, d=64))
    out = cosformer_attention(q, k, v, max_length=65, backend="triton")
    assert torch.equal(out[:, :, 0], v[:, :, 0])
    (dq,) = torch.autograd.grad(out, q, torch.randn_like(out))
    assert dq[:, :, 0].abs().max() <= 1e-6 * dq.abs().max()


def options_by_name(n: int) -> dict[str, dict[str, Any]]:
    index = torch.arange(n, device=DEVICE)
    rows = torch.tensor([[n // 3], [0]], device=DEVICE)
    return {
        "causal": {},
        "left padding": {"padding_mask": index[None] >= rows},
        "right padding": {"padding_mask": index[None] < n - rows},
        "positions a row": {"positions": index * 2 + rows},
        "far positions": {"positions": 2**31 - 1001 - n},
    }


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("name", list(options_by_name(1)))
def test_kernels_equal_the_definition_for_every_option(name: str) -> None:
    n = 70  # three chunks of 32, two segments
    options = {"max_length": 170, **options_by_name(n)[name]}
    b = 2 if any(isinstance(x, Tensor) for x in options.values()) else 1
    leaves = inputs(n, b=b, h=1, d=8)
    assert compare(meeting(leaves), **options) <= 2e-6


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("h", "g"), [(4, 1), (4, 2)])
def test_grouped_heads_strides_and_unequal_widths(h: int, g: int) -> None:
    q, k, _ = inputs(40, h=h, g=g, d=6)
    q, k = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k))
    v = torch.randn(1, g, 40, 40, device=DEVICE)[..., ::2].requires_grad_()
    assert compare([q, k, v]) <= 2e-6


@pytest.mark.usefixtures("short_segments")
@torch.no_grad()
def test_the_state_after_a_prompt_is_continued_in_torch() -> None:
    leaves, options = inputs(81, h=1, d=8), {"max_length": 100, "return_state": True}
    start, rest = ([x[:, :, part] for x in leaves] for part in (slice(80), slice(80, None)))
    out, state = cosformer_attention(*start, backend="triton", **options)
    want = cosformer_attention(*start, backend="chunked", **options)[1]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(state[:5], want[:5], strict=True))
    out = torch.cat((out, cosformer_attention(*rest, state=state, **options)[0]), dim=2)
    truth = cosformer_attention_reference(*(x.double() for x in leaves), max_length=100)
    assert (out - truth).abs().max() <= 3e-6 * truth.abs().max().clamp(min=1.0)


def test_padding_may_hold_anything() -> None:
    leaves = inputs(40, h=1, d=8)
    with torch.no_grad():
        for x in leaves[1:]:
            x[:, :, 30:] = torch.nan
    keep = (torch.arange(40, device=DEVICE) < 30)[None]
    out = cosformer_attention(*leaves, max_length=30, padding_mask=keep, backend="triton")
    alone = cosformer_attention(*(x[:, :, :30] for x in leaves), max_length=30, backend="triton")
    assert (out[:, :, :30] - alone).abs().max() <= 1e-6  # on a GPU the two are cut otherwise
    assert (out[:, :, 30:] == 0).all()
    dq, dk, dv = torch.autograd.grad(out.square().sum(), leaves)
    assert all((x[:, :, 30:] == 0).all() for x in (dk, dv))
    assert dq.isfinite().all()


def test_nan_is_not_hidden_by_the_activation() -> None:
    q, k, v = (x.detach() for x in inputs(5, h=1, d=8))
    k[0, 0, 2, 3] = torch.nan
    out = cosformer_attention(q, k, v, max_length=8, backend="triton")
    assert out[:, :, :2].isfinite().all()
    assert out[:, :, 2].isnan().all()


# What only a GPU has the time for.


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "h", "g"), [(1000, 4, 2), (4097, 2, 2)])
def test_long_sequences_on_a_gpu(n: int, h: int, g: int, d: int, dtype: torch.dtype) -> None:
    check_against_eager(n, dtype, b=1, h=h, g=g, d=d)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(options_by_name(1)))
def test_long_sequences_with_every_option_on_a_gpu(name: str) -> None:
    options = {"max_length": 2500, **options_by_name(1000)[name]}
    assert compare(meeting(inputs(1000, b=2, h=4, g=2, d=64)), **options) <= 2e-5


@pytest.mark.usefixtures("short_segments")
def test_a_head_wider_than_a_programs_share_of_columns() -> None:
    check_against_eager(65, torch.bfloat16, h=1, d=128)
    assert linear.PRECISE.columns < 96
    assert compare(meeting(inputs(66, b=1, h=1, g=1, d=96))) <= 2e-6


@pytest.mark.parametrize(("cut", "segment"), [((64, 32, 4, 2), 192), ((64, 128, 4, 2), 64), ((128, 64, 8, 2), 64)])
def test_no_cut_shows(cut: tuple[int, ...], segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller and larger than each other, and than a segment."""
    for table in (linear.PAIRS, linear.QUERY_PAIRS):
        monkeypatch.setitem(table, 64, linear.Cut(*cut))
    monkeypatch.setattr(linear, "segment_of", lambda q, v: segment)
    check_against_eager(200, torch.bfloat16, b=1, h=1, g=1, d=16)


@pytest.mark.usefixtures("short_segments")
def test_no_launch_grows_where_cuda_counts_to_65_535(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, tuple[int, ...]] = {}

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(linear, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids[self.name] = grid
            return self.kernel[grid]

    names = ("pairs_kernel", "totals_kernel", "prefix_kernel")
    for name in names:
        monkeypatch.setattr(linear, name, Noted(name))
    assert compare(meeting(inputs(66, b=3, h=1, g=1, d=8))) <= 2e-6
    assert {*grids} == {*names}
    assert all(len(grid) == 1 and grid[0] % 3 == 0 for grid in grids.values()), grids


@pytest.mark.parametrize("segment", [64, 128])
def test_the_backward_pass_keeps_inputs_outputs_and_a_state_a_segment(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = inputs(128, h=1, g=1, d=16, dtype=torch.bfloat16)
    monkeypatch.setattr(linear, "segment_of", lambda q, v: segment)
    saved = saved_bytes(lambda: cosformer_attention(*leaves, max_length=128, backend="triton"))
    tensors = 4 * leaves[0].nbytes  # q, k, v and the output
    denominators, angles = 4 * 128, 2 * 4 * 128
    states = 128 // segment * 2 * (2 * 16 * 16 + 4 * 16)  # with values in bfloat16
    assert saved == tensors + denominators + angles + states


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_training_needs_at_most_a_fifth_more_than_inputs_outputs_and_gradients(d: int) -> None:
    leaves = inputs(32_768, b=1, h=16, g=16, d=d, dtype=torch.bfloat16)
    gradient = torch.randn_like(leaves[0])
    cosformer_attention(*leaves, max_length=32_768, backend="triton").backward(gradient)
    for x in leaves:
        x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(x.nbytes for x in leaves) - gradient.nbytes
    cosformer_attention(*leaves, max_length=32_768, backend="triton").backward(gradient)
    needed = 8 * leaves[0].nbytes  # q, k, v, output, and the gradient of each
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * needed


def test_operators_pass_torchs_own_check() -> None:
    q, k, v = inputs(40, h=2, d=8)
    folded = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    crossed = q.detach().permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1).requires_grad_()
    angles = torch.rand(1, 2, 40, device=DEVICE)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for given in (folded, crossed):
        arguments = (given, k, v, angles, 1e-6)
        torch.library.opcheck(torch.ops.farspan.linear_attention.default, arguments, test_utils=tests)


@pytest.mark.slow
def test_it_compiles_in_one_graph() -> None:
    leaves = inputs(40, h=1, d=8)

    def attend(*leaves: Tensor) -> Tensor:
        return cosformer_attention(*leaves, max_length=40, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    weights = torch.randn(1, 1, 40, 8, device=DEVICE)
    for got, want in zip(
        with_gradients(compiled, leaves, weights), with_gradients(attend, leaves, weights), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-6)


def test_angles_are_made_once_for_layers_that_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, made = cosformer.Weighting.angles, []
    monkeypatch.setattr(
        cosformer.Weighting, "angles", lambda self, x, *rest: made.append(x.shape[1]) or compute(self, x, *rest)
    )
    q, k, v = (x.detach() for x in inputs(40, h=1, d=8))
    mask = make_mask(40, 40, 1, q.device)
    for _ in range(3):
        cosformer_attention(q, k, v, max_length=4711, mask=mask, backend="triton")
    assert made == [40]


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({}, torch.float16, "takes float32 or bfloat16, got torch.float16; use backend='chunked'"),
        ({"beyond": "decay"}, torch.float32, "takes beyond='raise' with ReLU and re-weighting; use backend='chunked'"),
        ({"activation": "elu"}, torch.float32, "with ReLU and re-weighting"),
        ({"reweight": False}, torch.float32, "with ReLU and re-weighting"),
        ({"causal": False}, torch.float32, "takes causal calls with one query per key and no documents"),
        ({"documents": torch.zeros(1, 5, dtype=torch.long)}, torch.float32, "and no documents"),
        ({"return_state": True}, torch.float32, "its state has no gradients; use backend='chunked'"),
        ({"d": 136}, torch.float32, "heads up to 128 wide, got 136; use backend='chunked'"),
    ],
)
def test_what_the_kernels_cannot_do_raises_with_the_reason(
    options: dict[str, Any], dtype: torch.dtype, message: str
) -> None:
    leaves = inputs(5, dtype=dtype, d=options.pop("d", 8))
    with pytest.raises(ValueError, match=message):
        cosformer_attention(*leaves, max_length=8, backend="triton", **options)


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"hopper": False}, False),
        ({"device": "cpu"}, False),
        ({"dtype": torch.float32}, False),
        ({"n": 1}, False),
        ({"causal": False}, False),
    ],
)
def test_auto_takes_the_kernels_where_they_were_timed(
    changed: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"device": "cuda", "dtype": torch.bfloat16, "n": 64, "causal": True, "hopper": True, **changed}
    monkeypatch.setattr(cosformer, "is_hopper", lambda index: case["hopper"])
    with FakeTensorMode():  # has CUDA tensors on any machine
        q = torch.empty(1, 2, case["n"], 16, dtype=case["dtype"], device=case["device"])
        k = q.new_empty(1, 2, 64, 16)
        found = explain(cosformer_attention, q, k, k, max_length=150, causal=case["causal"])
    assert (found.name == "triton") is taken
