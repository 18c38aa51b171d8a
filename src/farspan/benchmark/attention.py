"""One attention layer's work on long texts: CoCA, RoPE and ALiBi, against the published CoCA formulation."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.measure import in_fresh_process, measure
from farspan.layers import AlibiAttention, Attention, CocaAttention, LayerCache, RopeAttention
from farspan.ops import Rotary, coca_attention, coca_attention_reference
from farspan.ops.rotary import rotate

HEADS, WIDTH = 8, 64

LAYERS: dict[str, Callable[[], Attention]] = {
    "rope": lambda: RopeAttention(HEADS * WIDTH, HEADS),
    "coca-exact": lambda: CocaAttention(HEADS * WIDTH, HEADS, form="exact"),
    "coca-slack": lambda: CocaAttention(HEADS * WIDTH, HEADS, form="slack"),
    "coca-exact, window 512": lambda: CocaAttention(HEADS * WIDTH, HEADS, window=512),
    "alibi": lambda: AlibiAttention(HEADS * WIDTH, HEADS),
}


class ResultsDifferError(RuntimeError):
    """The contestants do not compute the same thing, so their speed means nothing."""


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
    yield "fused against the equations, float64", [in_fresh_process(_check, device, seed)]
    yield "cache bytes", [_cache_bytes()]
    for length in lengths:
        for name in LAYERS:
            yield f"{name} layer, {length} tokens", [in_fresh_process(_layer, name, length, repeats, device, seed)]
    row = in_fresh_process(_against_published, published_length, repeats, device, seed)
    yield f"published formulation, {published_length} tokens", [row]


def _check(device: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    worst = 0.0
    for form in ("exact", "slack"):
        q, v = (torch.randn(1, HEADS, 257, 32, dtype=torch.float64, device=device) for _ in range(2))
        t = torch.rand(1, HEADS, 257, 16, dtype=torch.float64, device=device)
        outputs = [op(q, t, v, rotary=Rotary(32), form=form) for op in (coca_attention, coca_attention_reference)]
        worst = max(worst, float((outputs[0] - outputs[1]).abs().max()))
    if worst > 1e-12:
        raise ResultsDifferError(f"fused and reference CoCA differ by {worst:.1e} in float64 (allowed: 1e-12)")
    return {"kind": "check", "max_difference": worst}


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
    results = {name: measure(call, repeats=repeats, device=device) for name, call in calls.items()}
    difference = float((calls["farspan"]() - calls["published"]()).abs().max())
    if difference > 1e-3:
        raise ResultsDifferError(
            f"published and fused CoCA differ by {difference:.1e} at {length} tokens (allowed: 1e-3)"
        )
    ours, theirs = results["farspan"], results["published"]
    return {
        "kind": "published",
        "form": "slack",
        "length": length,
        "heads": HEADS,
        "head_dim": WIDTH,
        "max_difference": difference,
        "seconds": {name: result.seconds for name, result in results.items()},
        "peak_bytes": {name: result.peak_bytes for name, result in results.items()},
        "speedup": theirs.median / ours.median,
        "memory_ratio": theirs.peak_bytes / ours.peak_bytes,
    }
