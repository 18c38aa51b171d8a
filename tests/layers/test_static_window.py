"""A static window, whose newest token is always in the last slot, equals a growing one at every step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.cache import LayerCache, StaticWindowCache
from farspan.layers import Attention, AttentionSpec
from farspan.ops.masking import AttentionContext
from farspan.ops.rotary import DynamicNTK, Rotary
from tests.ops.kernels import DEVICE

SPECS = [
    AttentionSpec("rope", window=5),
    AttentionSpec("rope", window=1),
    AttentionSpec("rope", window=6, rotary=False),
    AttentionSpec("alibi", window=5),
    AttentionSpec("coca", "exact", window=5),
    AttentionSpec("coca", "slack", window=4),
    AttentionSpec("coca", "polar", window=5),
    AttentionSpec("pope", window=5),
]
CASES = [*((spec, None) for spec in SPECS), (SPECS[4], Rotary(8, scaling=DynamicNTK(4, 4)))]


def steps(layer: Attention, x: Tensor, sizes: list[int], cache: Any, padding: Tensor | None) -> Tensor:
    """Run pieces of x (b, n, hidden) one after another through a cache."""
    found, seen = [], 0
    for piece in x.split(sizes, dim=1):
        mask = None if padding is None else padding[:, : x.shape[1] if cache.is_compileable else seen + piece.shape[1]]
        context = AttentionContext(
            piece,
            attention_mask=mask,
            past=cache.get_seq_length(),
            cached=True,
            static=cache.is_compileable,
            has_windows=True,
        )
        found.append(layer(piece, context, cache))
        seen += piece.shape[1]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(("spec", "rotary"), CASES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", [[1] * 12, [2, 1, 1, 3, 1, 4], [9, 1, 1, 1]], ids=str)
@torch.no_grad()
def test_a_static_window_equals_a_growing_one(
    spec: AttentionSpec, rotary: Rotary | None, padded: bool, sizes: list[int]
) -> None:
    layer = Attention(32, 4, spec, rotary=rotary, num_key_heads=2).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    padding = None
    if padded:
        padding = torch.ones(2, 12, dtype=torch.long)
        padding[0, :2] = 0
    growing = steps(layer, x, sizes, LayerCache(spec.window), padding)
    cache = StaticWindowCache(spec.window or 0)
    for _ in range(2):  # the second time in the storage of the first
        found = steps(layer, x, sizes, cache, padding)
        real = slice(None) if padding is None else padding.bool()
        assert (found[real] - growing[real]).abs().max() <= 1e-12
        storage = cache.keys
        cache.reset()
    assert cache.keys is storage


@pytest.mark.parametrize("seen", [0, 2, 9])
@pytest.mark.parametrize("n", [1, 3])
def test_the_kernel_takes_the_mask_of_a_static_window(seen: int, n: int) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    from farspan.ops import rope_attention

    window, device = 5, torch.device(DEVICE)
    context = AttentionContext(torch.zeros(2, n, 1, device=device), past=torch.tensor(seen), cached=True, static=True)
    length, past = window - 1 + n, torch.tensor(seen, device=device)
    mask = context.mask(window, past=past, length=length, offset=past - (window - 1))
    q, k, v = (torch.randn(2, heads, size, 8, device=device) for heads, size in ((4, n), (2, length), (2, length)))
    ours, theirs = (rope_attention(q, k, v, rotary=None, mask=mask, backend=name) for name in ("triton", "sdpa"))
    assert (ours - theirs).abs().max() <= 1e-5
    assert mask.padding is not None
    assert mask.padding.sum() == min(seen, window - 1) + n
