"""What one layer keeps between calls: keys and values, or the sums of a linear layer. Torch only.

:class:`farspan.FarspanCache` holds one of these per layer, so that `generate`, beam search and assisted decoding of
transformers use the same objects as a plain layer does. They speak transformers' protocol of a cache layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.errors import require
from farspan.ops.cosformer import LinearState

ONE_BY_ONE = 64
"""Up to this many new tokens, more calls like this are expected, and spare capacity is allocated for them."""

CHEAP = 2**15
"""Up to this many numbers a copy is faster than a write into a buffer."""


class _CacheLayer:
    """What all caches share: tensors whose batch may change, for beam search and `num_return_sequences`.

    As in transformers, `update` appends keys and values (b, g, n, ·) and returns all that the n new queries can see.
    `get_seq_length` counts the tokens so far, dropped ones included. `get_mask_sizes` tells how many keys the next
    `update` will return, and the index of the first of them. `get_max_length` is the most tokens kept, -1 for no limit.
    """

    is_compileable = is_croppable = is_sliding = supports_early_init = False
    keys: Tensor | None
    values: Tensor | None
    content = ""
    """What is kept of the tokens, for an error."""

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        """Raise unless there is nothing to remove."""
        require(
            tokens_to_remove == 0,
            f"cannot remove {abs(tokens_to_remove)} tokens: this layer keeps only {self.content}; start again",
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the batch by the chosen rows."""
        self._replace(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self._replace(lambda x: x.repeat_interleave(repeats, dim=0))


class LayerCache(_CacheLayer):
    """Keys and values of one layer; with a window, only those that a later query can see.

    It keeps what the layer gives it: for CoCA the un-rotated t (d/2 numbers per head) and v, three quarters of what
    RoPE keeps; for windows of CoCA and PoPE rotated features.

    >>> cache = LayerCache(window=3)
    >>> for n in range(5):
    ...     k, v = cache.update(torch.full((1, 1, 1, 2), float(n)), torch.zeros(1, 1, 1, 4))
    >>> k[0, 0, :, 0].tolist(), cache.get_seq_length()
    ([2.0, 3.0, 4.0], 5)
    """

    is_croppable = True
    record_past = False

    def __init__(self, window: int | None = None) -> None:
        require(window is None or window >= 1, f"window must be at least 1 or None, got {window}")
        self.window = self.sliding_window = window
        self.is_sliding, self.content = window is not None, f"its window of {window}"
        self.reset()

    def __repr__(self) -> str:
        return f"LayerCache({'' if self.window is None else f'window={self.window}'})"

    def reset(self) -> None:
        """Forget everything."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._seen = self._start = 0
        self._buffers: list[Tensor] | None = None
        """Keys and values from token `_start` on, with spare capacity, so that a new token copies none before it.
        What was handed out is never overwritten; None where others may hold the tokens after the last."""
        self._held: list[Tensor | None] = []
        """The keys and values that lie in the buffers: other ones were put in their place from outside."""

    @property
    def is_initialized(self) -> bool:
        return self.keys is not None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        new = keys.shape[2]
        self._seen += new
        if self.keys is not None and self.values is not None:
            keys, values = self._append([self.keys, self.values], [keys, values])
        self.keys, self.values = keys, values
        if self.window is not None and self.record_past:  # `crop` cuts to the window later
            seen = self.window - 1 + new
            self._held = [keys, values]
            return keys[:, :, -seen:], values[:, :, -seen:]
        self._keep_window()
        self._held = [self.keys, self.values]
        return keys, values

    def __copy__(self) -> "LayerCache":
        """Share the tokens with a copy, and no buffers: each would write its next token behind them."""
        self._buffers, made = None, self.__class__.__new__(self.__class__)
        vars(made).update(vars(self))
        return made

    def _append(self, held: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        """Return what is held and then the new tokens, in the buffers where they serve."""
        kept, dtype = held[0], new[0].dtype
        if kept.dtype != dtype:
            raise ValueError(f"the cache holds {kept.dtype}, got {dtype}; continue under the same autocast")
        # Autograd may still need what an append in place would change.
        if max(x.numel() for x in held) <= CHEAP or torch.compiler.is_compiling() or torch.is_grad_enabled():
            self._buffers = None
            return [torch.cat(pair, dim=2) for pair in zip(held, new, strict=True)]
        old, more = kept.shape[2], new[0].shape[2]
        end = self._start + old + more
        ours = all(x is y for x, y in zip(held, self._held, strict=False))
        if self._buffers is None or not ours or end > self._buffers[0].shape[2] or not _may_write(self._buffers[0]):
            end = old + more
            spare = end // 4 if more <= ONE_BY_ONE else 0
            self._buffers = [x.new_empty(*x.shape[:2], end + spare, x.shape[3]) for x in held]
            self._start = 0
            for buffer, x in zip(self._buffers, held, strict=True):
                buffer[:, :, :old] = x
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, end - more : end] = x
        return [buffer[:, :, self._start : end] for buffer in self._buffers]

    def _keep_window(self) -> None:
        """Keep the last window - 1 tokens; copy them where many more would stay in memory before them."""
        if self.window is None or self.keys is None or self.values is None:
            return
        first = max(0, self.keys.shape[2] - self.window + 1)
        if first:
            self._start += first
            if self._start > self.window + ONE_BY_ONE:
                self._buffers = None
            kept = [x[:, :, first:] for x in (self.keys, self.values)]
            self.keys, self.values = kept if self._buffers is not None else (x.clone() for x in kept)

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self._seen if self.window is None else min(self._seen, self.window - 1)
        return kept + query_length, self._seen - kept

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def activate_past_recording(self) -> None:
        """Keep everything until the next :meth:`crop`, as assisted decoding needs."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: -k removes k. A full window needs :meth:`activate_past_recording` before."""
        require(tokens_to_remove <= 0, f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if self.keys is not None and tokens_to_remove < 0:
            if self.window is not None and not self.record_past and self._seen >= self.window:
                super().crop(tokens_to_remove)  # raises
            self._replace(lambda x: x[:, :, :tokens_to_remove])
            self._seen = max(0, self._seen + tokens_to_remove)
        self._keep_window()

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values, self._buffers, self._held = change(self.keys), change(self.values), None, []


def _may_write(buffer: Tensor) -> bool:
    return torch.compiler.is_compiling() or not buffer.is_inference() or torch.is_inference_mode_enabled()


def is_alike(held: Tensor, new: Tensor) -> bool:
    """Return whether storage held for an earlier batch serves a new one."""
    kinds = [(x.shape[0], x.shape[-1], x.dtype, x.device) for x in (held, new)]
    return kinds[0] == kinds[1]


def _keep_addresses(*storage: Tensor) -> None:
    """Tell torch.compile that these tensors stay where they are, as CUDA graphs need."""
    if not torch.compiler.is_compiling():
        for fixed in storage:
            torch._dynamo.mark_static_address(fixed)


class StaticWindowCache(_CacheLayer):
    """The last window - 1 tokens of one layer in storage allocated once, for torch.compile and CUDA graphs.

    The newest token is always in the last slot: each call does the same, whether the window is full or not. Slots that
    no token has reached yet are hidden by the mask. Once in use, the number of tokens is a tensor.

    >>> cache = StaticWindowCache(window=3)
    >>> for n in range(2, 6):
    ...     k, v = cache.update(torch.full((1, 1, 1, 2), float(n)), torch.zeros(1, 1, 1, 4))
    >>> k[0, 0, :, 0].tolist(), int(cache.get_seq_length())
    ([3.0, 4.0, 5.0], 4)
    """

    is_compileable = is_sliding = True

    def __init__(self, window: int) -> None:
        self.window = self.sliding_window = self.max_cache_len = window
        self.content = f"its window of {window}"
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False
        self._seen = torch.tensor(0)

    def __repr__(self) -> str:
        return f"StaticWindowCache(window={self.window})"

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        new = keys.shape[2]
        if not self.is_initialized:
            self._start(keys, values)
        else:
            assert self.keys is not None
            assert self.values is not None
            keys, values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
            self.keys.copy_(keys[:, :, keys.shape[2] - self.window + 1 :])
            self.values.copy_(values[:, :, keys.shape[2] - self.window + 1 :])
        self._seen.add_(new)
        return keys, values

    def _start(self, keys: Tensor, values: Tensor) -> None:
        """Keep the end of a first prompt, in the storage of an earlier one where it fits."""
        held = self.keys
        if held is None or not _may_write(held) or not is_alike(held, keys):
            self.keys, self.values = (x.new_empty(*x.shape[:2], self.window - 1, x.shape[3]) for x in (keys, values))
            self._seen = torch.tensor(0, device=keys.device)
            _keep_addresses(self.keys, self.values, self._seen)
        self.is_initialized = True
        first = keys.shape[2] - self.window + 1  # below 0, empty slots come before the prompt
        for kept, new in ((self.keys, keys), (self.values, values)):
            kept.copy_(F.pad(new, (0, 0, -first, 0)))  # type: ignore[union-attr]

    def get_seq_length(self) -> int:
        return self._seen if self.is_initialized else 0  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not self.is_initialized:
            return query_length, 0
        return self.window - 1 + query_length, self._seen - (self.window - 1)  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return self.window

    def reset(self) -> None:
        """Forget everything but keep the storage, so that compiled graphs stay valid."""
        self.is_initialized = False
        self._seen = self._seen.zero_() if _may_write(self._seen) else torch.zeros_like(self._seen)

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values"):
            held: Tensor | None = getattr(self, name)
            if held is not None:
                new = change(held)  # in place where it fits: a captured graph goes on reading the same storage
                setattr(self, name, held.copy_(new) if new.shape == held.shape else new)


class StateCache(_CacheLayer):
    """The sums of a linear layer, of one size however many tokens were seen.

    `keys` is the numerator's sum, `values` the denominator's. With `max_length` the cache is static: sums are
    overwritten in place and the count is a tensor, for torch.compile.

    >>> cache = StateCache()
    >>> cache.get_seq_length(), cache.nbytes
    (0, 0)
    """

    content = "the sums of a linear layer"

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = max_length
        self.is_compileable = max_length is not None
        self.is_initialized = False
        self._held: LinearState | None = None
        """The newest state; after a reset, the storage of the next one."""
        self._seen: int | Tensor = 0 if max_length is None else torch.tensor(0)

    def __repr__(self) -> str:
        return "StateCache()"

    @property
    def state(self) -> LinearState | None:
        """The state that the op continues from."""
        return self._held if self.is_initialized else None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self.state is None else self.state.numerator

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.state is None else self.state.denominator

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.state is None else self.state.nbytes

    def advance(self, state: LinearState, tokens: int) -> None:
        """Replace the sums by those after `tokens` more."""
        rows = state.numerator.shape[0]
        new = [*state[:2], *(x.expand(rows, 1).contiguous() for x in state[2:5])]
        held = [] if self._held is None else self._held[:5]
        fits = [x.shape for x in held] == [x.shape for x in new] and all(map(_may_write, held))
        if self.max_length is not None and fits:
            new = [kept.copy_(now) for kept, now in zip(held, new, strict=True)]
        elif isinstance(self._seen, Tensor):
            self._seen = self._seen.to(state.numerator.device)
            _keep_addresses(*new, self._seen)
        self._held, self.is_initialized = LinearState._make([*new, state.weighting]), True
        self._seen += tokens  # in place where it is a tensor

    def get_seq_length(self) -> int:
        return self._seen if self.is_initialized else 0  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the new tokens only; for a static cache all slots, as wide as its mask."""
        return (query_length, self.get_seq_length()) if self.max_length is None else (self.max_length, 0)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget everything; a static cache keeps its tensors, so that compiled graphs stay valid."""
        self.is_initialized = False
        if isinstance(self._seen, Tensor):
            self._seen = self._seen.zero_() if _may_write(self._seen) else torch.zeros_like(self._seen)
        else:
            self._seen, self._held = 0, None

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._held is not None:
            self._held = LinearState._make([*map(change, self._held[:5]), self._held.weighting])
