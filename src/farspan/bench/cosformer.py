"""Causal cosFormer: its growth, beside softmax attention and as published; on a GPU its kernels and their peers."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.bench import Row, Steps, Table, table
from farspan.bench.attention import HEADS, LAST, WIDTH, beside_published
from farspan.bench.checks import LOOSE, check, worst
from farspan.bench.layer import PASSES, missing_lines, show, worst_line
from farspan.bench.timing import in_turn, measure_once, peak_bytes, quantiles, ratio, time_candidates
from farspan.ops import cosformer_attention, cosformer_attention_reference

LENGTHS = [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]
QUICK = [2048, 16_384]
TOKENS = 65_536
"""Tokens of a row of the GPU's table: shorter sequences come in larger batches."""
WIDTHS = (64, 128)
OURS = "triton"


def published_cosformer(q: Tensor, k: Tensor, v: Tensor, max_length: int) -> Tensor:
    """Compute causal cosFormer as its authors' code does: k⊗v for each position, N×2d×d, and its running sum."""
    index = torch.arange(1, q.shape[2] + 1, device=q.device, dtype=q.dtype)
    angle = (math.pi / 2 * index / max_length)[:, None]
    q_, k_ = (torch.cat((x.relu() * angle.sin(), x.relu() * angle.cos()), dim=-1) for x in (q, k))
    sums = torch.cumsum(torch.einsum("bhld,bhlm->bhldm", k_, v), dim=2)
    numerator = torch.einsum("bhld,bhldm->bhlm", q_, sums)
    denominator = torch.einsum("bhld,bhld->bhl", q_, torch.cumsum(k_, dim=2))
    return numerator * (1 / denominator.clamp(min=1e-6))[..., None]


def steps(
    lengths: Sequence[int], peer_lengths: Sequence[int], published_length: int, *, repeats: int, device: str, seed: int
) -> Steps:
    """Measure growth with length, softmax attention, and the published formulation; on a CPU."""
    growth: list[Row] = []
    peers: list[Row] = []

    def kept(into: list[Row], function: Callable[..., Row], *arguments: Any) -> list[Row]:
        into.append(function(*arguments, repeats, device, seed))
        return into[-1:]

    found: Steps = [(f"cosFormer, {n:,} tokens", partial(kept, growth, time_length, n)) for n in lengths]
    if len(lengths) > 1:
        found.append(("growth", lambda: [fit([x["length"] for x in growth], [x["median"] for x in growth])]))
    found += [(f"softmax attention, {n:,} tokens", partial(kept, peers, against_softmax, n)) for n in peer_lengths]
    found.append(("crossover", lambda: [crossover(peers)]))
    for passes in PASSES:
        label = f"published formulation, {passes}, {published_length:,} tokens"
        found.append((label, partial(kept, [], against_published, published_length, passes)))
    return found


def fit(lengths: list[int], seconds: list[float]) -> Row:
    """Fit seconds = c·length^exponent by least squares on logarithms; 1 is linear.

    >>> fit([1000, 2000, 4000], [0.1, 0.2, 0.4])["exponent"]
    1.0
    """
    x, y = ([math.log(value) for value in values] for values in (lengths, seconds))
    slope, intercept = statistics.linear_regression(x, y)
    deviation = max(abs(math.exp(b - slope * a - intercept) - 1) for a, b in zip(x, y, strict=True))
    return {"kind": "fit", "lengths": lengths, "exponent": round(slope, 4), "largest_deviation": deviation}


def crossover(rows: list[Row]) -> Row:
    """Find the shortest measured length from which on cosFormer was faster at every longer one; None if at none.

    >>> crossover([{"length": n, "speedup": s} for n, s in ((256, 2.0), (512, 0.9), (1024, 1.1), (2048, 1.5))])
    {'kind': 'crossover', 'length': 1024}
    """
    shortest = None
    for row in sorted(rows, key=lambda row: -row["length"]):
        if row["speedup"] <= 1:
            break
        shortest = row["length"]
    return {"kind": "crossover", "length": shortest}


def random_inputs(length: int, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v; their beginning was run, to load kernels and start threads."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, device=device) for _ in range(3))
    cosformer_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], max_length=64)
    return q, k, v


@torch.no_grad()
def time_length(length: int, repeats: int, device: str, seed: int) -> Row:
    """Time the op and measure its memory at one length."""
    q, k, v = random_inputs(length, device, seed)
    kept: dict[str, Tensor] = {}

    def call() -> None:
        kept["out"] = cosformer_attention(q, k, v, max_length=length)

    peak = peak_bytes(call, device)
    seconds = [measure_once(call, device) for _ in range(repeats)]
    row: Row = {"kind": "length", "length": length, "heads": HEADS, "head_dim": WIDTH, "seconds": seconds}
    row |= {"median": statistics.median(seconds) if seconds else math.nan, "peak_bytes": peak}
    return row | check_last(kept["out"], q, k, v)


def check_last(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
    """Compare the last outputs of a timed call with the definition in float64."""
    n, found = k.shape[2], []
    for dtype in (torch.float64, out.dtype):
        inputs = q[:, :, -LAST:].to(dtype), k.to(dtype), v.to(dtype)
        found.append(cosformer_attention(*inputs, max_length=n, backend="reference"))
    return check(f"cosformer, {n} tokens,", out[:, :, -LAST:], found[0], found[1])


@torch.no_grad()
def against_softmax(length: int, repeats: int, device: str, seed: int) -> Row:
    """Compare speed alone: the two are different functions."""
    q, k, v = random_inputs(length, device, seed)
    calls: dict[str, Callable[[], Tensor]] = {
        "cosformer": lambda: cosformer_attention(q, k, v, max_length=length),
        "softmax": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    checked = check_last(calls["cosformer"](), q, k, v)
    seconds = in_turn(calls, repeats=repeats, device=device)
    row: Row = {"kind": "softmax", "length": length, "heads": HEADS, "head_dim": WIDTH, "seconds": seconds}
    return row | {"speedup": ratio(seconds["softmax"], seconds["cosformer"]).median} | checked


def against_published(length: int, passes: str, repeats: int, device: str, seed: int) -> Row:
    """Compare time, memory and results with the published formulation, forward or with gradients."""
    inputs = random_inputs(length, device, seed)
    backward = passes != PASSES[0]
    for x in inputs:
        x.requires_grad_(backward)

    def call(op: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(backward):
            out = op(*inputs, max_length=length)
            return (out, *torch.autograd.grad(out.sum(), inputs)) if backward else (out,)

    calls = {"farspan": lambda: call(cosformer_attention), "published": lambda: call(published_cosformer)}
    return {"passes": passes} | beside_published("cosFormer", length, calls, repeats, device)


# Kernels on a GPU, inputs (b, n, h, d) as projections leave them

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """b sequences of n tokens, h heads of width d."""

    b: int
    h: int
    n: int
    d: int


TOY = [Shape(1, 1, 66, 16)]


def shapes(lengths: Sequence[int]) -> list[Shape]:
    """Return as many tokens of each width at each length."""
    return [Shape(max(1, TOKENS // n), 16, n, d) for d in WIDTHS for n in lengths]


def kernel_steps(todo: Sequence[Shape], *, repeats: int, device: str, seed: int) -> Steps:
    """Check the kernels of each width against float64, then time each shape in both passes.

    Peers are flash-linear-attention with the same features, where it is installed, and flash attention.
    """
    torch.manual_seed(seed)
    peer, missing = flash_linear_attention(device)
    small = dict.fromkeys(Shape(1, min(4, x.h), min(1000, x.n), x.d) for x in todo)
    found: Steps = [(f"width {x.d} against float64", partial(check_kernels, x, device, peer)) for x in small]
    for shape in todo:
        for passes in PASSES:
            label = f"{passes}, width {shape.d}, {shape.b} × {shape.n:,} tokens"
            found.append((label, partial(compare, shape, passes, device, repeats, peer, missing)))
    return found


def candidates(n: int, device: str, peer: Callable[..., Tensor] | None) -> dict[str, Attention]:
    """Return attention of q, k, v (b, n, h, d), by name."""

    def turned(attend: Attention) -> Attention:
        return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    softmax: Attention = partial(F.scaled_dot_product_attention, is_causal=True)
    if device != "cpu":
        softmax = sdpa_kernel(SDPBackend.FLASH_ATTENTION)(softmax)
    found: dict[str, Attention] = {"flash softmax": turned(softmax)}
    for name in (OURS, "chunked"):
        found[name] = turned(partial(cosformer_attention, max_length=n, backend=name))
    if peer is not None:
        waves = angles(n, device)
        found["fla"] = lambda q, k, v: peer(features(q, waves), features(k, waves), v, normalize=True)
    return found


def angles(n: int, device: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions, (n, 1, 1) in bfloat16."""
    phase = (math.pi / 2 / n * torch.arange(n, dtype=torch.float64, device=device))[:, None, None]
    return phase.cos().bfloat16(), phase.sin().bfloat16()


def features(x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Compute [ReLU(x) cos, ReLU(x) sin]: (b, n, h, d) → (b, n, h, 2d), for cosines and sines (n, 1, 1)."""
    return torch.cat([x.relu() * wave for wave in waves], dim=-1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Compute what anyone would write: N×N weights, everything in the inputs' dtype."""
    q_, k_ = (features(x, waves).transpose(1, 2) for x in (q, k))
    weights = (q_ @ k_.mT).tril()
    return (weights @ v.transpose(1, 2) / weights.sum(-1, keepdim=True).clamp(min=1e-3)).transpose(1, 2)


def check_kernels(shape: Shape, device: str, peer: Callable[..., Tensor] | None) -> list[Row]:
    """Check output and gradients of each candidate against the definition in float64.

    Ours may have twice the error of the plain formula in bfloat16; a peer must only be the same function.
    """
    q, k, v = (torch.randn(shape.b, shape.n, shape.h, shape.d, device=device).bfloat16() for _ in range(3))
    leaves = [q + 0.5, k + 0.5, v]  # rows that hardly meet a key have no digits to compare
    weights = torch.randn_like(v)

    def results(attend: Attention, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in leaves]
        out = attend(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, weights.to(dtype))]

    def defined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return cosformer_attention_reference(q, k, v, max_length=shape.n).transpose(1, 2)

    truth = results(defined, torch.float64)
    plain = results(partial(plain_attention, waves=angles(shape.n, device)), torch.bfloat16)
    rows: list[Row] = []
    for name, attend in candidates(shape.n, device, peer).items():
        if name == "flash softmax":  # another function
            continue
        limit = None if name in (OURS, "chunked") else LOOSE[torch.bfloat16]
        parts = zip(("output", "dq", "dk", "dv"), results(attend, torch.bfloat16), truth, plain, strict=True)
        found = [check(f"{name}, {what}, width {shape.d},", a, b, c, limit=limit) for what, a, b, c in parts]
        rows.append({"kind": "check", "attention": name, **shape._asdict(), **worst(found)})
    return rows


def compare(
    shape: Shape, passes: str, device: str, repeats: int, peer: Callable[..., Tensor] | None, missing: dict[str, str]
) -> list[Row]:
    """Make one row: milliseconds of each candidate, its time over ours, and memory over the least.

    The least that a training step can hold is q, k, v, the output, and the gradient of each.
    """
    backward = passes != PASSES[0]
    inputs = [torch.randn(shape.b, shape.n, shape.h, shape.d, device=device).bfloat16() for _ in range(3)]
    calls = {name: as_call(attend, inputs, backward) for name, attend in candidates(shape.n, device, peer).items()}
    checked: dict[str, float] = {}
    if not backward:
        q, k, v = (x[:1].transpose(1, 2) for x in inputs)
        with torch.no_grad():
            checked = check_last(calls[OURS]()[:1].transpose(1, 2), q, k, v)
    timed = time_candidates(calls, repeats=repeats, device=device, required=(OURS,), graph=not backward, ahead=backward)
    fair = timed.fair(OURS) - {OURS}
    held, least = inputs[0].nbytes * (4 if backward else 3), (8 if backward else 4) * inputs[0].nbytes
    times = {name: quantiles(seconds) for name, seconds in timed.seconds.items()}
    row: Row = {"kind": "linear", "passes": passes, **shape._asdict(), "attention": OURS}
    row["milliseconds"] = {name: x.milliseconds | {"graph": name in timed.graphs} for name, x in times.items()}
    row["speedup"] = {name: ratio(timed.seconds[name], timed.seconds[OURS]).spread for name in times if name in fair}
    row["memory_over_least"] = {name: (held + peak) / least for name, peak in timed.peaks.items()}
    return [row | {"missing": missing | timed.missing} | checked]


def as_call(attend: Attention, inputs: list[Tensor], backward: bool) -> Callable[[], Any]:
    """Return a call of the attention, or of a training step of it alone."""
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    if not backward:
        return torch.no_grad()(partial(attend, *leaves))
    weights = torch.randn_like(leaves[2])

    def step() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return (out, *torch.autograd.grad(out, leaves, weights))

    return step


def flash_linear_attention(device: str) -> tuple[Callable[..., Tensor] | None, dict[str, str]]:
    """Return its chunk_linear_attn as a function of features q, k and of v, all (b, n, h, ·), or why there is none.

    It tries some fifty variants of each kernel at the first call, which takes minutes.
    """
    if not device.startswith("cuda"):
        return None, {"fla": "it needs a CUDA device"}
    if find_spec("fla") is None:
        return None, {"fla": "not installed; pip install fla-core"}
    chunk_linear_attn = import_module("fla.ops.linear_attn").chunk_linear_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, *, normalize: bool) -> Tensor:
        out: Tensor = chunk_linear_attn(q, k, v, scale=1.0, normalize=normalize)[0]
        return out

    return attend, {}


def tables(rows: list[Row]) -> list[Table | str]:
    """Tabulate growth with length and ratios to peers."""
    kernels = [row for row in rows if row["kind"] == "linear"]
    others = [{"row": row, "name": name} for row in kernels for name in row["speedup"]]
    found = table(
        "kernels",
        others,
        {
            "passes": lambda x: f"{x['row']['passes']}, {x['row']['b']} × {x['row']['n']:,}, width {x['row']['d']}",
            "ms": lambda x: f"{x['row']['milliseconds'][OURS]['median']:.3f}",
            "memory / least": lambda x: f"{x['row']['memory_over_least'][OURS]:.2f}",
            "other": lambda x: x["name"],
            "time / ours": lambda x: show(x["row"]["speedup"][x["name"]], 2),
        },
    )
    found += table(
        "causal cosFormer, forward",
        [row for row in rows if row["kind"] == "length"],
        {
            "tokens": lambda x: f"{x['length']:,}",
            "seconds": lambda x: f"{x['median']:.3f}",
            "µs per token": lambda x: f"{1e6 * x['median'] / x['length']:.1f}",
            "peak MB": lambda x: f"{x['peak_bytes'] / 1e6:,.0f}",
        },
    )
    for row in rows:
        if row["kind"] == "fit":
            deviation = 100 * row["largest_deviation"]
            found.append(f"time grows as length^{row['exponent']:.2f} (largest deviation {deviation:.0f}%)")
        elif row["kind"] == "softmax":
            found.append(f"against softmax attention, {row['length']:,} tokens: {row['speedup']:.2f}× as fast")
        elif row["kind"] == "crossover":
            n = row["length"]
            found.append("slower than softmax at the longest length" if n is None else f"faster from {n:,} tokens on")
        elif row["kind"] == "published":
            found.append(
                f"against cosFormer as published, {row['passes']}, {row['length']:,} tokens: {row['speedup']:.1f}× "
                f"faster, {row['memory_ratio']:.0f}× less memory, largest difference {row['error']:.1e}"
            )
    return [*found, *missing_lines(kernels), *worst_line([{"attention": "cosformer", **row} for row in rows])]
