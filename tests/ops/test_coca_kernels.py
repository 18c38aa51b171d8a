"""The Triton kernels compute what the equations say: on a GPU where there is one, else in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import NTK, DynamicNTK, Rotary, YaRN, coca_attention, coca_attention_reference, coca_features
from farspan.ops.coca.half_width import half_width_attention
from farspan.ops.phases import rotary_steps
from farspan.ops.triton import coca_decode
from farspan.ops.triton.coca_decode import Cut, DecodeCall
from tests.ops.kernels import DEVICE, FORMS, assert_as_good_as_eager, inputs, poison  # noqa: F401 (a fixture for every test here)


def eager(q: Tensor, t: Tensor, v: Tensor, *, mask: Tensor, rotary: Rotary | None, form: str) -> Tensor:
    """What anyone would write in the same dtype: q̃, k̃ and weights rounded to it, softmax in float32."""
    q_, k_ = coca_features(q, t, None, None)
    if rotary is not None:
        part = rotary.plan(0, q.shape[2], t.shape[2], device=q.device)[0]
        q_, k_ = coca_features(q, t, part.query, part.key, form=form)
    k_, v = (x.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for x in (k_, v))
    scores = (q_ @ k_.mT).float() * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype) @ v


def check(n: int, m: int, *, form: str, dtype: torch.dtype, rotary: Rotary | None, **shape: int) -> None:
    q, t, v = inputs(n, m, dtype=dtype, **shape)
    options: dict[str, Any] = {"rotary": rotary, "form": form}
    wide = (x.double() for x in (q, t, v))
    truth = coca_attention_reference(*wide, **options)
    mask = torch.ones(n, m, dtype=torch.bool, device=DEVICE).tril(m - n)
    out = coca_attention(q, t, v, **options, backend="triton")
    assert_as_good_as_eager(out, truth, eager(q, t, v, mask=mask, **options))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "n", "m"),
    [(torch.bfloat16, n, m) for n, m in [(1, 1), (1, 63), (1, 64), (1, 65), (1, 257), (3, 65), (63, 63), (65, 257)]]
    + [(dtype, n, 65) for dtype in (torch.float32, torch.float16) for n in (1, 65)],
    ids=str,
)
def test_kernel_error_is_at_most_twice_that_of_eager(form: str, dtype: torch.dtype, n: int, m: int) -> None:
    check(n, m, form=form, dtype=dtype, rotary=Rotary(64), h=2, g=1, d=64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": 2**20},
        {"window": 33},
        {"padding_mask": torch.arange(150)[None] >= torch.tensor([[0], [47]])},
        {"positions": 3 * torch.arange(150)[None] + torch.tensor([[0], [40_000]])},
        {"rotary": Rotary(32, scaling=DynamicNTK(4, 50))},
        {"rotary": None},
    ],
    ids=str,
)
def test_one_query_a_key_head_rounds_its_result_alone(form: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, t, v = inputs(1, 150, b=2, h=2, g=2, d=32, dtype=dtype)
    options = {"rotary": Rotary(32), "form": form, **options}
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    truth = coca_attention_reference(q.double(), t.double(), v.double(), **options)
    out = coca_attention(q, t, v, **options, backend="triton")
    error, rounding = float((out.double() - truth).abs().max()), float(truth.abs().max()) * torch.finfo(dtype).eps
    assert error <= max(rounding, 4e-6)  # nothing is rounded but the result


FEW = {
    "plain": {},
    "far": {"positions": 2**20},
    "window": {"window": 33},
    "bidirectional window": {"causal": False, "window": 40},
    "padding": {"padding_mask": torch.arange(150)[None] >= torch.tensor([[0], [47]])},
    "free positions": {"positions": 3 * torch.arange(150)[None] + torch.tensor([[0], [40_000]])},
    "dynamic NTK": {"rotary": Rotary(32, scaling=DynamicNTK(4, 50))},
    "YaRN": {"rotary": Rotary(32, scaling=YaRN(4, 50))},
    "NoPE": {"rotary": None},
}


@pytest.mark.parametrize(
    ("dtype", "h", "n"),
    [(torch.bfloat16, h, n) for h, n in [(4, 1), (8, 1), (4, 3), (8, 4)]]
    + [(torch.float16, 4, 3), (torch.float32, 8, 1), (torch.float32, 4, 3)],
    ids=str,
)
@pytest.mark.parametrize("name", FEW)
def test_few_queries_err_no_more_than_on_ready_keys(name: str, dtype: torch.dtype, h: int, n: int) -> None:
    q, t, v = inputs(n, 150, b=2, h=h, g=1, d=32, dtype=dtype)
    options = {"rotary": Rotary(32), "form": FORMS[(h + n + len(name)) % 2], **FEW[name]}
    options = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}
    truth = coca_attention_reference(q.double(), t.double(), v.double(), **options)
    out = coca_attention(q, t, v, **options, backend="triton")
    if dtype == torch.float32:  # of which the angles have a bit less
        assert (out - truth).abs().max() <= 4e-6
    else:
        assert_as_good_as_eager(out, truth, coca_attention(q, t, v, **options, backend="sdpa"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_queries_and_their_weights_are_not_rounded(dtype: torch.dtype) -> None:
    """Where t is not turned either, nothing is but the result."""
    q, t, v = inputs(2, 150, b=2, h=8, g=2, d=32, dtype=dtype)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=None)
    out = coca_attention(q, t, v, rotary=None, backend="triton").double()
    assert ((out - truth).abs() <= truth.abs() * torch.finfo(dtype).eps / 2 + 1e-4 * truth.abs().max()).all()


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_tiles_with_fewer_rows_than_there_are_queries(rows: int) -> None:
    q, t, v = inputs(9, 70, h=4, g=1, d=16)
    step = rotary_steps(Rotary(16), None, q.device)
    call = DecodeCall(q, t, v, step, None, None, None, None, None, 0, 0, "exact", False, True, 30, 0.25)
    out = coca_decode.launch(call, Cut(rows, 16, 4, 2), splits=2)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16), window=30)
    assert (out - truth).abs().max() <= 1e-5


@pytest.mark.parametrize(("h", "g", "d"), [(1, 1, 8), (6, 2, 128), (8, 1, 64), (3, 3, 6), (2, 1, 96)])
@pytest.mark.parametrize(("n", "rotary"), [(1, True), (1, False), (20, True)])
def test_groups_and_widths(h: int, g: int, d: int, n: int, rotary: bool) -> None:
    check(n, 40, form="slack", dtype=torch.bfloat16, rotary=Rotary(d) if rotary else None, h=h, g=g, d=d)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.float16, 3e-3)], ids=str)
def test_far_positions_lose_nothing(form: str, n: int, dtype: torch.dtype, limit: float) -> None:
    """At 131 072 and far beyond, where float32 angles are noise."""
    q, t, v = inputs(n, 80, h=2, g=1, d=64, dtype=dtype)
    for start in (131_072 - 80, 2**31 - 1000):
        options: dict[str, Any] = {"rotary": Rotary(64), "form": form, "positions": start}
        out = coca_attention(q, t, v, **options, backend="triton")
        assert (out - coca_attention_reference(q.double(), t.double(), v.double(), **options)).abs().max() <= limit


@pytest.mark.parametrize("scaling", [NTK(4), YaRN(4, 32), DynamicNTK(4, 20), DynamicNTK(4, 20, "per_request")], ids=str)
@pytest.mark.parametrize("n", [1, 30])
def test_scaling_laws(scaling: Any, n: int) -> None:
    q, t, v = inputs(n, 50, h=2, g=1, d=16)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16, scaling=scaling))
    out = coca_attention(q, t, v, rotary=Rotary(16, scaling=scaling), backend="triton")
    assert (out - truth).abs().max() <= 1e-5


def options_by_name(b: int, n: int, m: int) -> dict[str, dict[str, Any]]:
    ragged = (torch.arange(m)[None] >= torch.arange(b)[:, None] * (m // 3)).to(DEVICE)
    spread = (torch.arange(m) * 3 + 1 + torch.arange(b)[:, None]).to(DEVICE)
    queries = (torch.arange(n) * 2 + 7)[None].to(DEVICE)
    return {
        "bidirectional": {"causal": False},
        "window": {"window": 7},
        "window beyond all": {"window": 2 * m},
        "bidirectional window": {"causal": False, "window": 9},
        "left padding": {"padding_mask": ragged},
        "padding and window": {"padding_mask": ragged.flip(1), "window": 20},
        "a row of padding": {"padding_mask": (torch.arange(b, device=DEVICE) > 0)[:, None].expand(b, m)},
        "positions a row": {"positions": spread, "window": 20},
        "free positions": {"positions": (queries, spread)},
        "free positions, bidirectional window": {"positions": (queries, spread), "window": 30, "causal": False},
        "scale": {"scale": 0.01},
    }


@pytest.mark.parametrize("name", list(options_by_name(1, 1, 1)))
@pytest.mark.parametrize(("n", "m"), [(1, 70), (20, 40)])
def test_every_way_to_hide_keys(name: str, n: int, m: int) -> None:
    q, t, v = inputs(n, m, b=2, h=2, g=1, d=16)
    law = DynamicNTK(4, 20) if n == 1 else None
    options = {"rotary": Rotary(16, scaling=law), "form": "slack", **options_by_name(2, n, m)[name]}
    truth = coca_attention_reference(q.double(), t.double(), v.double(), **options)
    out = coca_attention(q, t, v, **options, backend="triton")
    assert (out - truth).abs().max() <= 2e-5


def test_hidden_keys_may_hold_anything() -> None:
    q, t, v = inputs(1, 12)
    alone = coca_attention(q, t[:, :, 4:], v[:, :, 4:], rotary=Rotary(8), positions=4, backend="triton")
    t[:, :, :4], v[:, :, :4] = torch.nan, torch.nan
    keep = torch.arange(12, device=DEVICE)[None] >= 4
    padded = coca_attention(q, t, v, rotary=Rotary(8), padding_mask=keep, backend="triton")
    assert torch.allclose(padded, alone, atol=1e-6)


def test_strided_inputs() -> None:
    q, t, v = inputs(5, 40, d=16)
    want = coca_attention(q, t, v, rotary=Rotary(16), backend="triton")
    folded = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, t, v)]
    scattered = [torch.stack((x, x), dim=-1)[..., 0] for x in (q, t, v)]
    for other in (folded, scattered):
        assert torch.equal(coca_attention(*other, rotary=Rotary(16), backend="triton"), want)


@pytest.mark.parametrize("size", [1.0, 300.0, 1000.0])
def test_float16_does_not_overflow_where_squares_would(size: float) -> None:
    q, t, v = inputs(1, 40, h=4, g=2, d=16)
    q, t, v = (q * size).half(), (t / size**2).half(), v.half()
    out = coca_attention(q, t, v, rotary=Rotary(16), backend="triton")
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16))
    assert out.isfinite().all()
    assert (out.double() - truth).abs().max() <= 2e-3


@pytest.mark.parametrize("form", ["exact", "slack"])
@pytest.mark.parametrize("n", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scales_stay_finite(dtype: torch.dtype, n: int, form: str) -> None:
    """One query, a few and many: each has a kernel."""
    q, t, v = (x.to(dtype) for x in inputs(n, 70, d=16))
    for backend in ("triton", "sdpa"):
        out = coca_attention(q * 16, t * 16, v, rotary=Rotary(16), form=form, backend=backend)
        assert out.isfinite().all()


@pytest.mark.parametrize("form", ["exact", "slack"])
def test_gradients_of_large_scales_stay_finite(form: str) -> None:
    q, t, v = (x.bfloat16().requires_grad_() for x in inputs(33, 33, d=16))
    out = coca_attention(q * 16, t * 16, v, rotary=Rotary(16), form=form, backend="triton")
    grads = torch.autograd.grad(out.float().square().sum(), (q, t, v))
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads)


def test_splits_of_many_queries_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coca_decode, "choose_splits", lambda *arguments: 2)
    q, t, v = inputs(33, 64, h=1, g=1, d=16)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16))
    assert (half_width_attention(q, t, v, rotary=Rotary(16)) - truth).abs().max() <= 1e-5


@pytest.mark.parametrize(("h", "n"), [(1, 1), (2, 1), (2, 70)])  # of each kernel
def test_large_scores_do_not_blur_what_splits_weigh(h: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores are alike, some 3 000: results are the mean of values, which splits of unequal size tell apart."""
    monkeypatch.setattr(coca_decode, "choose_splits", lambda *arguments: 2)
    m, d = 170, 16
    q, t = torch.full((1, h, n, d), 28.0, device=DEVICE), torch.ones(1, 1, m, d // 2, device=DEVICE)
    v = (torch.arange(m, device=DEVICE) < 70).float()[None, None, :, None].repeat(1, 1, 1, d)
    out = half_width_attention(q, t, v, rotary=None, causal=False)
    assert (out - 70 / m).abs().max() <= 1e-6


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter lets a kernel be changed")
@pytest.mark.parametrize(("anchor", "drift"), [(1, 1.05), (4, 1.0)])
@pytest.mark.parametrize(
    ("n", "cut", "turn"), [(1, Cut(1, 16, 1, 1), 3), (2, Cut(8, 16, 4, 1), 2), (40, Cut(64, 16, 4, 1), 3)]
)
def test_angles_start_afresh_after_some_tiles(
    n: int, cut: Cut, turn: int, anchor: int, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn from tile to tile that is too long by `drift` shows nowhere once it is replaced by the angle itself."""
    import triton.language as tl

    calls = iter(range(100))

    def cos_sin(phase: Any) -> list[Any]:  # number `turn` is the turn by a tile
        return [x * drift if number == turn else x for number in [next(calls)] for x in angles(phase)]

    class Turning:
        """A kernel that turns in float32 too, so that nothing else is rounded."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: self.kernel[grid](*arguments, **{**options, "DIRECT": False})

    angles = coca_decode.cos_sin
    monkeypatch.setattr(coca_decode, "ANCHOR", tl.constexpr(anchor))
    monkeypatch.setattr(coca_decode, "cos_sin", cos_sin)
    for name in ("prefill_kernel", "few_queries_kernel", "one_query_kernel"):
        monkeypatch.setattr(coca_decode, name, Turning(getattr(coca_decode, name)))
    q, t, v = inputs(n, 150, h=1, g=1, d=8)
    step = rotary_steps(Rotary(8), None, q.device)
    call = DecodeCall(q, t, v, step, None, None, None, None, None, 1000, 0, "exact", False, True, None, 0.5)
    out = coca_decode.launch(call, cut, splits=1)
    wide = [x.double() for x in (q, t, v)]
    truth = coca_attention_reference(*wide, rotary=Rotary(8), positions=1000, scale=0.5)
    assert (out - truth).abs().max() <= 1e-5
