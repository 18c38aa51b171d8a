"""One rule decides whether a candidate is right: its error is at most twice that of the same dtype written out plainly.

Both errors are against float64. A kernel of another library must only compute the same function (:data:`LOOSE`).
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.bench.timing import Timed, optional, time_candidates
from farspan.layers import Attention
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import alibi_attention, coca_attention, rope_attention
from farspan.ops.coca import pope_attention

PASSES = ("forward", "forward and backward")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-18, torch.float64: 2.0**-44}
"""What rounding alone may add to an error, relative to the largest number."""
LOOSE = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.float64: 1e-10}
"""How far one function may be from itself on another kernel, relative to the largest number.

Rounding comes to 0.01 in a model of eight layers in bfloat16, and to 1e-6 in float32; an attention left out, to 1.
"""
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
"""What a model is compared with. Bfloat16 is judged by float32, a thousand times as exact: no GPU has a fused attention
in float64, and without one the scores of a long prompt do not fit into memory."""


class ResultsDifferError(RuntimeError):
    """A candidate computes something else, so its speed means nothing."""


def far(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest number wanted.

    >>> far(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])), far(torch.ones(2), torch.zeros(2))
    (0.25, inf)
    """
    difference, largest = float((got - want).abs().max()), float(want.abs().max())
    return difference / largest if largest else math.inf if difference else 0.0


def apart(got: Tensor, want: Tensor) -> float:
    """Return the root mean square of the differences, relative to that of the numbers wanted.

    >>> apart(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    difference, size = float((got - want).norm()), float(want.norm())
    return difference / size if size else math.inf if difference else 0.0


def check(
    what: str,
    got: Tensor,
    truth: Tensor,
    eager: Tensor | None = None,
    *,
    limit: float | None = None,
    error_of: Callable[[Tensor, Tensor], float] = far,
) -> dict[str, float]:
    """Return {"error", "allowed"}; raise ResultsDifferError beyond what is allowed.

    Args:
        truth: float64, or the widest dtype that fits.
        eager: the same in got's dtype, written out plainly. Twice its error and a rounding are allowed.
        limit: what is allowed instead; without both, :data:`LOOSE`.
        error_of: :func:`far` or :func:`apart`.

    >>> check("rope", torch.tensor([1.0, 4.1]), torch.tensor([1.0, 4.0]))
    Traceback (most recent call last):
    farspan.bench.checks.ResultsDifferError: rope is wrong by 2.5e-02 (relative; allowed: 1.0e-04)
    """
    got, truth, dtype = got.detach().double(), truth.detach().double(), got.dtype
    error = error_of(got, truth) if got.shape == truth.shape else math.inf
    if limit is None:
        limit = LOOSE[dtype] if eager is None else 2 * error_of(eager.detach().double(), truth) + ROUNDING[dtype]
    if not error <= limit:  # also NaN
        raise ResultsDifferError(f"{what} is wrong by {error:.1e} (relative; allowed: {limit:.1e})")
    return {"error": error, "allowed": limit}


def worst(checks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the check that came nearest to its limit."""
    return max(checks, key=lambda x: x["error"] / x["allowed"])


class Candidate(NamedTuple):
    """What is timed, and what it must compute."""

    run: Callable[[], Tensor]
    """Compute (b, n, …) from the leaves."""
    leaves: Mapping[str, Tensor]
    """What a backward pass has gradients for, by name."""
    twin: Callable[[torch.dtype], tuple[Tensor, Sequence[Tensor]]] | None
    """Compute the last sequence in a dtype by the equations, (1, tokens, …), at :func:`checked_tokens`; also return
    the leaves that it was computed from. None: another function, which is not checked."""
    ours: bool = True
    """Must run, and is held to the plain error; a candidate of others may be missing."""


def checked_tokens(n: int) -> list[int]:
    """Return the queries of a timed call that are compared with float64: the equations take N×d numbers per query.

    >>> checked_tokens(8192), checked_tokens(2)
    ([64, 4096, 8190, 8191], [0, 1])
    """
    return sorted({min(64, n - 1), n // 2, max(0, n - 2), n - 1})


def compare(
    candidates: Mapping[str, Candidate],
    like: Tensor,
    passes: str,
    *,
    missing: dict[str, str],
    repeats: int,
    device: str,
    graph: bool = False,
) -> tuple[list[dict[str, Any]], Timed]:
    """Check each candidate in the call that is timed, then time all in turn. Return rows of checks, and the times.

    Args:
        like: a tensor of the output's shape and dtype.
        passes: one of :data:`PASSES`; the second has gradients of all leaves.
        missing: takes the reasons of candidates that cannot run.
        graph: time CUDA graphs of the calls. Otherwise the processor has a head start.
    """
    gradient, checked = torch.randn_like(like), torch.zeros_like(like)
    tokens = checked_tokens(like.shape[1])
    checked[-1, tokens] = gradient[-1, tokens]
    required = [name for name, candidate in candidates.items() if candidate.ours]
    calls: dict[str, Callable[[], Any]] = {}
    rows: list[dict[str, Any]] = []
    for name, candidate in candidates.items():
        call = partial(one_pass, candidate, passes != PASSES[0])
        with optional(name, missing, required):
            got = call(checked)
        if name not in missing:
            calls[name] = partial(call, gradient)
            if candidate.twin is not None:
                rows.append({"kind": "check", "attention": name} | check_pass(name, candidate, got, checked))
            del got
    found = time_candidates(calls, repeats=repeats, device=device, required=required, graph=graph, ahead=not graph)
    missing.update(found.missing)
    return rows, found


def one_pass(candidate: Candidate, backward: bool, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the output and, in a backward pass, the gradients of the leaves for a given one of the output."""
    with torch.set_grad_enabled(backward):
        out = candidate.run()
        return (out, *torch.autograd.grad(out, list(candidate.leaves.values()), gradient)) if backward else (out,)


def check_pass(name: str, candidate: Candidate, got: tuple[Tensor, ...], gradient: Tensor) -> dict[str, float]:
    """Compare the outputs of :func:`checked_tokens`, and all gradients that come from them, with float64.

    Gradients by root mean squares: a rounding near zero switches a ReLU on or off, so that single numbers may be far
    off.
    """
    assert candidate.twin is not None
    tokens, found, backward = checked_tokens(got[0].shape[1]), [], len(got) > 1
    for dtype in (torch.float64, gradient.dtype):
        with torch.set_grad_enabled(backward):
            out, leaves = candidate.twin(dtype)
        wanted = torch.autograd.grad(out, leaves, gradient[-1:, tokens].to(dtype)) if backward else ()
        found.append([out.detach(), *wanted])
    ours = [got[0][-1:, tokens], *(x[-len(want) :] for x, want in zip(got[1:], found[0][1:], strict=True))]
    limit = None if candidate.ours else LOOSE[gradient.dtype]
    names = ["output", *(f"d {leaf}" for leaf in candidate.leaves)]
    parts = zip(names, ours, *found, strict=False)
    return worst(
        [
            check(f"{name}, {what},", x, a, b, limit=limit, error_of=far if what == "output" else apart)
            for what, x, a, b in parts
        ]
    )


def definition(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute a layer's attention at :func:`checked_tokens` by its equations, N×d numbers per query.

    >>> definition(Attention(16, 2, "rope"), *(torch.ones(1, 2, 5, 8) for _ in range(3))).shape
    torch.Size([1, 2, 3, 8])
    """
    options: dict[str, Any] = {"window": layer.spec.window, "backend": "reference"}
    if layer.spec.kind == "alibi":
        op: Callable[..., Tensor] = alibi_attention
    elif layer.spec.polar:
        op = partial(pope_attention, rotary=layer.rotary, phase=layer._phases())
    elif layer.spec.kind == "rope":
        op = partial(rope_attention, rotary=layer.rotary)
    else:
        op = partial(coca_attention, rotary=layer.rotary, form=layer.form)
    calls = [(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in checked_tokens(q.shape[2])]
    return torch.cat([op(*call, **options) for call in calls], dim=2)


def wider(model: FarspanForCausalLM) -> FarspanForCausalLM:
    """Copy a model in :data:`WIDER`, on SDPA alone: no decoding kernel, and no short cut for one query."""
    weight = model.lm_head.weight
    twin = copy.deepcopy(model).to(weight.device, WIDER[weight.dtype])
    twin.config.decode_backend = "sdpa"
    for block in twin.model.layers:
        block.self_attn.decode_backend = "sdpa"
    return twin
