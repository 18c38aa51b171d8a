"""t in eight bits: how far codes are from t, and that the kernels compute what the codes stand for."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import (
    DynamicNTK,
    Rotary,
    dequantize_t,
    half_width_attention,
    half_width_attention_reference,
    quantize_t,
)
from tests.ops.kernels import DEVICE, FORMS, assert_as_good_as_eager, inputs, poison  # noqa: F401 (a fixture)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KEYS = 100


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(2, 3, 40, 32), (7, 2, 16, 8), (1, 1, 1, 1)], ids=str)  # the second in pages
def test_codes_are_within_half_a_scale(dtype: torch.dtype, size: float, shape: tuple[int, ...]) -> None:
    t = (size * torch.randn(shape, device=DEVICE)).relu().to(dtype)
    t[0, 0, 0] = 0
    codes, t_scale = quantize_t(t)
    assert (codes.dtype, t_scale.dtype) == (torch.uint8, torch.float32)
    assert (codes.shape, t_scale.shape) == (t.shape, t.shape[:-1])
    error = (dequantize_t(codes, t_scale, torch.float64) - t.double()).abs()
    assert (error <= t_scale.double()[..., None] / 2 * (1 + 4e-5)).all()  # up to 255 scales are divided in float32
    assert ((codes.amax(-1) == 255) == (t.amax(-1) > 0)).all()  # nothing of the range is left unused
    assert (codes[t == 0] == 0).all()
    assert t_scale[0, 0, 0] == 0
    assert (dequantize_t(codes, t_scale, dtype)[0, 0, 0] == 0).all()


def test_quantizing_compiles_and_cuts_off_what_it_cannot_look_at() -> None:
    t = torch.tensor([[-1.0, 0.25, 0.5], [-3.0, -1.0, -2.0]], device=DEVICE)
    codes, t_scale = torch.compile(quantize_t, fullgraph=True, backend="aot_eager")(t)
    want = quantize_t(t.relu())
    assert torch.equal(codes, want[0])
    assert torch.equal(t_scale, want[1])


def test_no_gradient_passes_through_codes() -> None:
    t_scale = quantize_t(torch.ones(2, 3, requires_grad=True))[1]
    assert not t_scale.requires_grad


@pytest.mark.skipif(DEVICE != "cpu", reason="a look at values on a GPU would stall the stream")
def test_negative_t_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"t must not be negative, got -0.5; CoCA's t comes from a ReLU"):
        quantize_t(torch.tensor([[1.0, -0.5]]))


@pytest.mark.parametrize(
    ("t", "message"),
    [
        (torch.ones(2, 3, dtype=torch.uint8), "t must be floating-point, got torch.uint8; codes are made from t"),
        (torch.ones(2, 0), r"t must hold coefficients along its last axis, got \(2, 0\)"),
        (torch.tensor(1.0), r"t must hold coefficients along its last axis, got \(\)"),
    ],
)
def test_what_has_no_codes_is_refused(t: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_t(t)


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    def moved(x: Any) -> Any:
        return tuple(map(moved, x)) if isinstance(x, tuple) else x.to(DEVICE) if isinstance(x, Tensor) else x

    return {name: moved(value) for name, value in options.items()}


def options_by_name(n: int) -> dict[str, dict[str, Any]]:
    key = 3 * torch.arange(KEYS)[None] + torch.tensor([[0], [40_000]])
    return {
        "plain": {},
        "far": {"first": 2**20},
        "window": {"window": 33},
        "bidirectional window": {"causal": False, "window": 40},
        "padding": {"padding_mask": torch.arange(KEYS)[None] >= torch.tensor([[0], [47]])},
        "positions": {"positions": (key[:, -n:] + 5, key)},
        "lengths": {"lengths": torch.tensor([KEYS, 41])},
        "lengths, first, window": {"lengths": torch.tensor([65, 40]), "first": torch.tensor([5, 1000]), "window": 30},
        "per_query NTK": {"rotary": Rotary(32, scaling=DynamicNTK(4, 50))},
        "per_query NTK, lengths": {
            "rotary": Rotary(32, scaling=DynamicNTK(4, 50)),
            "lengths": torch.tensor([KEYS, 53]),
        },
        "NoPE": {"rotary": None},
        "scale": {"scale": 0.01},
    }


def compare(q: Tensor, t: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Of codes: what the kernel gives, the equations in float64, and these with the kernel's error on plain t."""
    codes, t_scale = quantize_t(t)
    wide = (q.double(), v.double())
    truth = half_width_attention_reference(wide[0], t.double(), wide[1], **options)
    coded = half_width_attention_reference(wide[0], codes, wide[1], t_scale=t_scale, **options)
    plain = half_width_attention(q, t, v, **options)
    return half_width_attention(q, codes, v, t_scale=t_scale, **options), coded, coded + plain.double() - truth


CALLS = [
    (name, h, n, dtype)
    for i, (h, n) in enumerate([(1, 1), (4, 1), (8, 1), (4, 3), (2, 20)])
    for j, name in enumerate(options_by_name(1))
    for dtype in (DTYPES if name == "plain" else [DTYPES[(i + j) % 3]])  # each option meets each dtype
]


@pytest.mark.parametrize(("name", "h", "n", "dtype"), CALLS, ids=str)
def test_codes_cost_a_kernel_nothing_beyond_quantizing(name: str, h: int, n: int, dtype: torch.dtype) -> None:
    """One query, groups of four and eight, several tokens and many: against what the codes stand for, in float64."""
    q, t, v = inputs(n, KEYS, b=2, h=h, g=1, d=32, dtype=dtype)
    t[:, :, 60:63] = 0
    options = {"rotary": Rotary(32), "form": FORMS[(h + n + len(name)) % 2], **options_by_name(n)[name]}
    assert_as_good_as_eager(*compare(q, t, v, on_device(options)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_one_query_a_key_head_rounds_its_result_alone(form: str, dtype: torch.dtype, splits: int) -> None:
    q, t, v = inputs(1, KEYS, b=2, h=2, g=2, d=32, dtype=dtype)
    out, truth, _ = compare(q, t, v, {"rotary": Rotary(32), "form": form, "splits": splits})
    assert float((out - truth).abs().max()) <= max(float(truth.abs().max()) * torch.finfo(dtype).eps, 4e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_takes_codes_for_code_times_scale(form: str) -> None:
    q, t, v = inputs(5, 20, b=2, d=16, dtype=torch.float64)
    codes, t_scale = quantize_t(t)
    got = half_width_attention_reference(q, codes, v, rotary=Rotary(16), form=form, t_scale=t_scale)
    meant = torch.stack([codes.double()[..., j] * t_scale.double() for j in range(8)], dim=-1)
    assert torch.equal(got, half_width_attention_reference(q, meant, v, rotary=Rotary(16), form=form))
    assert 1e-5 < (got - half_width_attention_reference(q, t, v, rotary=Rotary(16), form=form)).abs().max() < 0.1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [64, 128])
def test_quantizing_moves_attention_about_as_far_as_rounding_t_to_bfloat16(form: str, d: int) -> None:
    """docs/math.md: both about half a percent of drawn numbers."""
    q, t, v = inputs(4, 512, b=2, h=8, g=8, d=d)
    codes, t_scale = quantize_t(t)
    far = []
    for held in (t, dequantize_t(codes, t_scale, torch.float64), t.bfloat16()):
        wide = (x.double() for x in (q, held, v))
        far.append(half_width_attention_reference(*wide, rotary=Rotary(d), form=form))
    by_codes, by_rounding = ((x - far[0]).norm() / far[0].norm() for x in far[1:])
    assert 1e-3 <= by_codes <= 1e-2
    assert by_codes <= 2 * by_rounding


@pytest.mark.parametrize("n", [1, 3, 20])
def test_pages_of_codes_give_what_one_piece_gives(n: int) -> None:
    page, blocks = 16, 4
    q, t, v = inputs(n, page * blocks, b=2, h=4, g=2, d=16, dtype=torch.float16)
    table = torch.randperm(2 * blocks + 3, device=DEVICE)[: 2 * blocks].reshape(2, blocks)
    t_pages, v_pages = (x.new_full((2 * blocks + 3, 2, page, x.shape[-1]), torch.nan) for x in (t, v))
    t_pages = t_pages.nan_to_num(1e4)  # codes that no row holds
    for whole, pages in ((t, t_pages), (v, v_pages)):
        pages[table.flatten()] = whole.unflatten(2, (blocks, page)).transpose(1, 2).flatten(0, 1)
    codes, t_scale = quantize_t(t_pages)
    t_scale[[i for i in range(len(t_scale)) if i not in table]] = torch.nan
    options: dict[str, Any] = {"rotary": Rotary(16), "lengths": torch.tensor([64, 41], device=DEVICE)}
    pages_options = {"block_table": table.int(), "t_scale": t_scale, **options}
    paged = half_width_attention(q, codes, v_pages, **pages_options)
    whole_codes, whole_scale = quantize_t(t)
    assert (paged - half_width_attention(q, whole_codes, v, t_scale=whole_scale, **options)).abs().max() <= 1e-6
    truth = half_width_attention_reference(q.double(), codes, v_pages.double(), **pages_options)
    assert (paged - truth).abs().max() <= 4e-3


@pytest.mark.parametrize(("h", "n"), [(1, 1), (4, 1), (2, 40)])  # of each kernel
def test_codes_and_scales_may_lie_anywhere(h: int, n: int) -> None:
    q, t, v = inputs(n, 50, b=2, h=h * 2, g=2, d=32, dtype=torch.float16)
    codes, t_scale = quantize_t(t)
    want = half_width_attention(q, codes, v, rotary=Rotary(32), t_scale=t_scale)
    together = torch.cat((codes, t_scale[..., None].view(torch.uint8)), dim=-1)  # each key's scale after its codes
    by_key = together.transpose(1, 2).contiguous().transpose(1, 2)
    for held in (together, by_key):
        beside = held[..., 16:].view(torch.float32)[..., 0]
        assert not beside.is_contiguous()
        assert torch.equal(half_width_attention(q, held[..., :16], v, rotary=Rotary(32), t_scale=beside), want)
    scattered = torch.stack((codes, codes), dim=-1)[..., 0]
    shared = t_scale[:, :1].expand(-1, 2, -1)
    got = half_width_attention(q, scattered, v, rotary=Rotary(32), t_scale=shared)
    assert torch.equal(got, half_width_attention(q, codes, v, rotary=Rotary(32), t_scale=shared.contiguous()))


@pytest.mark.parametrize(("h", "n"), [(1, 1), (4, 1), (2, 40)])
def test_keys_that_no_query_reads_may_have_any_scale(h: int, n: int) -> None:
    q, t, v = inputs(n, 60, b=2, h=h, g=1, d=16)
    codes, t_scale = quantize_t(t)
    keep = (torch.arange(60, device=DEVICE) >= 7)[None].expand(2, -1)
    options: dict[str, Any] = {"rotary": Rotary(16), "padding_mask": keep}
    options["lengths"] = torch.tensor([60, 50], device=DEVICE)
    want = half_width_attention(q, codes, v, t_scale=t_scale, **options)
    t_scale[:, :, :7], t_scale[1, :, 50:], codes[1, :, 50:] = torch.nan, torch.nan, 255
    assert torch.equal(half_width_attention(q, codes, v, t_scale=t_scale, **options), want)


@pytest.mark.parametrize(("h", "n"), [(1, 1), (2, 1), (2, 40)])
@pytest.mark.parametrize("rotary", [Rotary(16), None], ids=str)
@pytest.mark.parametrize("size", [300.0, 1000.0])
def test_float16_does_not_overflow_where_squares_would(size: float, rotary: Rotary | None, h: int, n: int) -> None:
    q, t, v = inputs(n, 60, h=h, g=1, d=16)
    codes, t_scale = quantize_t(t / size**2)
    q, v = (q * size).half(), v.half()
    out = half_width_attention(q, codes, v, rotary=rotary, t_scale=t_scale)
    truth = half_width_attention_reference(q.double(), codes, v.double(), rotary=rotary, t_scale=t_scale)
    assert out.isfinite().all()
    assert (out.double() - truth).abs().max() <= 2e-3


def test_compiles_in_one_graph() -> None:
    q, t, v = inputs(1, 12, d=16)
    codes, t_scale = quantize_t(t)

    def attention(q: Tensor, codes: Tensor, v: Tensor, t_scale: Tensor) -> Tensor:
        return half_width_attention(q, codes, v, rotary=Rotary(16), t_scale=t_scale)

    got = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, codes, v, t_scale)
    assert torch.allclose(got, attention(q, codes, v, t_scale), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t_scale": None}, "t of torch.uint8 needs its t_scale; pass the one that quantize_t gave with it"),
        ({"t": torch.ones(2, 2, 8, 4)}, "t must be torch.uint8 beside a t_scale, got torch.float32; quantize_t gives"),
        ({"t": torch.ones(2, 2, 8, 4, dtype=torch.int8)}, "t must be torch.uint8 beside a t_scale, got torch.int8"),
        ({"t_scale": torch.ones(2, 2, 8).half()}, r"t_scale must be torch.float32 \(2, 2, 8\), got torch.float16"),
        ({"t_scale": torch.ones(2, 1, 8)}, r"\(2, 2, 8\), got torch.float32 \(2, 1, 8\); quantize_t gives one a key"),
        ({"t_scale": torch.ones(2, 2, 8, device="meta")}, "t_scale must lie where q does, on .*, got meta; move it"),
        ({"v": torch.ones(2, 2, 8, 8).bfloat16()}, "q and v must share a dtype, got torch.float32 and torch.bfloat16"),
    ],
)
def test_bad_codes_are_refused(change: dict[str, Any], message: str) -> None:
    q, t, v = inputs(1, 8, b=2)
    codes, t_scale = quantize_t(t)
    change = {name: x.to(DEVICE) if x is not None and x.device.type == "cpu" else x for name, x in change.items()}
    for op in (half_width_attention, half_width_attention_reference):
        with pytest.raises(ValueError, match=message):
            op(**{"q": q, "t": codes, "v": v, "t_scale": t_scale, "rotary": Rotary(8), **change})


def test_scales_that_want_gradients_are_refused() -> None:
    q, t, v = inputs(1, 8, b=2)
    codes, t_scale = quantize_t(t)
    with pytest.raises(ValueError, match=r"half_width_attention has no gradients; call it under torch.no_grad\(\)"):
        half_width_attention(q, codes, v, rotary=Rotary(8), t_scale=t_scale.requires_grad_())
