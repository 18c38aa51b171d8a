"""The whole model at inference: tokens a second after a long context, and reading one; CoCA against RoPE in turn."""

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.clock import captured, quantiles
from farspan.benchmark.layer_checks import reason
from farspan.benchmark.measure import in_turn, measure
from farspan.models import FarspanCache, FarspanConfig, FarspanForCausalLM

VARIANTS = ("rope", "coca-exact")
MODES = ("eager", "graph", "compiled")
"""A growing cache and plain calls, as `generate` does; a static cache and a CUDA graph of the step; and compiled."""
AT_ONCE = 8
"""Tokens a timing."""
CHECKED = 4
"""Tokens whose logits are compared before a clock starts."""
CHUNK = 8192
"""Tokens of a long prompt read at a time."""

Eager = dict[str, tuple[Tensor, float]]
"""Name → logits (steps, b, vocabulary) of mode "eager", and their error."""
Rows = Iterator[tuple[str, list[dict[str, Any]]]]


def run(
    preset: str = "350m",
    *,
    contexts: Sequence[int] = (512, 8192, 32_768),
    batches: Sequence[int] = (1, 8),
    prompts: Sequence[int] = (32_768, 131_072),
    compile: str = "one",
    repeats: int = 10,
    device: str = "cpu",
    seed: int = 0,
) -> Rows:
    """Yield (what was done, its rows); raises ResultsDifferError before a clock starts if a mode computes otherwise.

    Weights are bfloat16 on a GPU, float32 elsewhere, where "graph" is left out and torch.compile only traces.

    Args:
        contexts, batches: each decoded after each; the context is random numbers written into the cache.
        prompts: lengths of prompts of random tokens to read, in chunks, one text.
        compile: "all", or "none", or "one": at the longest context and the first batch, as it takes long.
    """
    models = {variant: make_model(preset, variant, device, seed) for variant in VARIANTS}
    for context in contexts:
        for batch in batches:
            wanted = compile == "all" or (compile == "one" and (context, batch) == (max(contexts), batches[0]))
            eager: Eager = {}
            for mode in MODES[: 3 if wanted else 2]:
                rows = decode(models, mode, context, batch, repeats=repeats, device=device, seed=seed, eager=eager)
                yield f"{mode}, {batch} × {context} tokens", rows
    for length in prompts:
        yield f"prompt of {length} tokens", prefill(models, length, device=device)


def make_model(preset: str, variant: str, device: str, seed: int) -> FarspanForCausalLM:
    torch.manual_seed(seed)
    model = FarspanForCausalLM(FarspanConfig.preset(preset, attention=variant)).eval()
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


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

    They are as wide as the model's own. Numbers do not depend on the kind of cache, nor on like's dtype.
    """
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    generator = torch.Generator(like.device).manual_seed(seed)
    for index, spec in enumerate(config.attention_specs):
        width = config.head_dim // 2 if spec.kind == "coca" else config.head_dim
        for_keys, for_values = (
            torch.empty(batch, config.num_key_value_heads, context, size, dtype=torch.bfloat16, device=like.device)
            .normal_(generator=generator)[:rows]
            .to(like.dtype)
            for size in (width, config.head_dim)
        )
        cache.update(for_keys.relu_() if spec.kind == "coca" else for_keys, for_values, index)


class Decoder:
    """A model after a context, one greedy token for each text at a time: `token` (b, 1) is the newest.

    `step` runs one token and takes the next from its `logits` (b, vocabulary).
    """

    def __init__(self, model: FarspanForCausalLM, mode: str, context: int, batch: int, *, room: int, seed: int) -> None:
        weight = model.lm_head.weight
        self.model, self.context = model, context
        slots = -(-(context + room) // 128) * 128
        self.cache = FarspanCache(model.config, max_length=None if mode == "eager" else slots)
        fill(self.cache, model.config, batch, context, seed, weight)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.logits = torch.zeros(batch, model.config.vocab_size, dtype=weight.dtype, device=weight.device)
        self.forward: Callable[..., Any] = model
        if mode == "compiled":
            options: dict[str, Any] = {"mode": "reduce-overhead"} if weight.is_cuda else {"backend": "aot_eager"}
            self.forward = torch.compile(model, fullgraph=True, dynamic=False, **options)
        self.step: Callable[[], Any] = self._step

    @torch.no_grad()
    def _step(self) -> None:
        self.logits.copy_(self.forward(self.token, past_key_values=self.cache).logits[:, -1])
        self.token.copy_(self.logits.argmax(dim=-1, keepdim=True))

    def rewind(self) -> None:
        """Forget all but the context."""
        ahead = self.cache.get_seq_length() - self.context
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):  # the slots stay as they are: what lies ahead is masked
                torch.as_tensor(layer.cumulative_length).fill_(self.context)
            elif isinstance(layer, DynamicLayer):
                layer.crop(-ahead)

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


def decode(
    models: dict[str, FarspanForCausalLM],
    mode: str,
    context: int,
    batch: int,
    *,
    repeats: int,
    device: str,
    seed: int,
    eager: Eager,
) -> list[dict[str, Any]]:
    """One row of figures for each model, or one row that says why there are none.

    `eager` takes the logits of mode "eager", for the other modes of the same context and batch to be compared with.
    """
    label = {"mode": mode, "context": context, "batch": batch}
    if mode == "graph" and device != "cuda":
        return [{"kind": "missing", **label, "why": "CUDA graphs need a CUDA device"}]
    room = CHECKED + AT_ONCE * (repeats + 2) + 8
    figures: dict[str, dict[str, Any]] = {}
    decoders: dict[str, Decoder] = {}
    torch.compiler.reset()
    try:
        for name, model in models.items():
            decoder = decoders[name] = Decoder(model, mode, context, batch, room=room, seed=seed)
            extra = measure(decoder.step, repeats=0, device=device).peak_bytes
            if mode == "graph":
                decoder.step = captured(decoder.step)
            decoder.rewind()
            figures[name] = check(decoder, name, mode, batch, seed, eager)
            held, weights = decoder.cache.nbytes, sum(p.numel() * p.element_size() for p in model.parameters())
            figures[name] |= {"cache_bytes": held, "weight_bytes": weights, "peak_bytes": held + weights + extra}
    except RuntimeError as error:
        if mode == "eager" or isinstance(error, ResultsDifferError):
            raise
        return [{"kind": "missing", **label, "why": reason(error)}]
    seconds = in_turn({name: x.several for name, x in decoders.items()}, repeats=repeats + 1, device=device)
    return report(label, {name: found[1:] for name, found in seconds.items()}, figures)  # the first one warms up


def report(
    label: dict[str, Any], seconds: dict[str, list[float]], figures: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row for each model, with its tokens a second and those of the first; ratios are of neighbours in time."""
    first, rows = next(iter(seconds)), []
    for name, found in seconds.items():
        times = quantiles([x / AT_ONCE for x in found])
        speedup = quantiles([theirs / ours for ours, theirs in zip(found, seconds[first], strict=True)])
        rows.append(
            {
                "kind": "decode",
                **label,
                "attention": name,
                "milliseconds_a_step": times.milliseconds,
                "tokens_per_second": label["batch"] / times.median,
                f"speed_over_{first}": {"median": speedup.median, "low": speedup.low, "high": speedup.high},
                f"cache_over_{first}": figures[name]["cache_bytes"] / figures[first]["cache_bytes"],
                **figures[name],
            }
        )
    return rows


def check(decoder: Decoder, name: str, mode: str, batch: int, seed: int, eager: Eager) -> dict[str, Any]:
    """Compare the first tokens' logits with float64 (the first text), and every other mode's with the eager ones.

    Greedy tokens of a mode may differ from the eager ones only where the eager logits are as good as equal: within the
    allowed difference, which is three times the eager error, its own and twice as much.
    """
    vocabulary = decoder.model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (CHECKED, batch), generator=generator).to(decoder.token.device)
    logits = decoder.follow(tokens).double()
    if mode == "eager":
        eager[name] = logits, float((logits[:, 0] - exact(decoder, tokens, batch, seed)).abs().max())
    first, error = eager[name]
    allowed = 3 * error + torch.finfo(decoder.logits.dtype).eps / 2 * float(first.abs().max())
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
def exact(decoder: Decoder, tokens: Tensor, batch: int, seed: int) -> Tensor:
    """The first text's logits (steps, vocabulary) by the same model and cache in float64."""
    model = copy.deepcopy(decoder.model).double()
    cache = FarspanCache(model.config)
    fill(cache, model.config, batch, decoder.context, seed, model.lm_head.weight, rows=1)
    steps = [model(given[None, :1], past_key_values=cache).logits[0, -1] for given in tokens]
    return torch.stack(steps)


def prefill(
    models: dict[str, FarspanForCausalLM], length: int, *, device: str, repeats: int = 2
) -> list[dict[str, Any]]:
    """One row for each model: reading a prompt of random tokens through a growing cache, chunk by chunk."""
    first = next(iter(models))
    vocabulary = models[first].config.vocab_size
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    calls = {name: partial(read, model, ids) for name, model in models.items()}
    peaks = {name: measure(call, repeats=0, device=device).peak_bytes for name, call in calls.items()}
    seconds = in_turn(calls, repeats=repeats, device=device)
    rows = []
    for name, model in models.items():
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        median = statistics.median(seconds[name])
        row = {"kind": "prefill", "attention": name, "length": length, "batch": 1, "chunk": CHUNK}
        row |= {"seconds": seconds[name], "tokens_per_second": length / median, "weight_bytes": weights}
        row |= {f"speed_over_{first}": statistics.median(seconds[first]) / median}
        rows.append(row | {"peak_bytes": weights + peaks[name]})
    return rows


@torch.no_grad()
def read(model: FarspanForCausalLM, ids: Tensor) -> int:
    """Read a prompt; the bytes of its cache."""
    cache = FarspanCache(model.config)
    for piece in ids.split(CHUNK, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache.nbytes
