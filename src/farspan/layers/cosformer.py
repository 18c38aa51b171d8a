"""cosFormer as a layer: the projections of any attention, and a memory of constant size."""

from typing import Any

from torch import Tensor

from farspan.errors import require, require_choice
from farspan.layers.attention import Attention
from farspan.layers.cache import StateCache
from farspan.layers.spec import AttentionSpec
from farspan.ops import LinearState, cosformer_attention
from farspan.ops.cosformer.kernel import ACTIVATIONS, BEYOND
from farspan.ops.positions import PositionsArgument


class CosformerAttention(Attention):
    """Linear attention with cosine re-weighting.

    Args:
        max_length: M, a constant of the model: where the cosine reaches zero.
        beyond: what happens past M, see :func:`farspan.ops.cosformer_attention`.
        activation: "relu" (the paper) or "elu" (elu + 1).
        nope: leave the re-weighting out (linear attention, the paper's ablation).
        options: those of :class:`Attention`, but `rotary`.

    >>> import torch
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

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: PositionsArgument = None,
        padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
        state: LinearState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, LinearState | None]:
        """The layer's op → (b, h, n, d), and the state after it where asked for."""
        options: dict[str, Any] = {
            "max_length": self.max_length,
            "beyond": self.beyond,
            "activation": self.activation,
            "reweight": self.spec.rotary,
            "causal": self.causal,
            "positions": positions,
            "padding_mask": padding_mask,
            "documents": documents,
            "state": state,
        }
        if return_state:
            return cosformer_attention(q, k, v, return_state=True, **options)
        return cosformer_attention(q, k, v, **options), None

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        cache: StateCache | None = None,
        positions: PositionsArgument = None,
        padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """x (b, n, hidden) → (b, n, hidden). With a cache, positions and masks are those of the n new tokens."""
        out, state = self.mix(
            *self.project(x),
            positions=positions,
            padding_mask=padding_mask,
            documents=documents,
            state=None if cache is None else cache.state,
            return_state=cache is not None,
        )
        if cache is not None and state is not None:
            cache.advance(state, x.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))
