"""Attention layers that share weights and differ in who computes the attention: this library, SDPA's kernels, Flex."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.benchmark.attention import published_coca
from farspan.layers import Attention
from farspan.ops import alibi_slopes, coca_features
from farspan.ops.masking import make_mask
from farspan.ops.reference import repeat_heads

FAMILIES = ("rope", "coca-exact", "coca-slack", "coca-strict", "alibi")
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WITH_KERNEL = ("rope", "coca-exact", "coca-slack")
"""Families timed on each of SDPA's kernels by name as well, so that no ratio hangs on which one SDPA picks."""
SCORES = 2**31
"""The most N×N scores for which the published formulation is run."""
UNROLLED = 4096
"""Tokens beyond which our ALiBi is left out: it goes block by block, which torch.compile would unroll for minutes."""


class Shape(NamedTuple):
    """b texts of n tokens, `hidden` wide, h query heads on g key heads."""

    b: int
    n: int
    hidden: int
    h: int
    g: int

    @property
    def d(self) -> int:
        return self.hidden // self.h


class Peer(Attention):
    """An attention layer with the library's projections and another's attention: core(layer, q, k or t, v)."""

    def __init__(
        self, shape: Shape, family: str, core: Callable[[Attention, Tensor, Tensor, Tensor], Tensor], **options: Any
    ) -> None:
        super().__init__(shape.hidden, shape.h, family, num_key_heads=shape.g, **options)
        self.core = core

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out = self.core(self, *self.project(x))
        return self.o_proj(out.transpose(1, 2).flatten(2))


def contestants(shape: Shape, device: str) -> tuple[dict[str, Attention], dict[str, str]]:
    """Layers by name, their family before the comma, and of those left out, why. A family's weights are the same."""
    options: dict[str, Any] = {"num_key_heads": shape.g}
    layers: dict[str, Attention] = {
        family: Attention(shape.hidden, shape.h, family, **options)
        for family in FAMILIES
        if family != "alibi" or shape.n <= UNROLLED
    }
    missing = (
        {}
        if "alibi" in layers
        else {"alibi": f"its blocks would be unrolled by torch.compile beyond {UNROLLED} tokens"}
    )
    for kernel, backend in KERNELS.items():
        layers |= {f"{family}, {kernel}": Peer(shape, family, through_sdpa(backend)) for family in WITH_KERNEL}
    if device == "cuda":
        layers |= {name: Peer(shape, family_of(name), core) for name, core in OTHERWISE.items()}
    for family in ("rope", "alibi"):
        layers[f"{family}, flex"] = Peer(shape, family, through_flex(shape, device, alibi=family == "alibi"))
    scores = shape.b * shape.h * shape.n**2
    if scores <= SCORES:
        layers["coca-slack, published"] = Peer(shape, "coca-slack", published)
    else:
        missing["coca-slack, published"] = f"{scores:.1e} scores at once, more than {SCORES:.1e}"
    first: dict[str, Attention] = {}
    for name, layer in layers.items():
        layer.load_state_dict(first.setdefault(family_of(name), layer).state_dict())
    return layers, missing


def family_of(name: str) -> str:
    """The function a contestant computes.

    >>> family_of("coca-exact, cudnn")
    'coca-exact'
    """
    return name.split(",")[0]


def through_sdpa(backend: SDPBackend) -> Callable[[Attention, Tensor, Tensor, Tensor], Tensor]:
    """SDPA's kernel of that name and no other, on rotated queries and keys."""

    def core(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(layer, *features(layer, q, k), v)

    return core


def by_torch(layer: Attention, q: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """q̃ and k̃ by plain torch from tables of angles, for torch.compile to fuse."""
    assert layer.rotary is not None
    angles = make_mask(q.shape[2], t.shape[2], q.shape[0], q.device).angles(layer.rotary)
    return sdpa(layer, *coca_features(q, t, angles.query(q.dtype), angles.key(q.dtype), form=layer.form), v)


OTHERWISE = {"coca-exact, plain": by_torch, "coca-slack, plain": by_torch}
"""Families that the library prepares with its kernel, timed without it too."""


def through_flex(shape: Shape, device: str, *, alibi: bool) -> Callable[[Attention, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention with a causal block mask, made once; ALiBi is its score modification."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, shape.n, shape.n, device=device)
    slopes = alibi_slopes(shape.h, device=device)

    def lowered(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[h] * (query - key)

    def core(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = features(layer, q, k)
        out = flex_attention(
            q,
            k,
            v,
            score_mod=lowered if alibi else None,
            block_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.num_heads != layer.num_key_heads,
        )
        assert isinstance(out, Tensor)
        return out

    return core


def published(layer: Attention, q: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """Slack CoCA with all N×N scores, as its authors run it."""
    assert layer.rotary is not None
    return published_coca(q, repeat_heads(t, q.shape[1]), repeat_heads(v, q.shape[1]), layer.rotary)


def sdpa(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to ready keys, on the kernel that is allowed or chosen."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=layer.num_heads != layer.num_key_heads
    )


def features(layer: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Bring q and k into dot-product form, as the library does."""
    return layer.features(q, k, make_mask(q.shape[2], k.shape[2], q.shape[0], q.device), layer.rotary)
