"""One attention layer's work on long texts: CoCA, RoPE and ALiBi, against the published CoCA formulation."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError, agree
from farspan.benchmark.clock import quantiles
from farspan.benchmark.measure import in_fresh_process, in_turn, measure
from farspan.layers import AlibiAttention, Attention, CocaAttention, LayerCache, RopeAttention
from farspan.models import FarspanCache, FarspanConfig, FarspanForCausalLM
from farspan.ops import Rotary, alibi_attention, coca_attention, rope_attention
from farspan.ops.rotary import rotate

HEADS, WIDTH = 8, 64

LAYERS: dict[str, Callable[[], Attention]] = {
    "rope": lambda: RopeAttention(HEADS * WIDTH, HEADS),
    "coca-exact": lambda: CocaAttention(HEADS * WIDTH, HEADS, form="exact"),
    "coca-slack": lambda: CocaAttention(HEADS * WIDTH, HEADS, form="slack"),
    "coca-exact, window 512": lambda: CocaAttention(HEADS * WIDTH, HEADS, window=512),
    "alibi": lambda: AlibiAttention(HEADS * WIDTH, HEADS),
}


DECODERS: dict[str, dict[str, Any]] = {
    "rope": {"attention": "rope"},
    "coca-exact, half-width cache": {"attention": "coca-exact"},
    "coca-exact, rotated cache": {"attention": "coca-exact", "cache_layout": "rotated"},
    "coca-slack, half-width cache": {"attention": "coca-slack"},
}
PREFILL_LENGTHS = (512, 2048)
DECODE_LENGTHS = (512, 2048, 8192)

CHECKS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "rope": (rope_attention, {"rotary": Rotary(32)}),
    "coca-exact": (coca_attention, {"rotary": Rotary(32), "form": "exact"}),
    "coca-slack": (coca_attention, {"rotary": Rotary(32), "form": "slack"}),
    "coca-exact, window": (coca_attention, {"rotary": Rotary(32), "window": 50}),
    "alibi": (alibi_attention, {}),
}


def published_coca(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
    """Slack CoCA as its authors run it: a three-operand contraction, all N×N scores, full-width t (Eq. 18)."""
    n, width = q.shape[2], q.shape[3]
    angles = rotary.plan(0, n, n, device=q.device)[0].key
    turned = rotate(torch.cat((t, t), dim=-1), angles)
    scores = torch.einsum("bhid,bhid,bhjd->bhij", rotate(q, angles), q, turned) * width**-0.5
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1) @ v


def run(
    lengths: list[int], published_length: int, *, repeats: int, device: str, seed: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its rows) step by step; raise :class:`ResultsDifferError` before an untrue claim."""
    yield "fused against the equations, float64", [in_fresh_process(check, device, seed)]
    yield "cache bytes", [_cache_bytes()]
    for length in lengths:
        for name in LAYERS:
            yield f"{name} layer, {length} tokens", [in_fresh_process(_layer, name, length, repeats, device, seed)]
    for length in PREFILL_LENGTHS:
        yield f"reading {length} tokens", in_fresh_process(_prefill, length, 2 * repeats, device, seed)
    for length in DECODE_LENGTHS:
        yield f"one token after {length}", in_fresh_process(_decode, length, 10 * repeats, device, seed)
    row = in_fresh_process(_against_published, published_length, repeats, device, seed)
    yield f"published formulation, {published_length} tokens", [row]


def check(device: str, seed: int) -> dict[str, Any]:
    """Every contestant against its definition."""
    return agree(CHECKS, device, seed)


def _cache_bytes() -> dict[str, Any]:
    held = {}
    for name in ("rope", "coca-exact"):
        cache = LayerCache()
        with torch.no_grad():
            LAYERS[name]()(torch.randn(1, 128, HEADS * WIDTH), cache=cache)
        held[name] = cache.nbytes
    return {"kind": "cache", **held, "ratio": held["coca-exact"] / held["rope"]}


@torch.no_grad()
def _layer(name: str, length: int, repeats: int, device: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    layer, x = LAYERS[name]().to(device), torch.randn(1, length, HEADS * WIDTH, device=device)
    layer(x[:, :64])  # load kernels and start threads, which are not this layer's memory
    result = measure(lambda: layer(x), repeats=repeats, device=device)
    return {
        "kind": "layer",
        "attention": name,
        "length": length,
        "heads": HEADS,
        "head_dim": WIDTH,
        "seconds": result.seconds,
        "median": result.median,
        "peak_bytes": result.peak_bytes,
    }


def _models(device: str, seed: int) -> dict[str, FarspanForCausalLM]:
    """Two layers of each kind."""
    models = {}
    for name, options in DECODERS.items():
        torch.manual_seed(seed)
        config = FarspanConfig(
            vocab_size=256, hidden_size=HEADS * WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, **options
        )
        models[name] = FarspanForCausalLM(config).eval().to(device)
    return models


@torch.no_grad()
def _prefill(length: int, repeats: int, device: str, seed: int) -> list[dict[str, Any]]:
    """`length` tokens through two layers into an empty cache."""
    models = _models(device, seed)
    ids = torch.randint(0, 256, (1, length), device=device)
    calls = {name: partial(_read, model, ids) for name, model in models.items()}
    return _against_rope("prefill", length, calls, repeats, device)


@torch.no_grad()
def _decode(length: int, repeats: int, device: str, seed: int) -> list[dict[str, Any]]:
    """One token through two layers with `length` tokens in the cache."""
    models, caches = _models(device, seed), {}
    for name, model in models.items():
        caches[name] = _read(model, torch.randint(0, 256, (1, length), device=device))
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    calls = {name: partial(model, token, past_key_values=caches[name]) for name, model in models.items()}
    rows = _against_rope("decode", length, calls, repeats, device)
    for row in rows:
        cache = caches[row["attention"]]
        row["bytes_a_token"] = cache.nbytes // cache.get_seq_length()
    return rows


def _read(model: FarspanForCausalLM, ids: Tensor) -> FarspanCache:
    cache = FarspanCache(model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def _against_rope(
    kind: str, length: int, calls: Mapping[str, Callable[[], Any]], repeats: int, device: str
) -> list[dict[str, Any]]:
    """One row a contestant; its calls and RoPE's are neighbours in time, so that drift does not enter the ratio."""
    in_turn(calls, repeats=2, device=device)  # warms up, and makes room in the caches
    seconds, rows = in_turn(calls, repeats=repeats, device=device), []
    for name, found in seconds.items():
        ratio = quantiles([ours / theirs for ours, theirs in zip(found, seconds["rope"], strict=True)])
        over = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
        rows.append(
            {"kind": kind, "attention": name, "length": length, "median": statistics.median(found), "over_rope": over}
        )
    return rows


@torch.no_grad()
def _against_published(length: int, repeats: int, device: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    q, v = (torch.randn(1, HEADS, length, WIDTH, device=device) for _ in range(2))
    t = torch.rand(1, HEADS, length, WIDTH // 2, device=device)
    rotary = Rotary(WIDTH)
    calls = {
        "farspan": lambda: coca_attention(q, t, v, rotary=rotary, form="slack"),
        "published": lambda: published_coca(q, t, v, rotary),
    }
    coca_attention(q[:, :, :64], t[:, :, :64], v[:, :, :64], rotary=rotary)
    peaks = {name: measure(call, repeats=0, device=device).peak_bytes for name, call in calls.items()}
    seconds = in_turn(calls, repeats=repeats, device=device)
    difference = float((calls["farspan"]() - calls["published"]()).abs().max())
    if difference > 1e-3:
        raise ResultsDifferError(
            f"published and fused CoCA differ by {difference:.1e} at {length} tokens (allowed: 1e-3)"
        )
    ratios = [theirs / ours for ours, theirs in zip(seconds["farspan"], seconds["published"], strict=True)]
    return {
        "kind": "published",
        "form": "slack",
        "length": length,
        "heads": HEADS,
        "head_dim": WIDTH,
        "max_difference": difference,
        "seconds": seconds,
        "peak_bytes": peaks,
        "speedup": statistics.median(ratios),
        "memory_ratio": peaks["published"] / peaks["farspan"],
    }
