"""The memory of a whole model between calls: a transformers Cache that knows each layer's window."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from farspan.errors import require
from farspan.layers.cache import Growing
from farspan.layers.spec import AttentionSpec
from farspan.models.configuration import FarspanConfig
from farspan.ops import LinearState


class GrowingLayer(DynamicLayer):
    """transformers' growing layer, except that a new token does not copy the whole cache."""

    def __init__(self) -> None:
        super().__init__()
        self._grown = Growing(), Growing()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.get_seq_length() == 0:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._grown[0].append(self.keys, key_states)  # type: ignore[arg-type]
        self.values = self._grown[1].append(self.values, value_states)  # type: ignore[arg-type]
        return self.keys, self.values


class WindowLayer(DynamicSlidingWindowLayer):
    """transformers' growing window layer, except that it lets go of the prompt.

    Theirs keeps a view into all keys of the last call, so the memory of a long prompt is never returned, and at
    window 1 it keeps everything.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if not self.record_past:
            first = max(0, keys.shape[2] - self.sliding_window + 1)
            self.keys, self.values = keys[:, :, first:].clone(), values[:, :, first:].clone()
        return keys, values


class StateLayer(CacheLayerMixin):
    """The sums of a linear layer, of one size for ever: `keys` is the numerator's, `values` the denominator's.

    With `max_length` the sums are overwritten in place and the count is a tensor, for torch.compile.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        self.max_length = max_length
        self.is_compileable = max_length is not None
        self.seen: int | Tensor = 0 if max_length is None else torch.tensor(0)
        self.places: list[Tensor] = []
        self.kernel = ""

    @property
    def state(self) -> LinearState | None:
        """What the op continues from."""
        if self.keys is None or self.values is None:
            return None
        anchor, position, first = self.places
        return LinearState(self.keys, self.values, anchor, position, first, self.kernel)

    def advance(self, state: LinearState, tokens: int) -> None:
        """Replace the sums by those after `tokens` more."""
        rows = state.numerator.shape[0]
        new = [state.numerator, state.denominator, *(x.expand(rows, 1).contiguous() for x in state[2:5])]
        if self.max_length is None or not self.is_initialized:
            self.keys, self.values, *self.places = new
            self.kernel, self.is_initialized = state.kernel, True
            if isinstance(self.seen, Tensor):
                self.seen = self.seen.to(state.numerator.device)
                if not torch.compiler.is_compiling():  # CUDA graphs write only where addresses stay
                    for fixed in (self.keys, self.values, *self.places, self.seen):
                        torch._dynamo.mark_static_address(fixed)
        else:
            for held, now in zip((self.keys, self.values, *self.places), new, strict=True):
                held.copy_(now)  # type: ignore[union-attr]
        if isinstance(self.seen, Tensor):
            self.seen.add_(tokens)
        else:
            self.seen += tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is known before the first state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a linear layer's memory takes no keys; it is advanced by its own attention")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A growing layer attends to the new tokens only; for a static one the mask is that of all slots."""
        return (query_length, self.get_seq_length()) if self.max_length is None else (self.max_length, 0)

    def get_seq_length(self) -> int:
        return self.seen if self.is_initialized else 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.is_initialized, self.keys, self.values, self.places = False, None, None, []
        self.seen = 0 if self.max_length is None else torch.tensor(0)

    def crop(self, tokens_to_remove: int) -> None:
        require(
            tokens_to_remove == 0,
            f"a linear layer cannot forget {abs(tokens_to_remove)} tokens, they are summed; start again",
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self._select(torch.arange(self.keys.shape[0], device=self.keys.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def _select(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
            self.places = [x.index_select(0, rows) for x in self.places]


class FarspanCache(Cache):
    """One memory a layer: all tokens for a global layer, the last `window` for a window layer, sums for a linear one.

    CoCA layers store un-rotated t (d/2 numbers a head) where RoPE layers store k (d), unless the configuration's
    `cache_layout` is "rotated". It grows as needed; with `max_length` it is allocated once (static, for
    torch.compile). `generate`, beam search and crop use it like any transformers cache.

    >>> config = FarspanConfig.preset("tiny", num_hidden_layers=2, attention=["rope", {"kind": "rope", "window": 8}])
    >>> FarspanCache(config)
    FarspanCache(layers=[GrowingLayer, WindowLayer])
    """

    def __init__(self, config: FarspanConfig, *, max_length: int | None = None) -> None:
        def layer(spec: AttentionSpec) -> CacheLayerMixin:
            if spec.linear:
                return StateLayer(max_length)
            if max_length is None:
                return GrowingLayer() if spec.window is None else WindowLayer(spec.window)
            return StaticLayer(max_length) if spec.window is None else StaticSlidingWindowLayer(max_length, spec.window)

        super().__init__(layers=[layer(spec) for spec in config.attention_specs])
        self.max_length = max_length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held by all layers."""
        held = (x for layer in self.layers for x in (layer.keys, layer.values))  # type: ignore[union-attr]
        return sum(x.numel() * x.element_size() for x in held if x is not None)
