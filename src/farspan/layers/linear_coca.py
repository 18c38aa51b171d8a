"""Linear CoCA as a layer. Experimental."""

from typing import Any

from torch import Tensor

from farspan.errors import require
from farspan.layers.linear import LinearAttention
from farspan.layers.spec import AttentionSpec
from farspan.ops import linear_coca_attention


class LinearCocaAttention(LinearAttention):
    """CoCA's factors ‖q_j‖² and t_j as the weights of a linear attention (experimental, not in either paper).

    The projections are exact CoCA's: `t_proj` gives d/2 a key head, kept ≥ 0 by `coca_activation`.

    Args:
        nope: leave the angles out.
        options: those of :class:`Attention`; `rotary` must have fixed frequencies (no dynamic NTK).

    >>> import torch
    >>> from farspan.layers import StateCache
    >>> layer, cache = LinearCocaAttention(32, 4, num_key_heads=2), StateCache()
    >>> x = torch.randn(1, 10, 32)
    >>> whole = layer(x)
    >>> pieces = torch.cat([layer(piece, cache=cache) for piece in x.split(4, dim=1)], dim=1)
    >>> torch.allclose(whole, pieces, atol=1e-6), cache.get_seq_length(), cache.nbytes
    (True, 10, 568)
    """

    def __init__(self, hidden_size: int, num_heads: int, *, nope: bool = False, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, AttentionSpec("linear-coca", None, None, not nope), **options)
        require(
            self.rotary is None or not self.rotary.is_dynamic,
            "rotary must have fixed frequencies in a linear layer, got dynamic NTK: sums cannot be turned again; "
            "use NTK or Linear",
        )

    def op(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return linear_coca_attention(q, k, v, rotary=self.rotary, **options)
