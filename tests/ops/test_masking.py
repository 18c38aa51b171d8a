"""AttentionMask: its parts are those of the whole mask, ops take it in place of keywords, and padding stays out."""

from typing import Any

import pytest
import torch

from farspan.ops import AttentionMask, DynamicNTK, Rotary, coca_attention
from farspan.ops.masking import make_mask
from farspan.ops.reference import visible
from tests.ops.cases import LINEAR, of_heads, ways
from tests.ops.cases import OPS as ALL
from tests.ops.cases import inputs as leaves_of

CPU = torch.device("cpu")
B, M = 3, 12
NTK = "coca, per_query NTK"
OPS = {name: (op, of_heads(options, 4)) for name, (op, options) in ALL.items()}
OPS[NTK] = coca_attention, {"rotary": Rotary(8, scaling=DynamicNTK(4, 5))}
FOR_LINEAR = ("causal", "bidirectional", "left padding", "documents", "rows of positions")
"""Kinds of masks for linear ops, which have no window and are slow."""
KINDS = list(ways(1, 1))


def inputs(name: str, n: int) -> tuple[torch.Tensor, ...]:
    return leaves_of("exact" if name == NTK else name, n, M, b=B)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in OPS for kind in KINDS if name not in LINEAR or kind in FOR_LINEAR]
)
def test_a_ready_mask_equals_the_keywords(name: str, kind: str) -> None:
    op, options = OPS[name]
    for n in (5, 1):
        keywords = ways(n, M)[kind]
        leaves = inputs(name, n)
        mask = make_mask(n, M, B, CPU, **keywords)
        weights = torch.randn(B, 4, n, 8, dtype=torch.float64)
        results = []
        for how in (keywords, {"mask": mask}, {"mask": mask}):  # the second time from what the mask has kept
            out = op(*leaves, **options, **how)
            with torch.no_grad():
                plain = op(*leaves, **options, **how)  # one query of CoCA is decoded
            results.append((out, plain, *torch.autograd.grad(out, leaves, weights)))
        for found in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
        if kind not in ("causal", "shifted", "gaps") and n > 1:
            assert not torch.equal(results[0][0], op(*leaves, **options))


@pytest.mark.parametrize("kind", ["causal", "rows of positions", "window"])
def test_one_mask_serves_every_op_rotary_and_dtype(kind: str) -> None:
    """What layers keep in a mask must not be read by a layer that needs something else."""
    for n in (5, 1):
        keywords = ways(n, M)[kind]
        shared = make_mask(n, M, B, CPU, **keywords)
        for dtype in (torch.float32, torch.float64):
            for name, (op, options) in OPS.items():
                if name in LINEAR and "window" in keywords:
                    continue
                given = [x.detach().to(dtype) for x in inputs(name, n)]
                fresh = make_mask(n, M, B, CPU, **keywords)
                assert torch.equal(op(*given, **options, mask=shared), op(*given, **options, mask=fresh))


@pytest.mark.parametrize("name", OPS)
def test_a_mask_of_another_size_raises(name: str) -> None:
    op, options = OPS[name]
    given = inputs(name, 5)
    for n, m, b, padding in ((4, M, 1, None), (5, M - 1, 1, None), (5, M, 2, torch.arange(M).expand(2, M) > 1)):
        message = f"mask is for {b} × {n} queries and {m} keys, got {B} × 5 and {M}; make it for"
        with pytest.raises(ValueError, match=message):
            op(*given, **options, mask=make_mask(n, m, b, CPU, padding_mask=padding))


@pytest.mark.parametrize("name", ["exact", "alibi", "raise", "linear coca"])
def test_a_mask_and_what_it_replaces_raise(name: str) -> None:
    op, options = OPS[name]
    for given in ({"positions": 3}, {"causal": False}, {"padding_mask": torch.ones(B, M).bool()}, {"unknown": 3}):
        with pytest.raises(ValueError, match=r"mask replaces positions, .* and documents, got both; give one"):
            op(*inputs(name, 5), **options, mask=make_mask(5, M, B, CPU), **given)
    op(*inputs(name, 5), **options, mask=make_mask(5, M, B, CPU), causal=True, positions=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [M, 5, 1])
def test_blocks_and_parts_are_those_of_the_whole_mask(kind: str, n: int) -> None:
    mask = make_mask(n, M, B, CPU, **ways(n, M)[kind])
    whole = visible(mask).expand(B, 1, n, M)
    for start, stop in ((0, n), (0, 1), (n // 2, n)):
        low, high = mask.key_range(start, stop)
        outside = whole[:, :, start:stop].clone()
        outside[..., low:high] = False
        assert not outside.any()
        assert torch.equal(mask.block(start, stop, low, high).expand(B, -1, -1, -1), whole[:, :, start:stop, low:high])
        part = mask.part(start, stop)
        assert (part.n, part.m) == (stop - start, visible(part).shape[-1])
        assert torch.equal(visible(part).expand(B, -1, -1, -1), whole[:, :, start:stop, : part.m])
        assert not whole[:, :, start:stop, part.m :].any()
        assert torch.equal(part.query_positions, mask.query_positions[:, start:stop])
        assert torch.equal(part.key_positions, mask.key_positions[:, : part.m])
        behind = mask.query_positions[:, start:stop, None] - mask.key_positions[:, None, low:high]
        assert torch.equal(mask.distance(start, stop, low, high), behind)
    if mask.shows_everything:
        assert whole.all()
    if mask.is_triangle:
        assert torch.equal(whole[0, 0], torch.ones(n, M).tril(M - n).bool())


def test_what_a_mask_knows_of_itself() -> None:
    def mask(n: int, **options: Any) -> AttentionMask:
        return make_mask(n, M, 1, CPU, **options)

    assert mask(5).is_triangle
    assert not mask(5).shows_everything
    assert mask(1).shows_everything
    assert mask(5, causal=False).shows_everything
    assert mask(5, window=M).is_triangle
    assert not mask(5, window=M - 1).is_triangle
    assert not mask(1, positions=(torch.arange(1), torch.arange(M))).shows_everything
    hides_nothing = mask(5, padding_mask=torch.ones(1, M, dtype=torch.bool))
    assert hides_nothing.padding is None
    assert hides_nothing.is_triangle
    assert not mask(5, padding_mask=torch.arange(M)[None] > 0).is_plain


PADDED = {
    "left": torch.arange(M)[None] >= torch.tensor([[3], [0], [M]]),
    "right": torch.arange(M)[None] < torch.tensor([[M], [8], [1]]),
    "holes": (torch.arange(M)[None] % 3 != torch.tensor([[0], [1], [2]])),
}
"""Padding of three rows; one of them has none, or nothing else."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in OPS
        for kind in ("causal", "bidirectional", "window", "documents", "pair")
        if "nope" not in name and (name not in LINEAR or kind not in ("window", "pair"))
    ],
)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_padding_holds_reaches_no_output_and_no_gradient(name: str, kind: str, value: float) -> None:
    op, options = OPS[name]
    for n, side, backend in ((M, "left", "auto"), (1, "holes", "auto"), (5, "right", "reference")):
        keywords = {**options, **ways(n, M)[kind], "padding_mask": PADDED[side], "backend": backend}
        hidden = ~PADDED[side][:, None, :, None]
        q, k, v = inputs(name, n)
        weights, results = torch.randn(B, 4, n, 8, dtype=torch.float64), []
        for fill in (0.0, value):
            leaves = [q, *(x.detach().masked_fill(hidden, fill).requires_grad_() for x in (k, v))]
            out = op(*leaves, **keywords)
            with torch.no_grad():
                plain = op(*leaves, **keywords)  # one query of CoCA is decoded
            results.append((out, plain, *torch.autograd.grad(out, leaves, weights)))
        for clean, dirty in zip(*results, strict=True):
            assert dirty.isfinite().all()
            assert torch.equal(clean, dirty)
        assert all((gradient.masked_fill(~hidden, 0.0) == 0).all() for gradient in results[1][3:])


@pytest.mark.parametrize("form", ["exact", "slack"])
def test_what_padding_holds_does_not_set_the_range_of_float16(form: str) -> None:
    q, t, v = (x.detach().half() for x in inputs("exact", 5))
    hidden = ~PADDED["left"][:, None, :, None]
    options: dict[str, Any] = {"rotary": Rotary(8), "form": form, "padding_mask": PADDED["left"], "backend": "sdpa"}
    clean, dirty = (coca_attention(q, t.masked_fill(hidden, fill), v, **options) for fill in (0.0, 6e4))
    assert torch.equal(clean, dirty)
