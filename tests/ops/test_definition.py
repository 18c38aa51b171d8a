"""Every op equals its definition, in outputs and gradients: all masks, positions, group sizes, scalings and scales."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.ops import Rotary
from farspan.ops.masking import make_mask
from tests.helpers import eager
from tests.ops.cases import OPS, SCALINGS, SOFTMAX, calls, inputs, of_heads, ways


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
    ("kind", "name"),
    [(k, name) for k in OPS for name in ways(1, 1) if k in SOFTMAX or not ("window" in name or "pair" in name)],
)
def test_for_every_mask(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query of a group becomes several of its key head, unless many threads would have nothing to do."""
    for n, threads in ((25, 1), (5, 1), (1, 1), (1, 64)) if kind in SOFTMAX else ((25, 1), (5, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert differs(kind, inputs(kind, n, 25, b=3), **ways(n, 25)[name]) <= 1e-12, (n, threads)


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


LOW_PRECISION = [*(("exact", n, n) for n in (64, 257)), *(("slack", n, n) for n in (64, 257)), ("rope", 257, 257)]
LOW_PRECISION += [("alibi", 257, 257), ("exact", 1, 257), ("slack", 1, 257)]


@pytest.mark.parametrize(("kind", "n", "m"), LOW_PRECISION)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_low_precision_error_is_at_most_twice_that_of_eager(kind: str, n: int, m: int, dtype: torch.dtype) -> None:
    op, b = OPS[kind][0], 8 if n == 1 else 1
    q, k, v = (x.to(dtype) for x in inputs(kind, m, m, b=b, g=4, d=32))
    last, options = slice(m - n, None), {} if kind == "alibi" else {"rotary": Rotary(32)}
    if kind in ("exact", "slack"):
        options["form"] = kind
        plain = eager(q, k, v, kind)[:, :, last]
    elif kind == "rope":  # its reference rotates in float32
        angles = make_mask(m, m, 1, q.device).angles(Rotary(32))
        plain = op(angles.rotate_queries(q), angles.rotate_keys(k), v, rotary=None, backend="reference")
    else:
        plain = op(q, k, v, backend="reference")
    truth = op(q[:, :, last].double(), k.double(), v.double(), **options, backend="reference")
    ours, theirs = ((x.double() - truth).abs() for x in (op(q[:, :, last], k, v, **options), plain))
    assert ours.max() <= 2 * theirs.max()
    assert ours.mean() <= 2 * theirs.mean()


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
