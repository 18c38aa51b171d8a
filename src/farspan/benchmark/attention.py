"""One attention layer's work on long texts: CoCA, RoPE and ALiBi, against the published CoCA formulation."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError, agree
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
}
DECODE_LENGTH = 8192

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
    for name in DECODERS:
        row = in_fresh_process(_decode, name, DECODE_LENGTH, 10 * repeats, device, seed)
        yield f"{name}, one token after {DECODE_LENGTH}", [row]
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


@torch.no_grad()
def _decode(name: str, length: int, repeats: int, device: str, seed: int) -> dict[str, Any]:
    """One token through two layers with `length` tokens in the cache."""
    torch.manual_seed(seed)
    width = HEADS * WIDTH
    config = FarspanConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=2, num_attention_heads=HEADS, **DECODERS[name]
    )
    model = FarspanForCausalLM(config).eval().to(device)
    cache = FarspanCache(config)
    model(torch.randint(0, 256, (1, length), device=device), past_key_values=cache, logits_to_keep=1)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    result = measure(lambda: model(token, past_key_values=cache), repeats=repeats, device=device)
    held = cache.nbytes // cache.get_seq_length()
    return {"kind": "decode", "attention": name, "length": length, "median": result.median, "bytes_a_token": held}


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
