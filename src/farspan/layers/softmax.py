"""The softmax layers by name: CoCA, and the baselines RoPE and ALiBi."""

from typing import Any

from farspan.layers.attention import Attention
from farspan.layers.spec import AttentionSpec


class CocaAttention(Attention):
    """Collinear constrained attention in form "exact", "strict" or "slack"; nope=True leaves rotation out.

    >>> import torch
    >>> from farspan.layers import LayerCache
    >>> layer, cache = CocaAttention(32, 4, num_key_heads=2), LayerCache()
    >>> x = torch.randn(1, 10, 32)
    >>> whole = layer(x)
    >>> pieces = torch.cat([layer(piece, cache=cache) for piece in x.split(4, dim=1)], dim=1)
    >>> torch.allclose(whole, pieces, atol=1e-6), cache.keys.shape
    (True, torch.Size([1, 2, 10, 4]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        form: str = "exact",
        window: int | None = None,
        nope: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("coca", form, window, not nope), **options)


class RopeAttention(Attention):
    """Rotary attention (RoFormer, LLaMA); nope=True leaves rotation out.

    >>> import torch
    >>> layer, x = RopeAttention(32, 4, num_key_heads=2, window=3), torch.randn(1, 10, 32)
    >>> out, changed = layer(x), layer(torch.cat((x[:, :1] + 1, x[:, 1:]), dim=1))
    >>> (out != changed).any(-1).nonzero()[:, 1].tolist()  # the tokens that see the first one
    [0, 1, 2]
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, window: int | None = None, nope: bool = False, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("rope", None, window, not nope), **options)


class AlibiAttention(Attention):
    """Attention with linear biases, one fixed slope a head; only distances count.

    >>> import torch
    >>> layer, x = AlibiAttention(32, 4), torch.randn(1, 10, 32)
    >>> layer(x).shape, torch.allclose(layer(x), layer(x, positions=1000), atol=1e-5)
    (torch.Size([1, 10, 32]), True)
    """

    def __init__(self, hidden_size: int, num_heads: int, *, window: int | None = None, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("alibi", None, window), **options)
