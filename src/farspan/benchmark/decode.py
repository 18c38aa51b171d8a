"""The whole model at inference: tokens a second after a long context, and reading one; CoCA against RoPE in turn."""

import copy
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError, reason
from farspan.benchmark.clock import copy_speed, quantiles
from farspan.benchmark.decoder import (
    AT_ONCE,
    KERNEL,
    VARIANTS,
    Decoder,
    fill,
    heads_of,
    make_model,
    orders_for,
    why_no_kernel,
)
from farspan.benchmark.measure import in_turn, measure
from farspan.benchmark.truth import as_timed, far, refuse_beyond, set_decode_backend, wider
from farspan.modeling_farspan import FarspanCache, FarspanForCausalLM

MODES = ("eager", "graph", "compiled")
"""A growing cache and plain calls, as `generate` does; a static cache and a CUDA graph of the step; and compiled."""
CHECKED = 4
"""Tokens whose logits are compared before any time that is reported."""
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
    group: int = 1,
    head_dim: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Rows:
    """Yield (what was done, its rows); raises ResultsDifferError, and no times, if a mode computes otherwise.

    Weights are bfloat16 on a GPU, float32 elsewhere, where "graph" is left out and torch.compile only traces. Modes
    "graph" and "compiled" have a static cache, of which SDPA, so also RoPE, reads every slot with a mask, while the
    half-width kernel stops where the text ends: a row's "reads" says which, and "best" takes each model's best mode.

    Args:
        contexts, batches: each decoded after each; the context is random numbers written into the cache.
        prompts: lengths of prompts of random tokens to read, in chunks, one text.
        compile: "all", or "none", or "one": at the longest context and the first batch, as it takes long.
        group, head_dim: query heads a key head, and their width if not the preset's (:func:`heads_of`); rows say which.
    """
    fields = heads_of(preset, group, head_dim)
    models = {variant: make_model(preset, variant, device, seed, **fields) for variant in VARIANTS}
    sizes = dict(zip(("heads", "key_heads", "head_dim"), fields.values(), strict=True))
    refusals = {why_no_kernel(model.config, device) for model in models.values()} - {None}
    yield KERNEL, [{"kind": "missing", "mode": KERNEL, "why": why} for why in refusals]
    for context, batch, modes in _plan(contexts, batches, compile):
        eager: Eager = {}
        orders: dict[str, str | None] = {}
        found: list[dict[str, Any]] = []
        for mode in modes:
            shared: dict[str, Any] = {"device": device, "seed": seed, "eager": eager, "orders": orders}
            rows = decode(models, mode, context, batch, repeats=repeats, **shared)
            found += rows
            yield f"{mode}, {batch} × {context} tokens", [row | sizes for row in rows]
        yield f"best, {batch} × {context} tokens", [row | sizes for row in best(found)]
    for length in prompts:
        rows = prefill(models, length, device=device, repeats=repeats)
        yield f"prompt of {length} tokens", [row | sizes for row in rows]


def parts(contexts: Sequence[int], batches: Sequence[int], prompts: Sequence[int], compile: str) -> int:
    """How many steps :func:`run` yields.

    >>> parts([512, 8192], [1, 8], [32_768], "one")  # the kernel, eager, graph and best of each, one compiled, a prompt
    15
    """
    return 1 + sum(len(modes) + 1 for _, _, modes in _plan(contexts, batches, compile)) + len(prompts)


def _plan(contexts: Sequence[int], batches: Sequence[int], compile: str) -> list[tuple[int, int, tuple[str, ...]]]:
    """Each context and batch, and the modes it is decoded in."""
    pairs = [(context, batch) for context in contexts for batch in batches]
    compiled = pairs if compile == "all" else [(max(contexts), batches[0])] if compile == "one" else []
    return [(*pair, MODES if pair in compiled else MODES[:2]) for pair in pairs]


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
    orders: dict[str, str | None],
) -> list[dict[str, Any]]:
    """One row of figures for each model, or one row that says why there are none.

    `eager` takes the logits of mode "eager", for the other modes of the same context and batch to be compared with;
    `orders` what mode "graph" found the fastest order of SDPA's kernels, for mode "compiled", which cannot try.
    """
    label = {"mode": mode, "context": context, "batch": batch}
    if mode == "graph" and device != "cuda":
        return [{"kind": "missing", **label, "why": "CUDA graphs need a CUDA device"}]
    room = CHECKED + AT_ONCE * (max(repeats, 3) + 2) + 8
    figures: dict[str, dict[str, Any]] = {}
    decoders: dict[str, Decoder] = {}
    torch.compiler.reset()
    try:
        for name, model in models.items():
            decoder = decoders[name] = Decoder(model, mode, context, batch, room=room, seed=seed)
            decoder.order = orders.get(name) if mode == "compiled" else None
            if mode != "compiled":
                orders[name] = decoder.settle(device, orders_for(decoder, device), graph=mode == "graph")
            if mode == "eager":
                decoder.renew()  # so that the room it makes is counted, whether or not orders were tried
            # Of the step as settled. A replayed graph allocates nothing: its pool holds what the plain step needs.
            extra = measure(decoder.plain_step, repeats=0, device=device).peak_bytes
            decoder.rewind()
            figures[name] = check(decoder, name, mode, batch, seed, eager)
            figures[name] |= {"decodes_on": decoder.decodes_on, "reads": decoder.reads}
            figures[name] |= {"bytes_a_step": decoder.bytes_a_step}
            held, weights = decoder.cache.nbytes, sum(p.numel() * p.element_size() for p in model.parameters())
            figures[name] |= {"cache_bytes": held, "weight_bytes": weights, "peak_bytes": held + weights + extra}
    except RuntimeError as error:
        if mode == "eager" or isinstance(error, ResultsDifferError):
            raise
        return [{"kind": "missing", **label, "why": reason(error)}]
    size = 2**31 if device == "cuda" else 2**22
    before = copy_speed(device, size)
    seconds = in_turn({name: x.several for name, x in decoders.items()}, repeats=repeats + 1, device=device)
    copies = {"before": before, "after": copy_speed(device, size)}
    return report(label, {name: found[1:] for name, found in seconds.items()}, figures, copies)  # the first warms up


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row: for each model the mode with most tokens a second, and by how much it is faster than the first's.

    A static cache costs SDPA a mask, and a growing one its launches; so none is RoPE's best everywhere.
    """
    found = [row for row in rows if row["kind"] == "decode"]
    chosen = {
        name: max((row for row in found if row["attention"] == name), key=lambda row: row["tokens_per_second"])
        for name in dict.fromkeys(row["attention"] for row in found)
    }
    first = next(iter(chosen))
    each = {
        name: {
            "mode": row["mode"],
            "decodes_on": row["decodes_on"],
            "reads": row["reads"],
            "tokens_per_second": row["tokens_per_second"],
            f"speed_over_{first}": row["tokens_per_second"] / chosen[first]["tokens_per_second"],
        }
        for name, row in chosen.items()
    }
    return [{"kind": "best", "context": found[0]["context"], "batch": found[0]["batch"], "each": each}]


def report(
    label: dict[str, Any],
    seconds: dict[str, list[float]],
    figures: dict[str, dict[str, Any]],
    copies: dict[str, float],
) -> list[dict[str, Any]]:
    """One row for each model, with its tokens a second and those of the first; ratios are of neighbours in time.

    `of_copy`: what it reads a second, as a part of the better of the copies right before and after.
    """
    first, rows = next(iter(seconds)), []
    for name, found in seconds.items():
        times = quantiles([x / AT_ONCE for x in found])
        rate = figures[name]["bytes_a_step"] / times.median / 1e12
        speedup = quantiles([theirs / ours for ours, theirs in zip(found, seconds[first], strict=True)])
        rows.append(
            {
                "kind": "decode",
                **label,
                "attention": name,
                "milliseconds_a_step": times.milliseconds,
                "tokens_per_second": label["batch"] / times.median,
                f"speed_over_{first}": speedup.spread,
                f"cache_over_{first}": figures[name]["cache_bytes"] / figures[first]["cache_bytes"],
                "terabytes_a_second": rate,
                "copy_terabytes_a_second": copies,
                "of_copy": rate / max(copies.values()),
                **figures[name],
            }
        )
    return rows


EAGER = {torch.bfloat16: 0.1, torch.float32: 1e-4}
"""How far logits of decoding steps may be from float64, as a part of the largest: random weights in 24 layers come to
0.04 in bfloat16."""


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
        truth = exact(decoder, tokens, batch, seed)
        eager[name] = logits, float((logits[:, 0] - truth).abs().max())
        if decoder.decodes_on == KERNEL:
            check_kernel(decoder, name, tokens, truth, eager[name][1])
        bound = EAGER[decoder.model.lm_head.weight.dtype]
        refuse_beyond(bound, far(logits[:, 0], truth), f"{name}, a decoding step", truth)
    first, error = eager[name]
    allowed = 3 * error + _rounding(first, decoder)
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


def check_kernel(decoder: Decoder, name: str, tokens: Tensor, truth: Tensor, error: float) -> None:
    """Raise if the error of the kernel's logits is more than twice that of the same model on SDPA."""
    decoder.rewind()
    set_decode_backend(decoder.model, "sdpa")
    plain = decoder.follow(tokens).double()
    set_decode_backend(decoder.model, "triton")
    decoder.rewind()
    decoder.follow(tokens)  # so that the cache holds the kernel's tokens
    allowed = 2 * float((plain[:, 0] - truth).abs().max()) + _rounding(plain, decoder)
    if not error <= allowed:
        raise ResultsDifferError(f"{name}, {KERNEL}: logits are wrong by {error:.1e} (allowed: {allowed:.1e})")


def _rounding(logits: Tensor, decoder: Decoder) -> float:
    """What rounding the logits alone may come to."""
    return torch.finfo(decoder.logits.dtype).eps / 2 * float(logits.abs().max())


@torch.no_grad()
def exact(decoder: Decoder, tokens: Tensor, batch: int, seed: int) -> Tensor:
    """The first text's logits (steps, vocabulary) by the same model and cache in float64."""
    model = copy.deepcopy(decoder.model).double()
    set_decode_backend(model, "sdpa")  # no kernel takes float64
    cache = FarspanCache(model.config)
    fill(cache, model.config, batch, decoder.context, seed, model.lm_head.weight, rows=1)
    steps = [model(given[None, :1], past_key_values=cache).logits[0, -1] for given in tokens]
    return torch.stack(steps)


@torch.no_grad()
def prefill(models: dict[str, FarspanForCausalLM], length: int, *, device: str, repeats: int) -> list[dict[str, Any]]:
    """One row for each model: reading a prompt of random tokens through a growing cache, chunk by chunk.

    Raises:
        ResultsDifferError: the logits that the last timed reading ended with are not those of the same weights in a
            wider dtype (:func:`as_timed`).
    """
    first = next(iter(models))
    vocabulary = models[first].config.vocab_size
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    kept: dict[str, Tensor] = {}
    calls = {name: partial(_keep, kept, name, model, ids) for name, model in models.items()}
    peaks = {name: measure(call, repeats=0, device=device).peak_bytes for name, call in calls.items()}
    seconds = in_turn(calls, repeats=repeats, device=device)
    rows = []
    for name, model in models.items():
        checked = as_timed(f"{name}, a prompt of {length} tokens", kept[name], read(wider(model), ids))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        median = statistics.median(seconds[name])
        row = {"kind": "prefill", "attention": name, "length": length, "batch": 1, "chunk": CHUNK}
        row |= {"seconds": seconds[name], "tokens_per_second": length / median, "weight_bytes": weights}
        row |= {f"speed_over_{first}": statistics.median(seconds[first]) / median}
        rows.append(row | {"peak_bytes": weights + peaks[name]} | checked)
    return rows


def _keep(kept: dict[str, Tensor], name: str, model: FarspanForCausalLM, ids: Tensor) -> None:
    kept[name] = read(model, ids)


@torch.no_grad()
def read(model: FarspanForCausalLM, ids: Tensor) -> Tensor:
    """Read a prompt (1, n); the logits (1, vocabulary) after its last token."""
    cache = FarspanCache(model.config)
    for piece in ids.split(CHUNK, dim=1):
        logits: Tensor = model(piece, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return logits
