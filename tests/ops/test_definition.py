"""Every op equals its definition, in outputs and gradients: all masks, positions, group sizes, scalings and scales."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.ops import NTK, DynamicNTK, Linear, Rotary, YaRN
from tests.ops.cases import OPS, SOFTMAX, inputs, of_heads, ways

SCALINGS = [Linear(4), NTK(4), YaRN(4, 16), DynamicNTK(4, 7), DynamicNTK(2, 7, "per_request")]


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Any:
    """Let short sequences need several blocks, chunks and segments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farspan.ops.cosformer_chunked.CHUNK", 16)
        patch.setattr("farspan.ops.softmax._window_rows", lambda *_: 8)
        patch.setattr("farspan.ops.softmax.CHUNK", 32)
        patch.setattr("farspan.ops.coca_decode.BLOCK_ELEMENTS", 2**8)
        yield


def differs(kind: str, leaves: tuple[Tensor, ...], **options: Any) -> float:
    """Return the largest difference from the definition: outputs with and without gradients, and the gradients."""
    op, fixed = OPS[kind]
    options = of_heads({**fixed, **options}, leaves[0].shape[1])
    weights, found = torch.randn(*leaves[0].shape[:3], leaves[2].shape[-1], dtype=torch.float64), []
    for backend in ("auto", "reference"):
        out = op(*leaves, **options, backend=backend)
        with torch.no_grad():  # one query of CoCA is decoded
            plain = op(*leaves, **options, backend=backend)
        found.append((out, plain, *torch.autograd.grad(out, leaves, weights)))
    return max(float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in OPS for name in ways(1, 1) if kind in SOFTMAX or "window" not in name]
)
def test_for_every_mask(kind: str, name: str) -> None:
    for n in (25, 5, 1) if kind in SOFTMAX else (25, 5):
        assert differs(kind, inputs(kind, n, 25, b=3), **ways(n, 25)[name]) <= 1e-12, n


@pytest.mark.parametrize("kind", OPS)
def test_for_every_group_size_length_and_width_of_values(kind: str) -> None:
    for n, h, g in ((1, 1, 1), (2, 2, 2), (16, 4, 1), (33, 6, 3)):
        assert differs(kind, inputs(kind, n, n, h=h, g=g)) <= 1e-12, (n, h, g)
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(kind, 20, 20))  # strided
    for width in (4, 12):
        value = torch.cat((v, v), dim=-1)[..., :width]
        for mask in ({"causal": False}, {"window": 7} if kind in SOFTMAX else {}):
            assert differs(kind, tuple(x.requires_grad_() for x in (q, k, value)), **mask) <= 1e-12, (width, mask)


@pytest.mark.parametrize("kind", ["rope", "exact", "slack", "pope"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_for_every_scaling(kind: str, scaling: Any) -> None:
    rotary = Rotary(16 if kind == "pope" else 8, scaling=scaling)
    rows = torch.arange(30) + torch.tensor([[0], [40]])
    cases = [(30, {"causal": False}), (13, {"window": 9}), (13, {"positions": rows}), (1, {}), (1, {"positions": 7})]
    for n, more in cases:
        assert differs(kind, inputs(kind, n, 30, b=2), rotary=rotary, **more) <= 1e-12, (n, more)


@st.composite
def calls(draw: st.DrawFn, kind: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Draw a shape, a mask, positions, a scaling and a scale together."""
    g, times = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    m, b = draw(st.sampled_from([1, 2, 17, 33, 64])), draw(st.integers(1, 3))
    n = draw(st.sampled_from([m, draw(st.integers(1, m))]))
    index, lengths = torch.arange(m), torch.tensor([draw(st.integers(0, m)) for _ in range(b)])[:, None]
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if kind in SOFTMAX:
        options["window"] = draw(st.one_of(st.none(), st.integers(1, 20), st.integers(1, m + 3)))
    padding = draw(st.sampled_from([None, "left", "right", "holes"]))
    if padding is not None:
        holes = (index * 7 + lengths) % 10 < 7
        options["padding_mask"] = {"left": index >= lengths, "right": index < lengths, "holes": holes}[padding]
    positions = draw(st.sampled_from([None, 3, (index * 3) // 2, index - lengths, "pair"]))
    if isinstance(positions, str):
        positions = (index[None, m - n :] + draw(st.integers(0, 3)), index[None])
    elif draw(st.booleans()):
        options["documents"] = (index // draw(st.sampled_from([1, 5, 30, 70]))).expand(b, m)
    options["positions"] = positions
    if kind in ("rope", "exact", "slack", "pope"):
        options["rotary"] = Rotary(16 if kind == "pope" else 8, scaling=draw(st.sampled_from([None, *SCALINGS])))
    return {"n": n, "m": m, "b": b, "h": g * times, "g": g}, options


@pytest.mark.parametrize("kind", OPS)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_for_any_combination(kind: str, data: st.DataObject) -> None:
    shape, options = data.draw(calls(kind))
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farspan.ops.softmax.MASK_ELEMENTS", data.draw(st.sampled_from([1, 400, 2**23])))
        patch.setattr("farspan.ops.cosformer_chunked.ELEMENTS", data.draw(st.sampled_from([1, 2**12, 2**19])))
        assert differs(kind, inputs(kind, **shape), **options) <= 1e-11


@pytest.mark.parametrize("scale", [-300.0, 300.0])
@pytest.mark.parametrize("kind", SOFTMAX)
def test_large_scales_stay_finite(kind: str, scale: float) -> None:
    """Scores of such size leave float32 few digits to compare, but must not overflow."""
    op, fixed = OPS[kind]
    leaves = [x.detach().float().requires_grad_() for x in inputs(kind, 20, 20, h=6)]
    out = op(*leaves, scale=scale, **fixed)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("kind", SOFTMAX)
@given(
    st.one_of(st.sampled_from([0.0, 1e-200, -1e-39, 5e-324]), st.floats(-30, 30)),
    st.sampled_from([(20, {}), (20, {"causal": False}), (5, {}), (1, {})]),
)
@settings(max_examples=6, deadline=None)
def test_for_any_scale(kind: str, scale: float, call: tuple[int, dict[str, Any]]) -> None:
    """SDPA on a CPU takes the largest score before it applies the scale: with a negative one it would overflow."""
    torch.manual_seed(0)  # the same inputs for every scale, so that a failure can be repeated
    (op, fixed), (n, more) = OPS[kind], call
    given_, weights, found = inputs(kind, n, 20, h=6), torch.randn(1, 6, n, 8, dtype=torch.float64), []
    for dtype in (torch.float64, torch.float32):
        for backend in ("reference", "auto"):
            leaves = [x.detach().to(dtype).requires_grad_() for x in given_]
            out = op(*leaves, scale=scale, backend=backend, **fixed, **more)
            with torch.no_grad():
                plain = op(*leaves, scale=scale, backend=backend, **fixed, **more)
            found.append((out.detach(), plain, *torch.autograd.grad(out, leaves, weights.to(dtype))))
    for truth, ours, narrow, ours_narrow in zip(*found, strict=True):
        size = max(1.0, abs(scale), float(truth.abs().max()))
        assert (ours - truth).abs().max() <= 1e-12 * size
        rounding = 4e-6 * size * max(1.0, abs(scale))  # scores have no more digits
        assert (ours_narrow - truth).abs().max() <= 4 * (narrow - truth).abs().max() + rounding
