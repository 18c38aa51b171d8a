"""A model after a long context, ready to decode: its cache filled with random numbers, its SDPA kernel chosen."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import StaticLayer

from farspan.benchmark.clock import captured
from farspan.benchmark.measure import in_turn
from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM
from farspan.ops.coca_decode import why_not_decode_triton
from farspan.ops.dispatch import Call
from farspan.ops.masking import make_mask

VARIANTS = ("rope", "coca-exact")
"""The first is what the others are compared with; the second reads its cache on the half-width kernel on a GPU."""
ORDERS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
"""Which of SDPA's kernels is asked first. Where SDPA runs on a GPU, each is tried and the faster one timed."""
KERNEL = "half-width kernel"
AT_ONCE = 8
"""Tokens a timing."""


def heads_of(preset: str, group: int = 1, head_dim: int | None = None) -> dict[str, int]:
    """Fields of a configuration: heads of another width, and so another number of them, a key head for each group.

    >>> heads_of("350m", group=4, head_dim=128)
    {'num_attention_heads': 8, 'num_key_value_heads': 2, 'head_dim': 128}
    """
    config = FarspanConfig.preset(preset)
    width, hidden = head_dim or config.head_dim, config.hidden_size
    assert width is not None
    require(hidden % width == 0, f"head_dim must divide the hidden size {hidden}, got {width}; try {config.head_dim}")
    heads = hidden // width
    require(heads % group == 0, f"group must divide the {heads} heads, got {group}; try 1, one key head for each")
    return {"num_attention_heads": heads, "num_key_value_heads": heads // group, "head_dim": width}


def make_model(preset: str, variant: str, device: str, seed: int, **fields: int) -> FarspanForCausalLM:
    """Make one of :data:`VARIANTS`, some fields replaced."""
    torch.manual_seed(seed)
    config = FarspanConfig.preset(preset, attention=variant, **fields)
    config.decode_backend = "sdpa" if why_no_kernel(config, device) else "triton"
    return FarspanForCausalLM(config).eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def why_no_kernel(config: FarspanConfig, device: str) -> str | None:
    """Return why a model cannot decode on the half-width kernel of a device; None if it can, or has no use for it."""
    if not reads_half_width(config):
        return None
    if device != "cuda":  # where it could be interpreted, but not timed
        return "kernels need a CUDA device"
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    group = config.num_attention_heads // config.num_key_value_heads
    q = torch.empty(1, group, 1, config.head_dim, dtype=torch.bfloat16, device=device)
    mask = make_mask(1, 1, 1, q.device)
    return why_not_decode_triton(Call(q, q[:, :1, :, ::2], q[:, :1], mask, 1.0, "triton", config.rotary()))


def reads_half_width(config: FarspanConfig) -> bool:
    """Whether the cache holds un-rotated t."""
    return all(spec.kind == "coca" for spec in config.attention_specs)


@torch.no_grad()
def fill(
    cache: FarspanCache,
    config: FarspanConfig,
    batch: int,
    context: int,
    seed: int,
    like: Tensor,
    rows: int | None = None,
) -> None:
    """Write random keys (or t ≥ 0) and values of `context` tokens into every layer, in like's dtype; the first `rows`.

    The numbers depend neither on the kind of cache nor on like's dtype.
    """
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    generator = torch.Generator(like.device).manual_seed(seed)
    for index, spec in enumerate(config.attention_specs):
        half = spec.kind == "coca"
        width = config.head_dim // 2 if half else config.head_dim
        for_keys, for_values = (
            torch.empty(batch, config.num_key_value_heads, context, size, dtype=torch.bfloat16, device=like.device)
            .normal_(generator=generator)[:rows]
            .to(like.dtype)
            for size in (width, config.head_dim)
        )
        cache.update(for_keys.relu_() if half else for_keys, for_values, index)


class Decoder:
    """A model after a context, one greedy token for each text at a time: `token` (b, 1) is the newest.

    A step runs it, and takes the next from its `logits` (b, vocabulary).
    """

    def __init__(self, model: FarspanForCausalLM, mode: str, context: int, batch: int, *, room: int, seed: int) -> None:
        weight = model.lm_head.weight
        self.model, self.context, self.batch, self.seed = model, context, batch, seed
        self.slots = None if mode == "eager" else -(-(context + room) // 128) * 128
        self.renew()
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=weight.dtype, device=weight.device)
        self.forward: Callable[..., Any] = model
        if mode == "compiled":
            options: dict[str, Any] = {"mode": "reduce-overhead"} if weight.is_cuda else {"backend": "aot_eager"}
            self.forward = torch.compile(model, fullgraph=True, dynamic=False, **options)
        self.order: str | None = None
        self.replay: Callable[[], Any] | None = None

    def renew(self) -> None:
        """Begin again with a new cache: one that grows makes room at its first step, and keeps it."""
        self.cache = FarspanCache(self.model.config, max_length=self.slots)
        fill(self.cache, self.model.config, self.batch, self.context, self.seed, self.model.lm_head.weight)

    def step(self) -> None:
        """One token for each text: replayed, if a graph of it was captured.

        (Chosen here, not kept as a bound method: a decoder that refers to itself would hold its cache until the next
        collection, and tens of gigabytes cannot wait.)
        """
        (self.replay or self.plain_step)()

    @torch.no_grad()
    def plain_step(self) -> None:
        """The step by its calls, as a graph captures it."""
        with nullcontext() if self.order is None else sdpa_kernel(ORDERS[self.order], set_priority=True):
            self.logits.copy_(self.forward(self.token, past_key_values=self.cache).logits[:, -1])
            self.token.copy_(self.logits.argmax(dim=-1, keepdim=True))

    @property
    def decodes_on(self) -> str:
        """What computes the attention."""
        if self.model.config.decode_backend == "triton" and reads_half_width(self.model.config):
            return KERNEL
        return "SDPA" if self.order is None else f"SDPA, {self.order} first"

    @property
    def reads(self) -> str:
        """Which keys a step reads: where a text in a static cache ends, a mask tells SDPA, and lengths the kernel."""
        return "text" if self.slots is None or self.decodes_on == KERNEL else f"all {self.slots} slots, masked"

    @property
    def bytes_a_step(self) -> int:
        """What a step has to read: every weight but the table of embeddings, and the keys and values of each text."""
        config, weight = self.model.config, self.model.lm_head.weight
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        table = 0 if config.tie_word_embeddings else self.model.model.embed_tokens.weight.numel()
        tokens = self.context if self.reads == "text" else self.slots or self.context
        key = config.head_dim // 2 if reads_half_width(config) else config.head_dim
        cached = config.num_hidden_layers * config.num_key_value_heads * (key + config.head_dim)
        weights = sum(p.numel() for p in self.model.parameters()) - table
        return weight.element_size() * (weights + self.batch * tokens * cached)

    def settle(self, device: str, orders: Sequence[str | None], *, graph: bool) -> str | None:
        """Take the fastest order of SDPA's kernels, and capture the step if a `graph` of it is wanted.

        Times here only choose; none is reported.
        """
        seconds: dict[str | None, float] = {}
        replays: dict[str | None, Callable[[], Any] | None] = {}
        for order in orders:
            self.order = order
            self.replay = replays[order] = captured(self.plain_step) if graph else None
            seconds[order] = min(in_turn({"": self.several}, repeats=3, device=device)[""]) if len(orders) > 1 else 0.0
            self.rewind()
        self.order = min(seconds, key=lambda order: seconds[order])
        self.replay = replays[self.order]
        return self.order

    def rewind(self) -> None:
        """Forget all but the context."""
        ahead = self.cache.get_seq_length() - self.context
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):  # the slots stay as they are: what lies ahead is masked
                torch.as_tensor(layer.cumulative_length).fill_(self.context)
            else:
                layer.crop(-ahead)  # type: ignore[union-attr]

    def several(self) -> None:
        for _ in range(AT_ONCE):
            self.step()

    def follow(self, tokens: Tensor) -> Tensor:
        """Logits (steps, b, vocabulary) after each of given tokens (steps, b)."""
        found = []
        for given in tokens:
            self.token.copy_(given[:, None])
            self.step()
            found.append(self.logits.clone())
        return torch.stack(found)


def orders_for(decoder: Decoder, device: str) -> list[str | None]:
    """The orders of SDPA's kernels to try: on a GPU all, but where SDPA does not run."""
    return [None] if device != "cuda" or decoder.decodes_on == KERNEL else list(ORDERS)
