"""CoCA's half-width kernels, on a GPU or in the interpreter: what they compute, their tiles, and static caches."""

import doctest
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

import farspan.ops.triton.coca_decode
import farspan.ops.triton.coca_features  # noqa: F401 (both make operators of torch)
from farspan.ops import (
    NTK,
    DynamicNTK,
    Rotary,
    YaRN,
    coca_attention,
    coca_attention_reference,
    coca_features,
    device,
)
from farspan.ops.coca_decode import MOST_ROWS
from farspan.ops.masking import AttentionMask, make_mask
from farspan.ops.rotary import fixed_point
from farspan.ops.triton import coca_decode, support
from farspan.ops.triton.coca_decode import Cut, DecodeCall, choose_cut, choose_splits, launch
from tests.ops.kernels import DEVICE, FORMS, assert_as_good_as_eager, inputs, poison  # noqa: F401 (a fixture for every test here)


def eager(q: Tensor, t: Tensor, v: Tensor, *, mask: Tensor, rotary: Rotary | None, form: str) -> Tensor:
    """What anyone would write in the same dtype: q̃, k̃ and weights rounded to it, softmax in float32."""
    q_, k_ = coca_features(q, t, None, None)
    if rotary is not None:
        angles = make_mask(q.shape[2], t.shape[2], q.shape[0], q.device).angles(rotary)
        q_, k_ = coca_features(q, t, angles.query(q.dtype), angles.key(q.dtype), form=form)
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


@pytest.mark.parametrize(
    ("form", "dtype", "n", "m"),
    [
        ("exact", torch.bfloat16, 1, 1),
        ("slack", torch.bfloat16, 1, 63),
        ("exact", torch.bfloat16, 1, 64),
        ("slack", torch.bfloat16, 1, 65),
        ("exact", torch.bfloat16, 1, 257),
        ("exact", torch.bfloat16, 3, 65),
        ("slack", torch.bfloat16, 4, 63),
        ("exact", torch.bfloat16, 65, 257),  # more than eight rows: the feature kernel, then SDPA
        ("slack", torch.float32, 65, 65),
        ("slack", torch.float32, 1, 65),
    ],
    ids=str,
)
def test_kernel_error_is_at_most_twice_that_of_eager(form: str, dtype: torch.dtype, n: int, m: int) -> None:
    check(n, m, form=form, dtype=dtype, rotary=Rotary(64), h=2, g=1, d=64)


PADDING = torch.arange(150)[None] >= torch.tensor([[0], [47]])
SPREAD = 3 * torch.arange(150)[None] + torch.tensor([[0], [40_000]])
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "far": {"positions": 2**20},
    "padding": {"padding_mask": PADDING},
    "right padding": {"padding_mask": PADDING.flip(1)},
    "a row of padding": {"padding_mask": torch.tensor([[False], [True]]).expand(2, 150)},
    "positions per row": {"positions": SPREAD},
    "free positions": {"positions": "free"},
    "scale": {"scale": 0.01},
    "NTK": {"rotary": Rotary(32, scaling=NTK(4))},
    "dynamic NTK": {"rotary": Rotary(32, scaling=DynamicNTK(4, 50))},
    "dynamic NTK per request": {"rotary": Rotary(32, scaling=DynamicNTK(4, 50, "per_request"))},
    "YaRN": {"rotary": Rotary(32, scaling=YaRN(4, 50))},
    "NoPE": {"rotary": None},
}


def options_of(name: str, form: str, n: int) -> dict[str, Any]:
    options = {"rotary": Rotary(32), "form": form, **MASKS[name]}
    if isinstance(options.get("positions"), str):
        options["positions"] = (torch.arange(n)[None] * 2 + 40_300).to(DEVICE), SPREAD.to(DEVICE)
    return {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [(name, FORMS[len(name) % 2], torch.bfloat16) for name in MASKS]
    + [
        ("plain", "slack", torch.bfloat16),
        ("plain", "exact", torch.float32),
        ("positions per row", "slack", torch.float32),
    ],
    ids=str,
)
def test_one_query_per_key_head_rounds_its_result_alone(name: str, form: str, dtype: torch.dtype) -> None:
    q, t, v = inputs(1, 150, b=2, h=2, g=2, d=32, dtype=dtype)
    options = options_of(name, form, 1)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), **options)
    out = coca_attention(q, t, v, **options, backend="triton")
    error, rounding = float((out.double() - truth).abs().max()), float(truth.abs().max()) * torch.finfo(dtype).eps
    assert error <= max(rounding, 4e-6)  # nothing is rounded but the result


@pytest.mark.parametrize(
    ("name", "dtype", "h", "n"),
    [(name, torch.bfloat16, 2, 3) for name in MASKS]
    + [("plain", torch.bfloat16, 4, 1), ("plain", torch.bfloat16, 8, 1), ("padding", torch.bfloat16, 2, 4)]
    + [("plain", torch.float32, 8, 1), ("positions per row", torch.float32, 2, 3), ("NoPE", torch.float32, 4, 1)],
    ids=str,
)
def test_few_queries_err_no_more_than_on_rotated_keys(name: str, dtype: torch.dtype, h: int, n: int) -> None:
    q, t, v = inputs(n, 150, b=2, h=h, g=1, d=32, dtype=dtype)
    options = options_of(name, FORMS[(h + n + len(name)) % 2], n)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), **options)
    out = coca_attention(q, t, v, **options, backend="triton")
    if dtype == torch.float32:  # of which the angles have a bit less
        assert (out - truth).abs().max() <= 4e-6
    else:
        assert_as_good_as_eager(out, truth, coca_attention(q, t, v, **options, backend="sdpa"))


def test_few_queries_and_their_weights_are_not_rounded() -> None:
    """Where t is not rotated either, only the result is."""
    q, t, v = inputs(2, 150, b=2, h=8, g=2, d=32, dtype=torch.bfloat16)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=None)
    out = coca_attention(q, t, v, rotary=None, backend="triton").double()
    assert ((out - truth).abs() <= truth.abs() * torch.finfo(torch.bfloat16).eps / 2 + 1e-4 * truth.abs().max()).all()


@pytest.mark.parametrize(
    ("h", "g", "d", "n", "rotary"),
    [(h, g, d, 1, True) for h, g, d in [(1, 1, 8), (6, 2, 128), (8, 1, 64), (3, 3, 6), (2, 1, 96)]]
    + [(6, 2, 128, 1, False), (3, 3, 6, 1, False), (3, 3, 6, 20, True), (2, 1, 96, 16, True), (8, 1, 64, 20, True)],
)
def test_groups_and_widths(h: int, g: int, d: int, n: int, rotary: bool) -> None:
    check(n, 40, form="slack", dtype=torch.bfloat16, rotary=Rotary(d) if rotary else None, h=h, g=g, d=d)


@pytest.mark.parametrize(("form", "n"), [("exact", 1), ("slack", 4)])
def test_far_positions_lose_nothing(form: str, n: int) -> None:
    """At 131,072 and far beyond, where float32 angles are noise."""
    q, t, v = inputs(n, 80, h=2, g=1, d=64)
    for start in (131_072 - 80, 2**31 - 1000):
        options: dict[str, Any] = {"rotary": Rotary(64), "form": form, "positions": start}
        out = coca_attention(q, t, v, **options, backend="triton")
        assert (out - coca_attention_reference(q.double(), t.double(), v.double(), **options)).abs().max() <= 3e-6


def test_strided_inputs() -> None:
    q, t, v = inputs(4, 40, d=16)
    want = coca_attention(q, t, v, rotary=Rotary(16), backend="triton")
    folded = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, t, v)]
    scattered = [torch.stack((x, x), dim=-1)[..., 0] for x in (q, t, v)]
    for other in (folded, scattered):
        assert torch.equal(coca_attention(*other, rotary=Rotary(16), backend="triton"), want)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_large_scales_stay_finite(form: str) -> None:
    q, t, v = (x.bfloat16().requires_grad_() for x in inputs(33, 33, d=16))
    out = coca_attention(q * 16, t * 16, v, rotary=Rotary(16), form=form, backend="triton")
    grads = torch.autograd.grad(out.float().square().sum(), (q, t, v))
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads)


@pytest.mark.parametrize(("h", "n"), [(1, 1), (2, 1)])  # of each kernel
def test_large_scores_do_not_blur_what_splits_weigh(h: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores are alike, some 3 000: results are the mean of values, which splits of unequal size tell apart."""
    monkeypatch.setattr(coca_decode, "choose_splits", lambda *arguments: 2)
    m, d = 170, 16
    q, t = torch.full((1, h, n, d), 28.0, device=DEVICE), torch.ones(1, 1, m, d // 2, device=DEVICE)
    v = (torch.arange(m, device=DEVICE) < 70).float()[None, None, :, None].repeat(1, 1, 1, d)
    out = coca_attention(q, t, v, rotary=None, backend="triton")
    assert (out - 70 / m).abs().max() <= 1e-6


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter lets a kernel be changed")
@pytest.mark.parametrize(("anchor", "drift"), [(1, 1.05), (4, 1.0)])
@pytest.mark.parametrize(("n", "cut", "step"), [(1, Cut(1, 16, 1, 1), 3), (2, Cut(8, 16, 4, 1), 2)])
def test_angles_start_afresh_after_some_tiles(
    n: int, cut: Cut, step: int, anchor: int, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation from tile to tile that is too long by `drift` shows nowhere once the angle itself replaces it."""
    import triton.language as tl

    calls = iter(range(100))

    def cos_sin(phase: Any) -> list[Any]:  # number `step` is the rotation by a tile
        return [x * drift if number == step else x for number in [next(calls)] for x in angles(phase)]

    class Rotating:
        """A kernel that rotates in float32 too, so that nothing else is rounded."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: self.kernel[grid](*arguments, **{**options, "DIRECT": False})

    angles = coca_decode.cos_sin
    monkeypatch.setattr(coca_decode, "ANCHOR", tl.constexpr(anchor))
    monkeypatch.setattr(coca_decode, "cos_sin", cos_sin)
    for name in ("few_queries_kernel", "one_query_kernel"):
        monkeypatch.setattr(coca_decode, name, Rotating(getattr(coca_decode, name)))
    q, t, v = inputs(n, 150, h=1, g=1, d=8)
    theta = fixed_point(Rotary(8).frequencies())
    call = DecodeCall(q, t, v, theta, None, None, None, None, None, 1000, "exact", 0.5)
    out = coca_decode.launch(call, cut, splits=1)
    wide = [x.double() for x in (q, t, v)]
    truth = coca_attention_reference(*wide, rotary=Rotary(8), positions=1000, scale=0.5)
    assert (out - truth).abs().max() <= 1e-5


def static_mask(n: int, m: int, lengths: torch.Tensor, starts: torch.Tensor) -> AttentionMask:
    """Make the mask of n queries at the end of each row's keys, of which there are `lengths` (b) in m slots."""
    key = starts[:, None] + torch.arange(m, device=lengths.device)
    query = (starts + lengths)[:, None] + torch.arange(-n, 0, device=lengths.device)
    shared: dict[str, Any] = {"positions": (query, key), "lengths": lengths, "firsts": lambda: starts}
    return AttentionMask(n, m, lengths.device, first=None, aligned=False, **shared)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize(
    ("n", "splits", "scaling"),
    [(1, None, NTK(2)), (1, 3, DynamicNTK(4, 16)), (3, 2, None), (4, 1, DynamicNTK(4, 40))],
    ids=str,
)
def test_rows_of_different_lengths_equal_each_row_alone(
    n: int, splits: int | None, scaling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits is not None:
        monkeypatch.setattr(coca_decode, "choose_splits", lambda *arguments: splits)
    q, t, v = inputs(n, 70, b=4, h=2, g=1, d=16)
    lengths = numbers(70, 20, 65, 0).repeat_interleave(2)[::2]  # a column of a table
    written = (torch.arange(70, device=DEVICE) < lengths[:, None])[:, None, :, None]
    rotary = None if scaling is None else Rotary(16, scaling=scaling)
    for form, starts in (("exact", numbers(7).expand(4)), ("slack", numbers(9, 0, 30, 1))):
        mask = static_mask(n, 70, lengths, starts)
        truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=rotary, form=form, mask=mask)
        held = [torch.where(written, x, torch.nan) for x in (t, v)]
        out = coca_attention(q, *held, rotary=rotary, form=form, mask=mask, backend="triton")
        assert (out - truth).abs().max() <= 1e-5
        assert (out[3] == 0).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_queries_before_the_first_key_give_zeros(splits: int) -> None:
    q, t, v = inputs(5, 40, b=2, h=2, d=16)
    step, rest = fixed_point(Rotary(16).frequencies()).to(DEVICE), (None, None, None, None)
    out = launch(DecodeCall(q, t, v, step, numbers(40, 3), *rest, 0, "exact", 0.25), splits=splits)
    assert (out[1, :, :2] == 0).all()
    for got, row, length in ((out[0], 0, 40), (out[1, :, 2:], 1, 3)):
        alone = (x[row : row + 1, :].double() for x in (q[:, :, -length:], t[:, :, :length], v[:, :, :length]))
        assert (got - coca_attention_reference(*alone, rotary=Rotary(16))[0]).abs().max() <= 1e-5


def test_the_start_of_a_row_is_not_cut_to_32_bits() -> None:
    q, t, v = inputs(1, 20, b=2, d=16)
    step, first = fixed_point(Rotary(16).frequencies()).to(DEVICE), numbers(2**31 - 9, 0)
    out = coca_decode.decode_op(q, t, v, step, None, first, None, None, None, 0, "exact", 0.25)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16))  # only distances count
    assert (out - truth).abs().max() <= 1e-5


def test_no_row_reads_beyond_its_cache() -> None:
    q, t, v = inputs(2, 20, b=2, d=16)
    step = fixed_point(Rotary(16).frequencies()).to(DEVICE)
    call = DecodeCall(q, t, v, step, numbers(35, 20), None, None, None, None, 0, "exact", 0.25)
    assert torch.equal(launch(call), launch(call._replace(lengths=None)))


def test_examples_in_the_kernels_run() -> None:
    assert doctest.testmod(sys.modules[choose_splits.__module__]) == (0, 2)
    assert doctest.testmod(support) == (0, 1)


def test_one_query_and_few_get_tiles_of_their_kernels() -> None:
    for rows in range(1, MOST_ROWS + 1):
        for half in (4, 32, 64, 128):
            for dtype in (torch.bfloat16, torch.float32):
                taken = choose_cut(rows, half, 2 * half, dtype).rows
                assert taken == (1 if rows == 1 else MOST_ROWS)


@pytest.mark.parametrize(("release", "sound"), [("12.8", False), ("12.9", True), ("13.0", True)])
def test_few_queries_have_four_warps_where_the_assembler_is_sound(
    release: str, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia import compiler

    def get_ptxas(arch: int) -> SimpleNamespace:  # which tool it is has changed from release to release
        assert arch == 90
        return SimpleNamespace(version=release)

    monkeypatch.setattr(compiler, "get_ptxas", get_ptxas)
    monkeypatch.setattr(device, "assembler", device.assembler.__wrapped__)  # not what was found before
    assert (choose_cut(4, 64, 128, torch.bfloat16).warps == 4) is sound


def test_what_a_choice_asks_of_the_machine_is_a_constant_of_a_graph() -> None:
    def choice(x: Tensor) -> Tensor:
        can = device.has_sound_wgmma() + (device.why_not_triton("cuda") is None) + device.has_autocast("cpu")
        return x + device.is_hopper(None) + can

    x = torch.zeros(2)
    assert torch.equal(torch.compile(choice, fullgraph=True, backend="eager")(x), choice(x))
    assert device.has_autocast._dynamo_marked_constant  # type: ignore[attr-defined]  # which torch 2.13 does not need


def test_splits_grow_with_the_keys_and_stop_when_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Cut(16, 64, 4, 3)
    assert choose_splits(1, 100, cut, 132) == 1
    assert choose_splits(32, 32_768, cut, 132) > choose_splits(256, 32_768, cut, 132) > 1
    assert choose_splits(10**6, 10**6, cut, 132) == 1
    monkeypatch.setattr(coca_decode, "has_sound_wgmma", lambda: True)
    cuts = [choose_cut(4, half, 2 * half, torch.bfloat16) for half in (32, 64)]
    assert [choose_splits(64, 32_768, cut, 132) for cut in cuts] == [8, 4]  # groups of four, eight sequences


def test_operators_pass_torchs_own_check() -> None:
    q, t, _ = (x.requires_grad_() for x in inputs(5, 9, d=16))
    step = fixed_point(Rotary(16).frequencies()).to(q.device)
    folded = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(
        torch.ops.farspan.coca_prepare.default, (folded, t, None, step, None, None, 4, 0, "slack", 1.0)
    )
    q, t, v = inputs(1, 9, d=16)
    rest = (None, None, None, None, None, 0, "exact", 0.25)
    torch.library.opcheck(torch.ops.farspan.half_width_attention.default, (q, t, v, step, *rest))


@pytest.mark.parametrize("gradient", [True, False])
def test_compiles_in_one_graph(gradient: bool) -> None:
    q, t, v = (x.requires_grad_(gradient) for x in inputs(4, 12, d=16))

    def attention(q: Tensor, t: Tensor, v: Tensor) -> Tensor:
        return coca_attention(q, t, v, rotary=Rotary(16), form="slack", backend="triton")

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    want, got = attention(q, t, v), compiled(q, t, v)
    assert torch.allclose(want, got, atol=1e-6)
    if gradient:
        weights = torch.randn_like(want)
        pairs = zip(*(torch.autograd.grad(x, (q, t, v), weights) for x in (want, got)), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
