"""cosFormer as a layer."""

from typing import Any

from torch import Tensor

from farspan.errors import require, require_choice
from farspan.layers.linear import LinearAttention
from farspan.layers.spec import AttentionSpec
from farspan.ops import cosformer_attention
from farspan.ops.cosformer.weights import ACTIVATIONS, BEYOND


class CosformerAttention(LinearAttention):
    """Linear attention with cosine re-weighting.

    Args:
        max_length: M, a constant of the model: where the cosine reaches zero.
        beyond: what happens past M, see :func:`farspan.ops.cosformer_attention`.
        activation: "relu" (the paper) or "elu" (elu + 1).
        nope: leave the re-weighting out (linear attention, the paper's ablation).
        options: those of :class:`Attention`, but `rotary`.

    >>> import torch
    >>> from farspan.layers import StateCache
    >>> layer, cache = CosformerAttention(32, 4, max_length=64, num_key_heads=2), StateCache()
    >>> x = torch.randn(1, 10, 32)
    >>> whole = layer(x)
    >>> pieces = torch.cat([layer(piece, cache=cache) for piece in x.split(4, dim=1)], dim=1)
    >>> torch.allclose(whole, pieces, atol=1e-6), cache.get_seq_length(), cache.nbytes
    (True, 10, 1176)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        max_length: int,
        beyond: str = "raise",
        activation: str = "relu",
        nope: bool = False,
        **options: Any,
    ) -> None:
        require(max_length >= 1, f"max_length must be at least 1, got {max_length}; use the length of training")
        require_choice("beyond", beyond, BEYOND)
        require_choice("activation", activation, ACTIVATIONS)
        super().__init__(hidden_size, num_heads, AttentionSpec("cosformer", None, None, not nope), **options)
        self.rotary = None  # its one frequency is π/2M
        self.max_length, self.beyond, self.activation = max_length, beyond, activation

    def op(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return cosformer_attention(
            q,
            k,
            v,
            max_length=self.max_length,
            beyond=self.beyond,
            activation=self.activation,
            reweight=self.spec.rotary,
            **options,
        )
