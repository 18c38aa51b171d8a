"""A model at inference: greedy tokens after a context, eager, in a CUDA graph and compiled, and reading a prompt."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from farspan.bench import SEED, Row, Steps
from farspan.bench.checks import ROUNDING, ResultsDifferError, check, wider
from farspan.bench.timing import captured, in_turn, peak_bytes, ratio, reason, spread
from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.layers import Attention
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM

LLAMA = "llama"
"""Among layouts: transformers' own LLaMA of the same shape, with its own caches."""
MODES = ("eager", "graph", "compiled")
"""In this order: the others are checked against "eager"."""
ORDERS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
"""Which of SDPA's kernels is asked first. On a GPU each is tried and the faster one timed."""
CHECKED = 4
"""Tokens whose logits are compared before any time that is reported."""
AT_ONCE = 8
"""Tokens of one timing."""
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
"""What transformers' LLaMA takes over from a preset."""
CHUNK = 8192
"""Tokens of a long prompt read at a time."""
EAGER = {torch.bfloat16: 0.1, torch.float32: 1e-4}
"""How far logits of decoding steps may be from a wider dtype, relative to the largest: random weights in 24 layers come
to 0.04 in bfloat16."""


def steps(
    preset: str,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    prompts: Sequence[int],
    repeats: int,
    layouts: Sequence[str],
    window: int | None = None,
    device: str,
) -> Steps:
    """Decode after each context in each batch and mode, then read prompts of random tokens, one sequence in chunks.

    Weights are bfloat16 on a GPU and float32 elsewhere. Mode "eager" has a growing cache and plain calls, as `generate`
    does. Mode "graph", on a GPU, has a static cache and a CUDA graph of the step. Mode "compiled" has such a graph of
    the compiled step, as `generate` with a static cache. SDPA reads every slot of a static cache, with a mask, so no
    mode is RoPE's best everywhere: "best" takes each model's best mode.

    Args:
        layouts: what is compared; "rope" comes first in any case. "llama" is transformers' own model.
        window: of the hybrids among them.
    """
    names = list(dict.fromkeys(["rope", *layouts]))
    configs = {x: llama_config(preset) if x == LLAMA else make_config(preset, x, window) for x in names}  # raises early
    for name, config in configs.items():
        linear = name != LLAMA and any(spec.linear for spec in config.attention_specs)
        require(not linear, f"layouts must have a softmax in every layer, got {name!r}; see farspan bench cosformer")
    models: dict[str, Any] = {}

    def make() -> list[Row]:
        models.update({name: build(config, device) for name, config in configs.items()})
        return []

    def every_mode(context: int, batch: int) -> list[Row]:
        rows: list[Row] = []
        eager: dict[str, Any] = {}
        for mode in MODES if device == "cuda" else ["eager"]:
            rows += decode(models, mode, context, batch, repeats=repeats, device=device, eager=eager)
        return rows + best_modes(rows)

    found: Steps = [("models", make)]
    found += [(f"{b} × {n:,} tokens", partial(every_mode, n, b)) for n in contexts for b in batches]
    read_prompt = partial(prefill, models, device=device, repeats=repeats)
    return found + [(f"prompt of {length:,} tokens", partial(read_prompt, length)) for length in prompts]


def make_config(preset: str, name: str, window: int | None = None, **fields: Any) -> FarspanConfig:
    """Make the configuration of an attention, or of a hybrid with windows of another size."""
    if name.startswith("hybrid") and window is not None:
        fields["window"] = window
    return FarspanConfig.preset(preset, attention=name, **fields)


def llama_config(preset: str) -> LlamaConfig:
    """Make transformers' LLaMA of the same shape."""
    config = FarspanConfig.preset(preset)
    return LlamaConfig(**{key: getattr(config, key) for key in SHAPE}, tie_word_embeddings=True)


def build(config: Any, device: str) -> Any:
    """Make a model of random weights."""
    torch.manual_seed(SEED)
    model = FarspanForCausalLM(config) if isinstance(config, FarspanConfig) else LlamaForCausalLM(config)
    return model.eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def make_cache(config: Any, slots: int | None = None) -> Any:
    """Make a model's own cache: growing, or static with so many slots."""
    if isinstance(config, FarspanConfig):
        return FarspanCache(config, max_length=slots)
    return DynamicCache(config=config) if slots is None else StaticCache(config, max_cache_len=slots)


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all keys and values."""
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)


@torch.no_grad()
def decode(
    models: dict[str, Any],
    mode: str,
    context: int,
    batch: int,
    *,
    repeats: int,
    device: str,
    eager: dict[str, tuple[Tensor, float]],
) -> list[Row]:
    """Return one row for each model: figures, or why there are none.

    Args:
        eager: takes the logits of mode "eager" and their error, which the other modes are compared with.
    """
    label: Row = {"mode": mode, "context": context, "batch": batch}
    spare = CHECKED + AT_ONCE * max(repeats, 3) + 8
    figures: dict[str, Row] = {}
    decoders: dict[str, Decoder] = {}
    rows: list[Row] = []

    def settled(name: str) -> tuple[Decoder, Row]:  # where it fails, no name here holds its cache any longer
        made = Decoder(models[name], mode, context, batch, spare=spare)
        made.settle(device)
        # Of the step as settled. A replayed graph allocates nothing: its pool holds what the plain step needs.
        extra = peak_bytes(made.plain_step, device)
        made.rewind()
        held, weights = cache_bytes(made.cache), sum(p.nbytes for p in made.model.parameters())
        found: Row = {"cache_bytes": held, "weight_bytes": weights, "peak_bytes": held + weights + extra}
        return made, found | {"sdpa_first": made.order} | check_steps(made, name, mode, eager)

    for name in models:
        try:
            decoders[name], figures[name] = settled(name)
        except RuntimeError as error:
            if mode == "eager" or isinstance(error, ResultsDifferError):
                raise
            rows.append({"kind": "missing", **label, "attention": name, "why": reason(error)})
    if "rope" not in decoders:
        others = ({"kind": "missing", **label, "attention": name, "why": "RoPE is missing"} for name in decoders)
        return [*rows, *others]
    seconds = in_turn({name: x.several for name, x in decoders.items()}, repeats=repeats, device=device)
    for name, times in seconds.items():
        each = spread(times, 1e3 / AT_ONCE)
        row: Row = {"kind": "decode", **label, "attention": name, "milliseconds_a_step": each}
        row |= {"tokens_per_second": 1e3 * batch / each["median"], "speed_over_rope": ratio(seconds["rope"], times)}
        row |= {"time_over_rope": ratio(times, seconds["rope"])}
        row |= {"cache_over_rope": figures[name]["cache_bytes"] / figures["rope"]["cache_bytes"]}
        rows.append(row | figures[name])
    return rows


def best_modes(rows: list[Row]) -> list[Row]:
    """Return a row for each model: its mode with most tokens per second, and its speed over RoPE's best."""
    names = "context", "batch", "attention", "mode", "sdpa_first", "tokens_per_second", "cache_bytes"
    slowest_first = sorted((row for row in rows if row["kind"] == "decode"), key=lambda row: row["tokens_per_second"])
    best = {row["attention"]: {"kind": "best"} | {name: row[name] for name in names} for row in slowest_first}
    for row in best.values():
        row["speed_over_rope"] = row["tokens_per_second"] / best["rope"]["tokens_per_second"]
    return list(best.values())


class Decoder:
    """A model after a context, one greedy token for each sequence at a time: `token` (b, 1) is the newest.

    A step runs it, and takes the next from its `logits` (b, vocabulary).
    """

    def __init__(self, model: Any, mode: str, context: int, batch: int, *, spare: int) -> None:
        weight = model.lm_head.weight
        self.model, self.mode, self.context, self.batch = model, mode, context, batch
        self.run = torch.compile(model, fullgraph=True, dynamic=False) if mode == "compiled" else model
        self.slots = None if mode == "eager" else -(-(context + spare) // 128) * 128
        self.cache = make_cache(model.config, self.slots)
        self.rewind()
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=weight.dtype, device=weight.device)
        self.order: str | None = None
        self.replay: Callable[[], Any] | None = None

    def rewind(self) -> None:
        """Write the context into the cache again: a window cannot take tokens back. Static storage stays in place."""
        if self.slots is None:  # transformers' growing cache would keep its length
            self.cache = make_cache(self.model.config)
        else:
            self.cache.reset()
        fill(self.cache, self.model, self.batch, self.context)

    def step(self) -> None:
        """Decode one token for each sequence: replayed, if a graph of it was captured.

        (Chosen here, not kept as a bound method: a decoder that refers to itself would hold its cache until the next
        collection, and tens of gigabytes cannot wait.)
        """
        (self.replay or self.plain_step)()

    @torch.no_grad()
    def plain_step(self) -> None:
        """Decode by the calls that a graph captures."""
        with nullcontext() if self.order is None else sdpa_kernel(ORDERS[self.order], set_priority=True):
            self.logits.copy_(self.run(self.token, past_key_values=self.cache).logits[:, -1])
            self.token.copy_(self.logits.argmax(dim=-1, keepdim=True))

    def settle(self, device: str) -> None:
        """Take the faster order of SDPA's kernels on a GPU, and capture the step unless the mode is "eager".

        Times here only choose; none is reported.
        """
        if self.mode == "compiled":
            torch.compiler.reset()  # torch keeps few graphs of one function
        tried: dict[str | None, tuple[float, Callable[[], Any] | None]] = {}
        # A compiled step keeps the kernel that SDPA chose when it was traced, so there the first choice is torch's own.
        for order in ORDERS if device == "cuda" and self.mode != "compiled" else (None,):
            self.order, self.replay = order, None
            self.replay = captured(self.plain_step) if self.mode != "eager" and device == "cuda" else None
            tried[order] = min(in_turn({"": self.several}, repeats=3, device=device)[""]), self.replay
            self.rewind()
        self.order = min(tried, key=lambda order: tried[order][0])
        self.replay = tried[self.order][1]

    def several(self) -> None:
        for _ in range(AT_ONCE):
            self.step()

    def follow(self, tokens: Tensor) -> Tensor:
        """Return the logits (steps, b, vocabulary) after each of given tokens (steps, b)."""
        found = []
        for given in tokens:
            self.token.copy_(given[:, None])
            self.step()
            found.append(self.logits.clone())
        return torch.stack(found)


@torch.no_grad()
def fill(cache: Any, model: Any, batch: int, context: int, rows: int | None = None) -> None:
    """Write random keys and values of `context` tokens into every layer, in the model's dtype; of the first `rows`.

    The numbers depend neither on the kind of cache nor on the dtype.
    """
    like, heads = model.lm_head.weight, model.config.num_key_value_heads
    generator = torch.Generator(like.device).manual_seed(SEED)
    for index, block in enumerate(model.model.layers):
        layer = block.self_attn
        width, magnitudes = getattr(layer, "key_width", layer.head_dim), False
        if isinstance(layer, Attention) and layer.caches_features(like.dtype):
            assert layer.rotary is not None
            width = layer.rotary.dim
        elif isinstance(layer, Attention):
            magnitudes = layer.collinear or layer.polar
        keys, values = (
            torch.empty(batch, heads, context, size, dtype=torch.bfloat16, device=like.device)
            .normal_(generator=generator)[:rows]
            .to(like.dtype)
            for size in (width, layer.head_dim)
        )
        cache.update(keys.relu_() if magnitudes else keys, values, index)


def check_steps(decoder: Decoder, name: str, mode: str, eager: dict[str, tuple[Tensor, float]]) -> Row:
    """Compare the first tokens' logits with a wider dtype (the first sequence), or with the eager ones (all).

    Three times the eager error is allowed to the latter: its own and twice as much.
    """
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = decoder.model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (CHECKED, decoder.batch), generator=generator).to(decoder.token.device)
    logits = decoder.follow(tokens)
    if mode == "eager":
        limit = EAGER[logits.dtype]
        found = check(f"{name}, a decoding step,", logits[:, 0], exact(decoder, tokens), limit=limit)
        eager[name] = logits, found["error"]
        return found
    first, error = eager[name]
    limit = 3 * error + ROUNDING[logits.dtype]
    return check(f"{name}, a decoding step in mode {mode} beside the eager one,", logits, first, limit=limit)


@torch.no_grad()
def exact(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the first sequence's logits (steps, vocabulary) by the same model and cache in a wider dtype.

    All steps in one call: what is made for one query takes no part.
    """
    model = wider(decoder.model)
    cache = make_cache(model.config)
    fill(cache, model, decoder.batch, decoder.context, rows=1)
    return model(tokens[:, 0][None], past_key_values=cache).logits[0]


@torch.no_grad()
def prefill(models: dict[str, Any], length: int, *, device: str, repeats: int) -> list[Row]:
    """Read a prompt of random tokens through a growing cache, chunk by chunk: one row for each model.

    The logits that the last timed reading ended with are compared with those of the same weights in a wider dtype.
    """
    vocabulary = next(iter(models.values())).config.vocab_size
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(SEED)).to(device)
    kept: dict[str, tuple[Tensor, int]] = {}

    def keep(name: str, model: Any) -> None:
        kept[name] = read(model, ids)

    calls = {name: partial(keep, name, model) for name, model in models.items()}
    peaks = {name: peak_bytes(call, device) for name, call in calls.items()}
    seconds = in_turn(calls, repeats=repeats, device=device)
    rows = []
    for name, model in models.items():
        logits, held = kept[name]
        checked = check(f"{name}, a prompt of {length} tokens,", logits, read(wider(model), ids)[0])
        weights = sum(p.nbytes for p in model.parameters())
        median = spread(seconds[name])["median"]
        row: Row = {"kind": "prefill", "attention": name, "length": length, "batch": 1, "chunk": CHUNK}
        row |= {"seconds": seconds[name], "tokens_per_second": length / median, "weight_bytes": weights}
        row |= {"speed_over_rope": ratio(seconds["rope"], seconds[name])["median"]}
        row |= {"time_over_rope": ratio(seconds[name], seconds["rope"])}
        row |= {"cache_bytes": held, "cache_over_rope": held / kept["rope"][1], "peak_bytes": weights + peaks[name]}
        rows.append(row | checked)
    return rows


@torch.no_grad()
def read(model: Any, ids: Tensor) -> tuple[Tensor, int]:
    """Read a prompt (1, n); return the logits (1, vocabulary) after its last token, and the cache's bytes."""
    cache = make_cache(model.config)
    for piece in ids.split(CHUNK, dim=1):
        logits: Tensor = model(piece, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return logits, cache_bytes(cache)
