"""The memory of a whole model between calls: a transformers Cache that knows each layer's window."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from farspan.models.configuration import FarspanConfig


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


class FarspanCache(Cache):
    """One memory a layer: everything for a global layer, the last `window` tokens for a window layer.

    CoCA layers store un-rotated t (d/2 numbers a head) where RoPE layers store k (d), unless the configuration's
    `cache_layout` is "rotated". It grows as needed; with `max_length` it is allocated once (static, for
    torch.compile). `generate`, beam search and crop use it like any transformers cache.

    >>> config = FarspanConfig.preset("tiny", num_hidden_layers=2, attention=["rope", {"kind": "rope", "window": 8}])
    >>> FarspanCache(config)
    FarspanCache(layers=[DynamicLayer, WindowLayer])
    """

    def __init__(self, config: FarspanConfig, *, max_length: int | None = None) -> None:
        def layer(window: int | None) -> DynamicLayer | StaticLayer:
            if max_length is None:
                return DynamicLayer() if window is None else WindowLayer(window)
            return StaticLayer(max_length) if window is None else StaticSlidingWindowLayer(max_length, window)

        super().__init__(layers=[layer(spec.window) for spec in config.attention_specs])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held by all layers."""
        held = (x for layer in self.layers for x in (layer.keys, layer.values))  # type: ignore[union-attr]
        return sum(x.numel() * x.element_size() for x in held if x is not None)
