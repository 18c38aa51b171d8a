"""Linear attention as a layer: the projections of any attention, and a memory of constant size."""

from typing import Any

from torch import Tensor

from farspan.layers.attention import Attention
from farspan.layers.cache import StateCache
from farspan.ops import LinearState
from farspan.ops.positions import PositionsArgument


class LinearAttention(Attention):
    """What linear layers share; a subclass says which op they call."""

    def op(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """The op with the layer's constants → (b, h, n, d); with ``return_state=True`` a pair of it and the state."""
        raise NotImplementedError

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
            "causal": self.causal,
            "positions": positions,
            "padding_mask": padding_mask,
            "documents": documents,
            "state": state,
        }
        if return_state:
            return self.op(q, k, v, return_state=True, **options)
        return self.op(q, k, v, **options), None

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
