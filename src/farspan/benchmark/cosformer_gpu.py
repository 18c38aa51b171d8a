"""cosFormer's kernels on a GPU, in one run: against flash-linear-attention with the same features, and flash SDPA."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.benchmark.agree import reason, refuse
from farspan.benchmark.clock import Times, clock, comparable
from farspan.benchmark.linear_peers import features, flash_linear_attention
from farspan.benchmark.measure import measure
from farspan.benchmark.truth import LOOSE, far
from farspan.ops import cosformer_attention, cosformer_attention_reference

LENGTHS = [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]
QUICK = [2048, 16_384]
TOKENS = 65_536
"""Tokens of a row of the table, whatever their length: shorter texts come in larger batches."""
WIDTHS = (64, 128)
PASSES = ("forward", "forward and backward")
OURS = "triton"


class Shape(NamedTuple):
    """b texts of n tokens, h heads of width d."""

    b: int
    h: int
    n: int
    d: int


def shapes(lengths: list[int]) -> list[Shape]:
    return [Shape(max(1, TOKENS // n), 16, n, d) for d in WIDTHS for n in lengths]


def run(
    lengths: list[int], *, repeats: int, device: str, seed: int, quick: bool = False, toy: bool = False
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (what was done, its rows); raises ResultsDifferError before any clock starts if a kernel is wrong."""
    torch.manual_seed(seed)
    peer, missing = flash_linear_attention(device, quick=quick)
    for d in (16,) if toy else WIDTHS:
        yield (
            f"kernels against float64, width {d}",
            check(Shape(1, 1, 66, d) if toy else Shape(1, 4, 1000, d), device, peer),
        )
    for shape in [Shape(1, 1, 66, 16)] if toy else shapes(lengths):
        for passes in PASSES:
            row = compare(shape, passes, device, repeats, peer)
            row["missing"] |= missing
            yield f"{passes}, width {shape.d}, {shape.b} × {shape.n} tokens", [row]


def parts(lengths: list[int]) -> int:
    """How many steps :func:`run` yields.

    >>> parts([2048, 16_384])
    10
    """
    return len(WIDTHS) + len(shapes(lengths)) * len(PASSES)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def contestants(n: int, device: str, peer: Callable[..., Tensor] | None) -> dict[str, Attention]:
    """Attention of q, k, v (b, n, h, d), as projections leave them."""

    def cosformer(backend: str) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return cosformer_attention(q, k, v, max_length=n, backend=backend).transpose(1, 2)

        return attend

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if not q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    found: dict[str, Attention] = {OURS: cosformer("triton"), "chunked": cosformer("chunked"), "flash softmax": softmax}
    if peer is not None:
        waves = angles(n, device)
        found["fla"] = lambda q, k, v: peer(features(q, waves), features(k, waves), v, normalize=True)
    return found


def given_features(peer: Callable[..., Tensor] | None) -> dict[str, Attention]:
    """The peer on features that cost nothing: with its denominators, and without any."""
    if peer is None:
        return {}
    return {
        "fla, features given": partial(peer, normalize=True),
        "fla, features given, numerators alone": partial(peer, normalize=False),
    }


def angles(n: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin of positions, (n, 1, 1) in bfloat16."""
    phase = (math.pi / 2 / n * torch.arange(n, dtype=torch.float64, device=device))[:, None, None]
    return phase.cos().bfloat16(), phase.sin().bfloat16()


def random_inputs(shape: Shape, device: str) -> list[Tensor]:
    size = (shape.b, shape.n, shape.h, shape.d)
    return [torch.randn(size, device=device).bfloat16() for _ in range(3)]


def check(shape: Shape, device: str, peer: Callable[..., Tensor] | None) -> list[dict[str, Any]]:
    """Errors of output and gradients, each contestant against the definition in float64.

    Ours may have twice the error of the plain formula in bfloat16; a peer must only be the same function, within
    :data:`LOOSE`.
    """
    q, k, v = random_inputs(shape, device)
    leaves = [q + 0.5, k + 0.5, v]  # rows that hardly meet a key have no digits to compare
    weights = torch.randn_like(v)

    def results(attend: Attention, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in leaves]
        out = attend(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, weights.to(dtype))]

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return cosformer_attention_reference(q, k, v, max_length=shape.n).transpose(1, 2)

    truth = results(definition, torch.float64)
    plain = results(partial(plain_attention, waves=angles(shape.n, device)), torch.bfloat16)
    rows = []
    for name, attend in contestants(shape.n, device, peer).items():
        if name == "flash softmax":  # another function
            continue
        for what, got, eager, want in zip(
            ("output", "dq", "dk", "dv"), results(attend, torch.bfloat16), plain, truth, strict=True
        ):
            error, theirs = far(got, want), far(eager, want)
            allowed = 2 * theirs + 2.0**-8 if name in (OURS, "chunked") else LOOSE[got.dtype]
            row = {"kind": "check", "attention": name, "of": what, **shape._asdict()}
            rows.append(row | {"error": error, "plain_error": theirs, "allowed": allowed})
    refuse(rows, f"results at width {shape.d}")
    return rows


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, waves: tuple[Tensor, Tensor]) -> Tensor:
    """What anyone would write: N×N weights, everything in the inputs' dtype."""
    q_, k_ = (features(x, waves).transpose(1, 2) for x in (q, k))
    weights = (q_ @ k_.mT).tril()
    return (weights @ v.transpose(1, 2) / weights.sum(-1, keepdim=True).clamp(min=1e-3)).transpose(1, 2)


def compare(shape: Shape, passes: str, device: str, repeats: int, peer: Callable[..., Tensor] | None) -> dict[str, Any]:
    """One row: milliseconds of each contestant with quantiles, how much faster ours is, and memory against the least.

    The least a training step can hold is q, k, v, the output, and the gradient of each.
    """
    inputs, backward = random_inputs(shape, device), passes != "forward"
    waves = angles(shape.n, device)
    wide = [features(inputs[0], waves), features(inputs[1], waves), inputs[2]]
    calls = {name: as_call(attend, inputs, backward) for name, attend in contestants(shape.n, device, peer).items()}
    calls |= {name: as_call(attend, wide, backward) for name, attend in given_features(peer).items()}
    times: dict[str, Times] = {}
    missing, memory = {}, {}
    least = (8 if backward else 4) * inputs[0].nbytes
    for name, call in calls.items():
        try:
            peak = measure(call, repeats=0, device=device).peak_bytes
            times[name] = clock(call, device=device, repeats=repeats, graph=False)
        except RuntimeError as error:
            if name == OURS:
                raise
            missing[name] = reason(error)
            continue
        if not backward:
            with suppress(RuntimeError):  # where it can be captured; `graph` says which time it is
                times[name] = clock(call, device=device, repeats=repeats)
        held = inputs[0].nbytes * (4 if backward else 3)
        memory[name] = (held + peak) / least if not name.startswith("fla, features") else None
    ours = times[OURS]
    others, unfair = comparable({name: t for name, t in times.items() if name != OURS}, ours.graph)
    return {
        "kind": "linear",
        "passes": passes,
        **shape._asdict(),
        "milliseconds": {name: t.milliseconds for name, t in times.items()},
        "speedup": {
            name: {"median": t.median / ours.median, "low": t.low / ours.high, "high": t.high / ours.low}
            for name, t in others.items()
        },
        "memory_over_least": memory,
        "missing": missing | unfair,
    }


def as_call(attend: Attention, inputs: list[Tensor], backward: bool) -> Callable[[], Any]:
    """The attention, or a training step of it alone."""
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    if not backward:
        return torch.no_grad()(partial(attend, *leaves))
    weights = torch.randn_like(leaves[2])

    def step() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return (out, *torch.autograd.grad(out, leaves, weights))

    return step
