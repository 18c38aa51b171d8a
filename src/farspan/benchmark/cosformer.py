"""Causal cosFormer on a CPU: against its published formulation, against softmax attention, and its growth."""

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError, agree
from farspan.benchmark.attention import CHECKED, HEADS, WIDTH
from farspan.benchmark.measure import in_fresh_process, in_turn, measure
from farspan.benchmark.truth import as_timed
from farspan.ops import Rotary, cosformer_attention, linear_coca_attention
from farspan.ops.cosformer import BEYOND

CHECKS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    **{f"cosformer, {beyond}": (cosformer_attention, {"max_length": 257, "beyond": beyond}) for beyond in BEYOND},
    "linear": (cosformer_attention, {"max_length": 257, "reweight": False}),
    "linear coca": (linear_coca_attention, {"rotary": Rotary(32)}),
}
PASSES = ("forward", "forward and backward")


def published_cosformer(q: Tensor, k: Tensor, v: Tensor, max_length: int) -> Tensor:
    """Causal cosFormer as its authors' code has it: k⊗v for each position, N×2d×d, and its running sum beside it."""
    index = torch.arange(1, q.shape[2] + 1, device=q.device, dtype=q.dtype)
    angle = (math.pi / 2 * index / max_length)[:, None]
    q_, k_ = (torch.cat((x.relu() * angle.sin(), x.relu() * angle.cos()), dim=-1) for x in (q, k))
    products = torch.einsum("bhld,bhlm->bhldm", k_, v)
    sums = torch.cumsum(products, dim=2)
    numerator = torch.einsum("bhld,bhldm->bhlm", q_, sums)
    denominator = torch.einsum("bhld,bhld->bhl", q_, torch.cumsum(k_, dim=2))
    return numerator * (1 / denominator.clamp(min=1e-6))[..., None]


def run(
    lengths: list[int], peer_lengths: list[int], published_length: int, *, repeats: int, device: str, seed: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its rows) step by step; raise :class:`ResultsDifferError` before an untrue claim."""
    yield "chunked against the definition, float64", [in_fresh_process(_check, device, seed)]
    growth = []
    for length in lengths:
        growth.append(in_fresh_process(_length, length, repeats, device, seed))
        yield f"cosFormer, {length} tokens", [growth[-1]]
    if len(growth) > 1:
        yield "growth", [fit([row["length"] for row in growth], [row["median"] for row in growth])]
    peers = []
    for length in peer_lengths:
        peers.append(in_fresh_process(_against_softmax, length, repeats, device, seed))
        yield f"softmax attention, {length} tokens", [peers[-1]]
    yield "crossover", [crossover(peers)]
    for passes in PASSES:
        row = in_fresh_process(_against_published, published_length, passes, repeats, device, seed)
        yield f"published formulation, {passes}, {published_length} tokens", [row]


def parts(lengths: list[int], peer_lengths: list[int]) -> int:
    """How many steps :func:`run` yields; of a single length it finds no growth.

    >>> parts([1024, 4096], [256]), parts([1024], [256])
    (8, 6)
    """
    return 1 + len(lengths) + (len(lengths) > 1) + len(peer_lengths) + 1 + len(PASSES)


def fit(lengths: list[int], seconds: list[float]) -> dict[str, Any]:
    """The power law seconds = c·length^exponent by least squares on logarithms; 1 is linear.

    >>> fit([1000, 2000, 4000], [0.1, 0.2, 0.4])["exponent"]
    1.0
    """
    x, y = ([math.log(value) for value in values] for values in (lengths, seconds))
    slope, intercept = statistics.linear_regression(x, y)
    far = max(abs(math.exp(b - slope * a - intercept) - 1) for a, b in zip(x, y, strict=True))
    return {"kind": "fit", "lengths": lengths, "exponent": round(slope, 4), "largest_deviation": far}


def crossover(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The shortest measured length from which on cosFormer was faster at every longer one; None if at none.

    >>> crossover([{"length": n, "speedup": s} for n, s in ((256, 2.0), (512, 0.9), (1024, 1.1), (2048, 1.5))])
    {'kind': 'crossover', 'length': 1024}
    """
    shortest = None
    for row in sorted(rows, key=lambda row: -row["length"]):
        if row["speedup"] <= 1:
            break
        shortest = row["length"]
    return {"kind": "crossover", "length": shortest}


def _inputs(length: int, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, device=device) for _ in range(3))
    return q, k, v


def _check(device: str, seed: int) -> dict[str, Any]:
    return agree(CHECKS, device, seed)


@torch.no_grad()
def _length(length: int, repeats: int, device: str, seed: int) -> dict[str, Any]:
    q, k, v = _inputs(length, device, seed)
    cosformer_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], max_length=64)  # load kernels and start threads
    kept: dict[str, Tensor] = {}
    result = measure(
        lambda: kept.update(out=cosformer_attention(q, k, v, max_length=length)), repeats=repeats, device=device
    )
    return {
        "kind": "length",
        "length": length,
        "heads": HEADS,
        "head_dim": WIDTH,
        "seconds": result.seconds,
        "median": result.median,
        "peak_bytes": result.peak_bytes,
        **_check_last(kept["out"], q, k, v),
    }


def _check_last(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Fields of a row: how far the last outputs of a timed call are from the definition in float64."""
    n, query = k.shape[2], q[:, :, -CHECKED:].double()
    want = cosformer_attention(query, k.double(), v.double(), max_length=n, backend="reference")
    return as_timed(f"cosformer, {n} tokens", out[:, :, -CHECKED:], want)


@torch.no_grad()
def _against_softmax(length: int, repeats: int, device: str, seed: int) -> dict[str, Any]:
    """Speed alone: the two are different functions."""
    q, k, v = _inputs(length, device, seed)
    calls: dict[str, Callable[[], Tensor]] = {
        "cosformer": lambda: cosformer_attention(q, k, v, max_length=length),
        "softmax": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    outs = {name: call() for name, call in calls.items()}
    checked = _check_last(outs["cosformer"], q, k, v)
    seconds = in_turn(calls, repeats=repeats, device=device)
    ratios = [theirs / ours for ours, theirs in zip(seconds["cosformer"], seconds["softmax"], strict=True)]
    row: dict[str, Any] = {"kind": "softmax", "length": length, "heads": HEADS, "head_dim": WIDTH}
    return row | {"seconds": seconds, "speedup": statistics.median(ratios)} | checked


def _against_published(length: int, passes: str, repeats: int, device: str, seed: int) -> dict[str, Any]:
    inputs = _inputs(length, device, seed)
    backward = passes != "forward"
    for x in inputs:
        x.requires_grad_(backward)

    def call(op: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(backward):
            out = op(*inputs, max_length=length)
            return (out, *torch.autograd.grad(out.sum(), inputs)) if backward else (out,)

    calls = {"farspan": lambda: call(cosformer_attention), "published": lambda: call(published_cosformer)}
    cosformer_attention(*(x[:, :, :64] for x in inputs), max_length=64)
    peaks = {name: measure(once, repeats=0, device=device).peak_bytes for name, once in calls.items()}
    seconds = in_turn(calls, repeats=repeats, device=device)
    pairs = zip(*(once() for once in calls.values()), strict=True)
    difference = max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)
    if difference > 1e-3:
        raise ResultsDifferError(
            f"published and chunked cosFormer differ by {difference:.1e} of the largest value at {length} tokens "
            "(allowed: 1e-3)"
        )
    ratios = [theirs / ours for ours, theirs in zip(seconds["farspan"], seconds["published"], strict=True)]
    return {
        "kind": "published",
        "passes": passes,
        "length": length,
        "heads": HEADS,
        "head_dim": WIDTH,
        "max_difference": difference,
        "seconds": seconds,
        "peak_bytes": peaks,
        "speedup": statistics.median(ratios),
        # a small peak may hide in memory that was free already
        "memory_ratio": peaks["published"] / peaks["farspan"] if peaks["farspan"] else None,
    }
