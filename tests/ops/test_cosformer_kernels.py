"""cosFormer's Triton kernels compute what the definition says: on a GPU where there is one, else in the interpreter."""

import doctest
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import cosformer_attention, cosformer_attention_reference
from farspan.ops.cosformer import triton_backend
from farspan.ops.cosformer.kernel import cosformer_kernel
from farspan.ops.cosformer.kernels import attention, op
from farspan.ops.cosformer.triton_backend import _cached
from farspan.ops.positions import resolve
from tests.helpers import softmax_inputs
from tests.ops.kernels import DEVICE, poison  # noqa: F401 (a fixture for every test here)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short text has several, of more than one block each."""
    monkeypatch.setattr(op, "chosen", lambda q, v, causal: 64)


def inputs(n: int, m: int | None = None, *, dtype: torch.dtype = torch.float32, **shape: int) -> list[Tensor]:
    return [x.detach().to(DEVICE, dtype).requires_grad_() for x in softmax_inputs(n, m, **{"h": 2, "g": 1, **shape})]


@torch.no_grad()
def meeting(leaves: list[Tensor]) -> list[Tensor]:
    """Queries that all meet their keys: a gradient is divided by the sum of weights, and that must have digits."""
    for x in leaves[:2]:
        x += 1.0
    return leaves


def with_gradients(attend: Any, leaves: list[Tensor], weights: Tensor, **options: Any) -> list[Tensor]:
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


def compare(leaves: list[Tensor], **options: Any) -> float:
    """The largest difference from the definition in float64, values and gradients, relative to the largest number."""
    options = {"max_length": 150, **options}
    wide = [x.detach().double().requires_grad_() for x in leaves]
    weights = torch.randn(*leaves[0].shape[:3], leaves[2].shape[-1], dtype=torch.float64, device=DEVICE)
    pairs = zip(
        with_gradients(cosformer_attention, leaves, weights, backend="triton", **options),
        with_gradients(cosformer_attention_reference, wide, weights, **options),
        strict=True,
    )
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs)


def eager(q: Tensor, k: Tensor, v: Tensor, max_length: int, causal: bool = True) -> Tensor:
    """What anyone would write in the same dtype: features, products and weights in that dtype."""
    angle = math.pi * torch.arange(q.shape[2], device=q.device) / (2 * max_length)
    waves = [x[:, None].to(q.dtype) for x in (angle.cos(), angle.sin())]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q_, k_ = (torch.cat([x.relu() * wave for wave in waves], dim=-1) for x in (q, k))
    weights = (q_ @ k_.mT).tril() if causal else q_ @ k_.mT
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-3)


def check_against_eager(n: int, dtype: torch.dtype, causal: bool = True, **shape: int) -> None:
    """Errors of values and gradients at most twice those of eager in the same dtype; rounding is always allowed."""
    leaves = meeting(inputs(n, dtype=dtype, **shape))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    weights = torch.randn(*leaves[0].shape[:3], leaves[2].shape[-1], device=DEVICE).to(dtype)
    options: dict[str, Any] = {"max_length": n, "causal": causal}
    truth = with_gradients(cosformer_attention_reference, wide, weights, **options)
    ours = with_gradients(cosformer_attention, leaves, weights, backend="triton", **options)
    plain = with_gradients(eager, leaves, weights, **options)
    for name, a, b, want in zip(("out", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        units = 2 if dtype == torch.float32 else 1  # three products of 11 bits each leave out the fourth
        rounding = units * float(want.abs().max()) * torch.finfo(dtype).eps
        mine, theirs = ((x.double() - want).abs() for x in (a, b))
        assert a.isfinite().all(), name
        assert mine.max() <= 2 * theirs.max() + rounding, name
        assert mine.mean() <= 2 * theirs.mean() + rounding / 8, name


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(
    ("dtype", "n"),
    [*((torch.bfloat16, n) for n in (2, 63, 64, 65, 200)), (torch.float16, 65), (torch.float32, 65)],
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


@pytest.mark.usefixtures("short_segments")
def test_a_head_wider_than_a_programs_share_of_columns() -> None:
    check_against_eager(65, torch.bfloat16, h=1, d=128)
    assert attention.PRECISE_TOTALS[128].columns < 96
    assert compare(meeting(inputs(130, b=1, h=1, g=1, d=96))) <= 2e-6


@pytest.mark.usefixtures("short_segments")
def test_weights_that_nearly_cancel_keep_their_digits_in_bfloat16() -> None:
    """At distance 2M the raised cosine is 2^-16 of its two parts: sums in bfloat16 would have none of it."""
    q, k, v = (x.detach() for x in inputs(530, b=1, h=1, g=1, d=16, dtype=torch.bfloat16))
    k = torch.where((torch.arange(530, device=DEVICE) == 7)[:, None], k.abs() + 1, -1.0)  # one live key
    options: dict[str, Any] = {"max_length": 256, "beyond": "raised-cosine"}
    out = cosformer_attention(q + 1, k, v, backend="triton", **options)[:, :, 519]
    want = cosformer_attention_reference(q.double() + 1, k.double(), v.double(), **options)[:, :, 519]
    assert float((out - want).abs().max()) <= 0.02 * float(want.abs().max())


def options_by_name(n: int) -> dict[str, dict[str, Any]]:
    index = torch.arange(n, device=DEVICE)
    rows = torch.tensor([[n // 3], [0]], device=DEVICE)
    return {
        "causal": {},
        "bidirectional": {"causal": False},
        "decoupled": {"beyond": "decoupled"},
        "decoupled, past M": {"beyond": "decoupled", "max_length": 20, "causal": False},
        "raised cosine, past M": {"beyond": "raised-cosine", "max_length": 20},
        "no re-weighting": {"reweight": False},
        "elu": {"activation": "elu"},
        "left padding": {"padding_mask": index[None] >= rows},
        "right padding, bidirectional": {"padding_mask": index[None] < n - rows, "causal": False},
        "long documents": {"documents": (index // 45).expand(2, n)},
        "short documents": {"documents": (index // 7).expand(2, n), "beyond": "raised-cosine"},
        "documents and padding": {"documents": (index // 33).expand(2, n), "padding_mask": index[None] >= rows},
        "positions a row": {"positions": index * 2 + rows},
        "far positions": {"positions": 2**31 - 1001 - n},
        "proportional": {"causal": False, "positions": "proportional"},
    }


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("name", list(options_by_name(1)))
def test_kernels_equal_the_definition_for_every_option(name: str) -> None:
    n = 70  # three chunks of 32, two segments
    options = {"max_length": 170, **options_by_name(n)[name]}
    b = 2 if any(isinstance(x, Tensor) for x in options.values()) else 1
    leaves = inputs(n, b=b, h=1, d=8)
    if name == "decoupled, past M":
        leaves[0] = inputs(40, h=1, d=8)[0]
    assert compare(meeting(leaves), **options) <= 2e-6


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("h", "g"), [(4, 1), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_grouped_heads_strides_and_unequal_widths(h: int, g: int, causal: bool) -> None:
    q, k, _ = inputs(40, h=h, g=g, d=6)
    q, k = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k))
    v = torch.randn(1, g, 40, 40, device=DEVICE)[..., ::2].requires_grad_()
    assert compare([q, k, v], causal=causal) <= 2e-6


def test_queries_may_be_the_last_of_the_keys() -> None:
    assert compare(inputs(10, 45, h=1, d=8)) <= 2e-6


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("beyond", ["raise", "decoupled", "raised-cosine"])
def test_a_stream_in_pieces_equals_the_whole_with_its_gradients(beyond: str) -> None:
    leaves = inputs(81, h=1, d=8)
    options: dict[str, Any] = {"max_length": 100, "beyond": beyond}
    weights = torch.randn(1, 1, 81, 8, device=DEVICE)

    def in_pieces(*leaves: Tensor, **options: Any) -> Tensor:
        state, parts = None, []
        for q, k, v in zip(*(x.split([40, 40, 1], dim=2) for x in leaves), strict=True):
            out, state = cosformer_attention(q, k, v, state=state, return_state=True, backend="triton", **options)
            parts.append(out)
        ours = cosformer_attention(*leaves, return_state=True, backend="chunked", **options)[1]
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-4) for a, b in zip(state[:5], ours[:5], strict=True))
        return torch.cat(parts, dim=2)

    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = with_gradients(cosformer_attention_reference, wide, weights, **options)
    for got, want in zip(with_gradients(in_pieces, leaves, weights, **options), truth, strict=True):
        assert (got - want).abs().max() <= 3e-6 * want.abs().max().clamp(min=1.0)


def test_a_state_alone_has_gradients() -> None:
    leaves = inputs(40, h=1, d=8)
    pairs = []
    for backend in ("triton", "chunked"):
        _, state = cosformer_attention(*leaves, max_length=50, return_state=True, backend=backend)
        loss = (state.numerator.square().sum() + state.denominator.square().sum()).sqrt()
        pairs.append(torch.autograd.grad(loss, leaves[1:]))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-3, 100.0])
def test_dead_queries_and_disjoint_supports_are_finite(dtype: torch.dtype, size: float) -> None:
    q, k, v = (x.detach() * size for x in inputs(40, dtype=dtype, g=2, d=8))
    q[:, :, ::3] = -q[:, :, ::3].abs()  # nothing after the ReLU
    q[:, 1, :, :4], k[:, 1, :, 4:] = -1, -1  # no feature in common
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cosformer_attention(*leaves, max_length=40, backend="triton")
    assert out.isfinite().all()
    assert (out[:, :, ::3] == 0).all()
    assert (out[:, 1] == 0).all()
    assert out[:, 0].abs().sum() > 0
    for gradient in torch.autograd.grad(out.float().sum(), leaves):  # of a sum, whose gradient has no strides
        assert gradient.isfinite().all()


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


@pytest.mark.parametrize("n", [1, 40])
def test_padding_of_nan_has_no_gradient_under_elu(n: int) -> None:
    leaves = inputs(n, 40, h=1, d=8)
    with torch.no_grad():
        for x in leaves[1:]:
            x[:, :, :5] = torch.nan
    keep = (torch.arange(40, device=DEVICE) >= 5)[None]
    out = cosformer_attention(*leaves, max_length=40, activation="elu", padding_mask=keep, backend="triton")
    dq, dk, dv = torch.autograd.grad(out.square().sum(), leaves)
    assert all((x[:, :, :5] == 0).all() for x in (dk, dv))
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_nan_is_not_hidden_by_the_activation() -> None:
    q, k, v = (x.detach() for x in inputs(5, h=1, d=8))
    k[0, 0, 2, 3] = torch.nan
    out = cosformer_attention(q, k, v, max_length=8, backend="triton")
    assert out[:, :, :2].isfinite().all()
    assert out[:, :, 2].isnan().all()


def test_segments_do_not_show() -> None:
    """Any cutting of the text gives the same up to the order of sums."""
    q, k, v = (x.detach() for x in inputs(130, h=1, d=8))
    numbers = (0.0, 1.0, True, True, 1e-6, True)
    angles = torch.stack([f(torch.arange(130, device=DEVICE) * 0.01) for f in (torch.cos, torch.sin)])[None]
    results = [
        op.linear_attention_op(q, k, v, None, None, angles, angles, None, None, *numbers, segment, False)[0]
        for segment in (64, 128, 192, 640)
    ]
    assert max(float((x - results[0]).abs().max()) for x in results) <= 1e-6


@pytest.mark.parametrize("cut", [(64, 32, 4, 2), (64, 128, 4, 2), (128, 64, 8, 2)])
@pytest.mark.parametrize("segment", [64, 192])
def test_no_cut_shows(cut: tuple[int, ...], segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller and larger than each other, and than a segment."""
    for table in (attention.PAIRS, attention.QUERY_PAIRS):
        monkeypatch.setitem(table, 64, attention.Cut(*cut))
    monkeypatch.setattr(op, "chosen", lambda q, v, causal: segment)
    check_against_eager(250, torch.bfloat16, b=1, h=2, g=1, d=16)


@pytest.mark.parametrize(("n", "m"), [(1, 32_768), (100, 32_768), (32_768, 32_768), (32_768, 100)])
def test_the_sums_of_all_segments_stay_small(n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys for few queries (cross attention) are as many segments as for many queries: the processors' number."""
    monkeypatch.setattr(attention, "processors", lambda device: 132)
    for b, h in ((32, 16), (1, 16), (1, 1)):
        q, k, v = (torch.empty(b, h, x, 128, dtype=torch.bfloat16, device="meta") for x in (n, m, m))
        segments = attention.count_segments(k, attention.chosen(q, v, causal=False))
        sums = attention.Weight(0.0, 1.0, True, True, 1e-6).like(k, v, segments)
        assert sums.states.nbytes <= max(b * h, 132 * attention.WAVES) * 2 * 128 * 128 * 4


@pytest.mark.usefixtures("short_segments")
def test_no_launch_grows_where_cuda_counts_to_65_535(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, tuple[int, ...]] = {}

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(attention, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids[self.name] = grid
            return self.kernel[grid]

    names = ("pairs_kernel", "totals_kernel", "prefix_kernel", "delta_kernel")
    for name in names:
        monkeypatch.setattr(attention, name, Noted(name))
    assert compare(meeting(inputs(70, b=3, h=4, g=2, d=8))) <= 2e-6
    assert {*grids} == {*names}
    assert all(len(grid) == 1 and grid[0] % 6 == 0 for grid in grids.values()), grids


# Registration with torch, and dispatch.


def test_operators_pass_torchs_own_check() -> None:
    q, k, v = inputs(40, h=2, d=8)
    folded = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    crossed = q.detach().permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1).requires_grad_()
    angles = torch.rand(1, 2, 40, device=DEVICE)
    state = (torch.rand(1, 1, 16, 8, device=DEVICE), torch.rand(1, 1, 16, device=DEVICE))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    nothing = (None, None)
    for given, initial, causal, remember in (
        (folded, state, True, True),
        (folded, nothing, False, False),
        (crossed, nothing, True, False),
    ):
        arguments = (
            given,
            k,
            v,
            *initial,
            angles,
            angles,
            None,
            None,
            0.0,
            1.0,
            True,
            True,
            1e-6,
            causal,
            64,
            remember,
        )
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


@pytest.mark.parametrize("segment", [64, 128])
def test_the_backward_pass_keeps_inputs_outputs_and_a_state_a_segment(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = inputs(128, h=1, g=1, d=16, dtype=torch.bfloat16)
    monkeypatch.setattr(op, "chosen", lambda q, v, causal: segment)
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = cosformer_attention(*leaves, max_length=128, backend="triton")
    denominators, angles = 4 * 128, 2 * 4 * 128
    states = 0 if segment == 128 else 2 * 2 * (2 * 16 * 16 + 4 * 16)  # of two segments, with values in bfloat16
    assert sum(saved.values()) == sum(x.nbytes for x in (*leaves, out)) + denominators + angles + states


def test_angles_are_made_once() -> None:
    _cached.cache_clear()
    q, k, v = (x.detach() for x in inputs(40, h=1, d=8))
    for n in (33, 40, 40):
        cosformer_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], max_length=4711, backend="triton")
    assert _cached.cache_info().misses == 1


def test_angles_made_in_a_cuda_graph_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [x.detach() for x in inputs(40, h=1, d=8)]
    want = cosformer_attention(*leaves, max_length=4712, backend="triton")
    _cached.cache_clear()
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_available", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert torch.equal(cosformer_attention(*leaves, max_length=4712, backend="triton"), want)
    assert _cached.cache_info().currsize == 0
    cosformer_attention(*leaves, max_length=4712, backend="triton")
    assert _cached.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({}, torch.float64, "takes float32, bfloat16 or float16, got torch.float64; use backend='chunked'"),
        ({"beyond": "decay"}, torch.float32, "has no decay: .*; use backend='chunked'"),
        (
            {"causal": False, "documents": torch.zeros(1, 5, dtype=torch.long)},
            torch.float32,
            "documents only with causal",
        ),
        ({"positions": (torch.arange(5), torch.arange(5))}, torch.float32, "queries that are the last keys"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_the_reason(
    options: dict[str, Any], dtype: torch.dtype, message: str
) -> None:
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    with pytest.raises(ValueError, match=message):
        cosformer_attention(*inputs(5, dtype=dtype), max_length=8, backend="triton", **options)


AUTO: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "causal": True, "n": 64, "d": 16, "hopper": True}
PAPER: dict[str, Any] = {"beyond": "raise", "activation": "relu", "reweight": True}


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"hopper": False}, False),
        ({"device": "cpu"}, False),
        ({"dtype": torch.float32}, False),
        ({"causal": False}, False),
        ({"n": 1}, False),
        ({"n": 63}, False),
        ({"d": 256}, False),
        ({"beyond": "raised-cosine"}, False),
        ({"beyond": "decoupled"}, False),
        ({"beyond": "decay"}, False),
        ({"activation": "elu"}, False),
        ({"reweight": False}, False),
    ],
)
def test_auto_takes_the_kernels_where_they_were_timed(
    changed: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {**AUTO, **PAPER, **changed}
    monkeypatch.setattr(triton_backend, "is_hopper", lambda index: case["hopper"])
    kernel = cosformer_kernel(150, case["beyond"], case["activation"], case["reweight"])
    with FakeTensorMode():  # has CUDA tensors on any machine
        q = torch.empty(1, 2, case["n"], case["d"], dtype=case["dtype"], device=case["device"])
        places = resolve(None, case["n"], 64, q.device)
        assert triton_backend.auto_takes_triton(kernel, q, q, places, case["causal"], None) is taken


def test_forward_derivatives_are_refused_rather_than_zero() -> None:
    leaves = tuple(x.detach() for x in inputs(40, h=1, d=8))

    def attend(backend: str) -> Any:
        return lambda *leaves: cosformer_attention(*leaves, max_length=40, backend=backend)

    _, tangent = torch.func.jvp(attend("chunked"), leaves, leaves)
    assert tangent.abs().sum() > 0
    with pytest.raises(ValueError, match="no forward-mode derivatives; use backend='chunked'"):
        torch.func.jvp(attend("triton"), leaves, leaves)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="heads up to 128 wide, got 136; use backend='chunked'"):
        cosformer_attention(*inputs(5, d=136), max_length=8, backend="triton")


def test_examples_in_the_kernels_run() -> None:
    assert doctest.testmod(sys.modules[attention.__name__]) == (0, 1)


# What only a GPU has the time for.


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "h", "g"), [(1000, 4, 2), (4097, 2, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_long_texts_on_a_gpu(n: int, h: int, g: int, d: int, dtype: torch.dtype, causal: bool) -> None:
    check_against_eager(n, dtype, causal, b=1, h=h, g=g, d=d)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(options_by_name(1)))
def test_long_texts_with_every_option_on_a_gpu(name: str) -> None:
    options = {"max_length": 2500, **options_by_name(1000)[name]}
    assert compare(meeting(inputs(1000, b=2, h=4, g=2, d=64)), **options) <= 2e-5


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
