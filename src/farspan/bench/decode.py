"""A model at inference: greedy tokens after a context and reading a prompt, eager, in a CUDA graph and compiled."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.bench import Row, Steps, Table, table
from farspan.bench.checks import ResultsDifferError, check, far, reason, set_decode_backend, wider
from farspan.bench.layer import show
from farspan.bench.timing import captured, copy_speed, drawn_orders, in_turn, peak_bytes, quantiles, ratio
from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM
from farspan.ops.coca_decode import why_not_decode_triton
from farspan.ops.dispatch import Call
from farspan.ops.masking import make_mask

VARIANTS = ("rope", "coca-exact")
"""The first is what the others are compared with."""
MODES = ("eager", "graph", "compiled")
"""A growing cache and plain calls, as `generate` does; a static cache and a CUDA graph of the step; and compiled."""
ORDERS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
"""Which of SDPA's kernels is asked first. Where SDPA runs on a GPU, each is tried and the faster one timed."""
KERNEL = "half-width kernel"
CHECKED = 4
"""Tokens whose logits are compared before any time that is reported."""
AT_ONCE = 8
"""Tokens of one timing."""
CHUNK = 8192
"""Tokens of a long prompt read at a time."""
EAGER = {torch.bfloat16: 0.1, torch.float32: 1e-4}
"""How far logits of decoding steps may be from float64, as a part of the largest: random weights in 24 layers come to
0.04 in bfloat16."""


def steps(
    preset: str = "350m",
    *,
    contexts: Sequence[int] = (512, 8192, 32_768),
    batches: Sequence[int] = (1, 8),
    prompts: Sequence[int] = (32_768, 131_072),
    compile: str = "one",
    repeats: int = 10,
    group: int = 1,
    head_dim: int | None = None,
    layouts: Sequence[str] = VARIANTS,
    window: int | None = None,
    global_every: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Steps:
    """Decode after each context in each batch and mode, then read prompts of random tokens, one sequence in chunks.

    Weights are bfloat16 on a GPU and float32 elsewhere, where "graph" is left out and torch.compile only traces. Of a
    static cache SDPA, so also RoPE, reads every slot with a mask; a row's "reads" tells, and "best" takes each model's
    best mode.

    Args:
        compile: "all", "none", or "one": at the longest context and the first batch, as it takes long.
        group, head_dim: query heads per key head, and their width if not the preset's (:func:`heads_of`).
        layouts: what is compared; "rope" comes first in any case.
        window, global_every: of the hybrids among them.
    """
    fields = heads_of(preset, group, head_dim)
    sizes = dict(zip(("heads", "key_heads", "head_dim"), fields.values(), strict=True))
    names = list(dict.fromkeys(["rope", *layouts]))
    configs = {name: make_config(preset, name, window, global_every, **fields) for name in names}  # raises early
    models: dict[str, FarspanForCausalLM] = {}

    def make() -> list[Row]:
        models.update({name: build(config, device, seed) for name, config in configs.items()})
        refusals = {why_no_kernel(model.config, device) for model in models.values()} - {None}
        return [{"kind": "missing", "mode": KERNEL, "why": why} for why in refusals]

    def one_mode(mode: str, context: int, batch: int, rows: list[Row], **shared: Any) -> list[Row]:
        new = decode(models, mode, context, batch, repeats=repeats, device=device, seed=seed, **shared)
        rows += new
        return [row | sizes for row in new]

    def read_prompt(length: int) -> list[Row]:
        return [row | sizes for row in prefill(models, length, device=device, repeats=repeats)]

    found: Steps = [("models", make)]
    for context in contexts:
        for batch in batches:
            chosen = compile == "all" or (compile == "one" and (context, batch) == (max(contexts), batches[0]))
            rows: list[Row] = []
            shared: dict[str, Any] = {"eager": {}, "orders": {}}
            for mode in MODES if chosen else MODES[:2]:
                work = partial(one_mode, mode, context, batch, rows, **shared)
                found.append((f"{mode}, {batch} × {context:,} tokens", work))
            found.append((f"best, {batch} × {context:,} tokens", partial(best_modes, rows)))
    return found + [(f"prompt of {length:,} tokens", partial(read_prompt, length)) for length in prompts]


def heads_of(preset: str, group: int = 1, head_dim: int | None = None) -> dict[str, int]:
    """Return fields of a configuration: heads of another width, so another number, and a key head for each group.

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


def make_config(
    preset: str, name: str, window: int | None = None, global_every: int | None = None, **fields: Any
) -> FarspanConfig:
    """Make the configuration of an attention, or of a layout with its window."""
    if name.startswith("hybrid"):
        fields |= {k: v for k, v in {"window": window, "global_every": global_every}.items() if v is not None}
    config = FarspanConfig.preset(preset, attention=name, **fields)
    require(
        not any(spec.linear for spec in config.attention_specs),
        f"layouts must be of layers with a softmax, got {name!r}; time linear ones with farspan bench cosformer",
    )
    return config


def build(config: FarspanConfig, device: str, seed: int) -> FarspanForCausalLM:
    """Make a model of random weights. CoCA in all layers decodes on the half-width kernel where there is one."""
    torch.manual_seed(seed)
    kernel = reads_half_width(config) and why_no_kernel(config, device) is None
    config.decode_backend = "triton" if kernel else config.decode_backend
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
    """Whether every layer caches un-rotated t."""
    return all(spec.collinear for spec in config.attention_specs)


def decode(
    models: dict[str, FarspanForCausalLM],
    mode: str,
    context: int,
    batch: int,
    *,
    repeats: int,
    device: str,
    seed: int,
    eager: dict[str, tuple[Tensor, float]],
    orders: dict[str, str | None],
) -> list[Row]:
    """Return one row of figures for each model, or one row that tells why there are none.

    Args:
        eager: takes the logits of mode "eager" and their error, which the other modes are compared with.
        orders: takes the fastest order of SDPA's kernels of mode "graph", for mode "compiled", which cannot try.
    """
    label: Row = {"mode": mode, "context": context, "batch": batch}
    if mode == "graph" and device != "cuda":
        return [{"kind": "missing", **label, "why": "CUDA graphs need a CUDA device"}]
    spare = CHECKED + AT_ONCE * (max(repeats, 3) + 2) + 8
    figures: dict[str, Row] = {}
    decoders: dict[str, Decoder] = {}
    torch.compiler.reset()
    try:
        for name, model in models.items():
            decoder = decoders[name] = Decoder(model, mode, context, batch, spare=spare, seed=seed)
            decoder.order = orders.get(name) if mode == "compiled" else None
            if mode != "compiled":
                orders[name] = decoder.settle(device, orders_for(decoder, device), graph=mode == "graph")
            # Of the step as settled. A replayed graph allocates nothing: its pool holds what the plain step needs.
            extra = peak_bytes(decoder.plain_step, device)
            decoder.rewind()
            held, weights = decoder.cache.nbytes, sum(p.numel() * p.element_size() for p in model.parameters())
            figures[name] = check_steps(decoder, name, mode, eager) | {
                "decodes_on": decoder.decodes_on,
                "reads": decoder.reads,
                "bytes_a_step": decoder.bytes_a_step,
                "cache_bytes": held,
                "weight_bytes": weights,
                "peak_bytes": held + weights + extra,
            }
    except RuntimeError as error:
        if mode == "eager" or isinstance(error, ResultsDifferError):
            raise
        return [{"kind": "missing", **label, "why": reason(error)}]
    size = 2**31 if device == "cuda" else 2**22
    before = copy_speed(device, size)
    seconds = in_turn({name: x.several for name, x in decoders.items()}, repeats=repeats, device=device)
    copies = {"before": before, "after": copy_speed(device, size)}
    rows = []
    for name, found in seconds.items():
        times = quantiles([x / AT_ONCE for x in found])
        rate = figures[name]["bytes_a_step"] / times.median / 1e12
        row: Row = {"kind": "decode", **label, "attention": name, "milliseconds_a_step": times.milliseconds}
        row |= {"tokens_per_second": batch / times.median, "speed_over_rope": ratio(seconds["rope"], found).spread}
        row |= {"time_over_rope": ratio(found, seconds["rope"]).spread}
        row |= {"cache_over_rope": figures[name]["cache_bytes"] / figures["rope"]["cache_bytes"]}
        row |= {"terabytes_a_second": rate, "copy_terabytes_a_second": copies, "of_copy": rate / max(copies.values())}
        rows.append(row | figures[name])
    return rows


def best_modes(rows: list[Row]) -> list[Row]:
    """Return one row: for each model the mode with most tokens per second, and its speed over RoPE's best.

    A static cache costs SDPA a mask, and a growing one its launches, so no mode is RoPE's best everywhere.
    """
    found = [row for row in rows if row["kind"] == "decode"]
    each: dict[str, Row] = {}
    for name in dict.fromkeys(row["attention"] for row in found):
        row = max((row for row in found if row["attention"] == name), key=lambda row: row["tokens_per_second"])
        each[name] = {x: row[x] for x in ("mode", "decodes_on", "reads", "tokens_per_second", "cache_bytes")}
        each[name]["speed_over_rope"] = row["tokens_per_second"] / each["rope"]["tokens_per_second"]
    return [{"kind": "best", "context": found[0]["context"], "batch": found[0]["batch"], "each": each}]


class Decoder:
    """A model after a context, one greedy token for each sequence at a time: `token` (b, 1) is the newest.

    A step runs it, and takes the next from its `logits` (b, vocabulary).
    """

    def __init__(
        self, model: FarspanForCausalLM, mode: str, context: int, batch: int, *, spare: int, seed: int
    ) -> None:
        weight = model.lm_head.weight
        self.model, self.context, self.batch, self.seed = model, context, batch, seed
        self.slots = None if mode == "eager" else -(-(context + spare) // 128) * 128
        self.cache = FarspanCache(model.config, max_length=self.slots)
        self.rewind()
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=weight.dtype, device=weight.device)
        self.forward: Callable[..., Any] = model
        if mode == "compiled":
            options: dict[str, Any] = {"mode": "reduce-overhead"} if weight.is_cuda else {"backend": "aot_eager"}
            self.forward = torch.compile(model, fullgraph=True, dynamic=False, **options)
        self.order: str | None = None
        self.replay: Callable[[], Any] | None = None

    def rewind(self) -> None:
        """Write the context into the cache again: a window cannot take tokens back. Static storage stays in place."""
        self.cache.reset()
        fill(self.cache, self.model, self.batch, self.context, self.seed)

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
            self.logits.copy_(self.forward(self.token, past_key_values=self.cache).logits[:, -1])
            self.token.copy_(self.logits.argmax(dim=-1, keepdim=True))

    @property
    def decodes_on(self) -> str:
        """What computes the attention."""
        if self.model.config.decode_backend == "triton":
            return KERNEL
        return "library's choice" if self.order is None else f"SDPA, {self.order} first"

    @property
    def reads(self) -> str:
        """Which keys of a global layer a step reads: SDPA needs a mask to stop where a sequence ends."""
        return "tokens" if self.slots is None or self.decodes_on == KERNEL else f"all {self.slots} slots, masked"

    @property
    def bytes_a_step(self) -> int:
        """What a step has to read: every weight but the table of embeddings, and each sequence's keys and values."""
        weights = sum(p.nbytes for p in self.model.parameters())
        weights -= 0 if self.model.config.tie_word_embeddings else self.model.model.embed_tokens.weight.nbytes
        size = self.model.lm_head.weight.element_size()
        tokens = self.slots if self.reads != "tokens" and self.slots else self.context
        for block in self.model.model.layers:
            layer = block.self_attn
            seen = tokens if layer.spec.window is None else min(tokens, layer.spec.window - 1)
            weights += size * self.batch * seen * layer.num_key_heads * (layer.key_width + layer.head_dim)
        return weights

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


def orders_for(decoder: Decoder, device: str) -> list[str | None]:
    """Return the orders of SDPA's kernels to try: on a GPU all, but where the half-width kernel runs."""
    return [None] if device != "cuda" or decoder.decodes_on == KERNEL else list(ORDERS)


@torch.no_grad()
def fill(
    cache: FarspanCache, model: FarspanForCausalLM, batch: int, context: int, seed: int, rows: int | None = None
) -> None:
    """Write random keys and values of `context` tokens into every layer, in the model's dtype; of the first `rows`.

    The numbers depend neither on the kind of cache nor on the dtype.
    """
    like = model.lm_head.weight
    generator = torch.Generator(like.device).manual_seed(seed)
    for index, block in enumerate(model.model.layers):
        layer = block.self_attn
        keys, values = (
            torch.empty(batch, layer.num_key_heads, context, size, dtype=torch.bfloat16, device=like.device)
            .normal_(generator=generator)[:rows]
            .to(like.dtype)
            for size in (layer.key_width, layer.head_dim)
        )
        cache.update(keys.relu_() if layer.spec.collinear or layer.spec.polar else keys, values, index)


def check_steps(decoder: Decoder, name: str, mode: str, eager: dict[str, tuple[Tensor, float]]) -> Row:
    """Compare the first tokens' logits with float64 (the first sequence), and every other mode's with the eager ones.

    Greedy tokens of a mode may differ from the eager ones only where the eager logits are as good as equal: within the
    allowed difference, which is three times the eager error, its own and twice as much.
    """
    generator = torch.Generator().manual_seed(decoder.seed)
    vocabulary = decoder.model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (CHECKED, decoder.batch), generator=generator).to(decoder.token.device)
    logits = decoder.follow(tokens).double()
    rounding = torch.finfo(decoder.logits.dtype).eps / 2 * float(logits.abs().max())
    if mode == "eager":
        truth = exact(decoder, tokens)
        eager[name] = logits, float((logits[:, 0] - truth).abs().max())
        limit = EAGER[decoder.model.lm_head.weight.dtype]
        if decoder.decodes_on == KERNEL:  # whose error may be twice that of the same model on SDPA
            set_decode_backend(decoder.model, "sdpa")
            decoder.rewind()
            plain = decoder.follow(tokens)
            set_decode_backend(decoder.model, "triton")
            decoder.rewind()
            decoder.follow(tokens)  # so that the cache holds the kernel's tokens
            limit = 2 * far(plain[:, 0], truth) + rounding / float(truth.abs().max())
        check(f"{name}, a decoding step on the {decoder.decodes_on},", logits[:, 0], truth, limit=limit)
    first, error = eager[name]
    allowed = 3 * error + rounding
    difference = float((logits - first).abs().max())
    chosen, best = logits.argmax(-1, keepdim=True), first.amax(-1, keepdim=True)
    worse = float((best - first.gather(-1, chosen)).max())
    if not max(difference, worse) <= allowed:
        raise ResultsDifferError(
            f"{name}, {mode}: logits differ from the eager ones by {difference:.1e}, and greedy tokens are worse by "
            f"{worse:.1e} (allowed: {allowed:.1e})"
        )
    equal = float((chosen == first.argmax(-1, keepdim=True)).double().mean())
    return {"logit_error": error, "logit_difference": difference, "greedy_equal": equal}


@torch.no_grad()
def exact(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the first sequence's logits (steps, vocabulary) by the same model and cache in float64."""
    model = copy.deepcopy(decoder.model).double()
    set_decode_backend(model, "sdpa")  # no kernel takes float64
    cache = FarspanCache(model.config)
    fill(cache, model, decoder.batch, decoder.context, decoder.seed, rows=1)
    found = [model(given[None, :1], past_key_values=cache).logits[0, -1] for given in tokens]
    return torch.stack(found)


@torch.no_grad()
def prefill(models: dict[str, FarspanForCausalLM], length: int, *, device: str, repeats: int) -> list[Row]:
    """Read a prompt of random tokens through a growing cache, chunk by chunk: one row for each model.

    The logits that the last timed reading ended with are compared with those of the same weights in a wider dtype.
    """
    vocabulary = next(iter(models.values())).config.vocab_size
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    kept: dict[str, tuple[Tensor, int]] = {}

    def keep(name: str, model: FarspanForCausalLM) -> None:
        kept[name] = read(model, ids)

    calls = {name: partial(keep, name, model) for name, model in models.items()}
    peaks = {name: peak_bytes(call, device) for name, call in calls.items()}
    seconds = in_turn(calls, repeats=repeats, device=device, warm_up=0)
    rows = []
    for name, model in models.items():
        logits, held = kept[name]
        checked = check(f"{name}, a prompt of {length} tokens,", logits, read(wider(model), ids)[0])
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        median = quantiles(seconds[name]).median
        row: Row = {"kind": "prefill", "attention": name, "length": length, "batch": 1, "chunk": CHUNK}
        row |= {"seconds": seconds[name], "tokens_per_second": length / median, "weight_bytes": weights}
        row |= {"speed_over_rope": ratio(seconds["rope"], seconds[name]).median}
        row |= {"time_over_rope": ratio(seconds[name], seconds["rope"]).spread}
        row |= {"cache_bytes": held, "cache_over_rope": held / kept["rope"][1], "peak_bytes": weights + peaks[name]}
        rows.append(row | checked)
    return rows


@torch.no_grad()
def read(model: FarspanForCausalLM, ids: Tensor) -> tuple[Tensor, int]:
    """Read a prompt (1, n); return the logits (1, vocabulary) after its last token, and the cache's bytes."""
    cache = FarspanCache(model.config)
    for piece in ids.split(CHUNK, dim=1):
        logits: Tensor = model(piece, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return logits, cache.nbytes


def llama_steps(preset: str, *, layouts: Sequence[str] = VARIANTS, repeats: int, seed: int) -> Steps:
    """Time a decoded token of each model beside transformers' LLaMA of the same shape: eager, on a CPU, one thread."""

    def measure() -> list[Row]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = FarspanConfig.preset(preset)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        llama = LlamaConfig(**{name: getattr(config, name) for name in names}, tie_word_embeddings=True)
        models: dict[str, Any] = {"llama": LlamaForCausalLM(llama).eval()}
        models |= {name: build(make_config(preset, name), "cpu", seed) for name in layouts}
        found: dict[str, list[float]] = {name: [] for name in models}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for order in drawn_orders(models, repeats):
                for name in order:
                    found[name].append(seconds_per_token(models[name]))
        finally:
            torch.set_num_threads(threads)
        return [{"kind": "llama", "model": name, **ratio(x, found["llama"]).spread} for name, x in found.items()]

    return [("beside transformers' LLaMA", measure)]


@torch.no_grad()
def seconds_per_token(model: Any, context: int = 64, tokens: int = 60) -> float:
    """Return the seconds per token after a prompt."""
    ids = torch.zeros(1, context, dtype=torch.long)
    cache = model(ids, use_cache=True).past_key_values
    for count in (5, tokens):  # the first warm up
        began = time.perf_counter()
        for _ in range(count):
            model(ids[:, :1], past_key_values=cache)
    return (time.perf_counter() - began) / tokens


def tables(rows: list[Row]) -> list[Table | str]:
    """Tabulate speeds over RoPE's and what caches hold."""
    found: list[Table | str] = []
    decoded = [row for row in rows if row["kind"] == "decode"]
    sizes: dict[str, Callable[[Row], str]] = {
        "cache MB": lambda x: f"{x['cache_bytes'] / 1e6:,.1f}",
        "/ RoPE's": lambda x: f"{x['cache_over_rope']:.3f}",
        "peak GB": lambda x: f"{x['peak_bytes'] / 1e9:.2f}",
    }
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in decoded):
        found += table(
            f"one token after {context:,}, sequences at once: {batch}",
            [row for row in decoded if (row["context"], row["batch"]) == (context, batch)],
            {
                "attention, mode": lambda x: f"{x['attention']}, {x['mode']}",
                "speed / RoPE": lambda x: show(x["speed_over_rope"], 2),
                "tok/s": lambda x: f"{x['tokens_per_second']:,.0f}",
                **sizes,
            },
        )
    found += dict.fromkeys(f"{x['attention']}, {x['mode']}: {x['decodes_on']}, reads {x['reads']}" for x in decoded)
    for row in (row for row in rows if row["kind"] == "best"):
        each = [f"{name} ({x['mode']}) {x['speed_over_rope']:.2f}" for name, x in row["each"].items()]
        found.append(f"each in its best mode, over RoPE, {row['batch']} × {row['context']:,}: {', '.join(each)}")
    found += table(
        "reading a prompt, one sequence",
        [row for row in rows if row["kind"] == "prefill"],
        {
            "attention": lambda x: x["attention"],
            "tokens": lambda x: f"{x['length']:,}",
            "speed / RoPE": lambda x: f"{x['speed_over_rope']:.2f}",
            **sizes,
        },
    )
    beside = [row for row in rows if row["kind"] == "llama"]
    found += table("one token, eager", beside, {"model": lambda x: x["model"], "time / LLaMA": show})
    return [*found, *sorted({f"missing: {row['mode']}: {row['why']}" for row in rows if row["kind"] == "missing"})]
