"""Decide whether a candidate is right by its error against float64 or a wider dtype.

A kernel of this library may have twice the error of the same dtype written out plainly. Others must only compute the
same function, within a fixed limit such as :data:`LOOSE`.
"""

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from farspan.bench.timing import optional, time_candidates
from farspan.layers import Attention
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import alibi_attention, coca_attention, rope_attention
from farspan.ops.coca import pope_attention

PASSES = ("forward", "forward and backward")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-18, torch.float64: 2.0**-44}
"""What rounding alone may add to a relative error."""
LOOSE = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.float64: 1e-10}
"""How far one function may be from itself on another kernel, as a relative error.

Rounding comes to 0.01 in a model of eight layers in bfloat16, and to 1e-6 in float32; an attention left out, to 1.
"""
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}
"""What a model is compared with. Bfloat16 is judged by float32, a thousand times as exact: no GPU has a fused attention
in float64, and without one the scores of a long prompt do not fit into memory."""
NOTHING = 1e-6
"""Below this share of the largest gradient, a gradient is zero: that of the only score of a softmax, for example."""
EVERY = 2**19
"""The most scores per head, b·n², for which every query is checked."""
SMALL = 300
"""Tokens of the check of every query beside a larger shape."""
Blocks = list[tuple[slice, slice]]
"""Sequences and queries."""


class ResultsDifferError(RuntimeError):
    """A candidate computes something else, so its speed means nothing."""


def apart(got: Tensor, want: Tensor, *, largest: float = 0.0, order: float = 2.0) -> float:
    """Return the norm of the differences, relative to that of the numbers wanted: by default root mean squares.

    Numbers that only rounding keeps from zero, next to the `largest` norm, are judged by that norm.

    >>> apart(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])), apart(torch.ones(2), torch.zeros(2))
    (0.2, inf)
    >>> apart(torch.tensor([0.25]), torch.tensor([0.0]), largest=4e6)
    6.25e-08
    """
    difference, size = (float(torch.linalg.vector_norm(x, order)) for x in (got - want, want))
    size = largest if size < NOTHING * largest else size
    return difference / size if size else math.inf if difference else 0.0


far = partial(apart, order=math.inf)
"""The largest difference, relative to the largest number wanted."""


def farthest(got: Tensor, want: Tensor) -> float:
    """Return the largest :func:`apart` of any query, (queries, …): each is judged by its own numbers.

    >>> farthest(torch.tensor([[300.0], [1.0]]), torch.tensor([[300.0], [2.0]]))
    0.5
    """
    difference, size = (got - want).flatten(1).norm(dim=1), want.flatten(1).norm(dim=1)
    return float(torch.where(difference == 0, difference, difference / size).max())


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
        error_of: :func:`far`, :func:`apart` or :func:`farthest`.

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
    twin: Callable[[torch.dtype, Blocks], tuple[Tensor, Sequence[Tensor]]] | None
    """Compute the queries of the blocks in a dtype by the equations, (queries, …); also return the leaves that it was
    computed from. None: another function, which is not checked."""
    ours: bool = True
    """Must run, and is held to the plain error; a candidate of others may be missing."""


def checked_queries(b: int, n: int, window: int | None = None) -> Blocks:
    """Return the queries that are compared with float64, all in one block if there are few.

    Otherwise edges of blocks, of the window and of the sequence, and random queries in each sequence.

    >>> checked_queries(2, 100), len(checked_queries(16, 2048, 512))
    ([(slice(0, 2, None), slice(0, 100, None))], 28)
    """
    if b * n**2 <= EVERY:
        return [(slice(0, b), slice(0, n))]
    edges = [63, 64, 127, 128, n // 2 - 1, n // 2, n // 2 + 1, n - 2, n - 1]
    edges += [] if window is None else [window - 1, window, window + 1]
    drawn = random.Random(0)
    tokens = [i for i in edges if 0 <= i < n] + [drawn.randrange(n) for _ in range(max(16, b))]
    pairs = dict.fromkeys((number % b, i) for number, i in enumerate(tokens))
    return [(slice(row, row + 1), slice(i, i + 1)) for row, i in pairs]


def smaller(b: int, n: int) -> list[dict[str, int]]:
    """Return a small shape whose every query is checked, if this one is too large for that.

    >>> smaller(1, 512), smaller(16, 2048)
    ([], [{'b': 2, 'n': 300}])
    """
    return [] if b * n**2 <= EVERY else [{"b": min(b, 2), "n": SMALL}]


def compare(
    candidates: Mapping[str, Candidate],
    like: Tensor,
    passes: str,
    *,
    missing: dict[str, str],
    repeats: int,
    device: str,
    graph: bool = False,
    small: Sequence[Mapping[str, Candidate]] = (),
    window: int | None = None,
) -> tuple[list[dict[str, Any]], dict[str, list[float]], dict[str, int]]:
    """Check each candidate in the call that is timed, then time all in turn.

    Return rows of checks, and what :func:`~farspan.bench.timing.time_candidates` returns.

    Args:
        like: a tensor of the output's shape and dtype.
        passes: one of :data:`PASSES`; the second has gradients of all leaves.
        missing: takes the reasons of candidates that cannot run, and of wrong ones of others.
        graph: time CUDA graphs of the calls. Otherwise the processor has a head start.
        small: the same candidates at :func:`smaller`, only checked.
        window: whose edges are checked.
    """
    gradient, backward = torch.randn_like(like), passes != PASSES[0]
    required = [name for name, candidate in candidates.items() if candidate.ours]
    rows: list[dict[str, Any]] = []
    for name, candidate in candidates.items():
        with optional(name, missing, required):
            if candidate.twin is not None:
                each = [*(one[name] for one in small), candidate]
                checks = [check_pass(name, one, backward, window) for one in each]
                rows.append({"kind": "check", "attention": name} | worst(checks))
    calls = {name: partial(one_pass, x, backward, gradient) for name, x in candidates.items() if name not in missing}
    return rows, *time_candidates(calls, missing, repeats=repeats, device=device, required=required, graph=graph)


def one_pass(candidate: Candidate, backward: bool, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the output and, in a backward pass, the gradients of the leaves for a given one of the output."""
    with torch.set_grad_enabled(backward):
        out = candidate.run()
        return (out, *torch.autograd.grad(out, list(candidate.leaves.values()), gradient)) if backward else (out,)


def check_pass(name: str, candidate: Candidate, backward: bool, window: int | None) -> dict[str, float]:
    """Compare the outputs of :func:`checked_queries`, and all gradients that come from them, with float64.

    Gradients by root mean squares: a rounding near zero switches a ReLU on or off, so that single numbers may be far
    off.
    """
    assert candidate.twin is not None
    with torch.set_grad_enabled(backward):
        out = candidate.run()
    gradient, blocks = torch.zeros_like(out), checked_queries(out.shape[0], out.shape[1], window)
    for block in blocks:
        gradient[block].normal_()
    gradients = torch.autograd.grad(out, list(candidate.leaves.values()), gradient) if backward else ()
    found = [[pick(out.detach(), blocks), *gradients]]
    for dtype in (torch.float64, out.dtype):
        with torch.set_grad_enabled(backward):
            want, leaves = candidate.twin(dtype, blocks)
        wanted = torch.autograd.grad(want, leaves, pick(gradient, blocks).to(dtype)) if backward else ()
        found.append([want.detach(), *wanted])
    limit = None if candidate.ours else LOOSE[out.dtype]
    names = ["output", *(f"d {leaf}" for leaf in candidate.leaves)]
    by_norm = partial(apart, largest=max((float(x.norm()) for x in found[1][1:]), default=0.0))
    parts = zip(names, [farthest] + [by_norm] * len(names), *found, strict=False)
    return worst([check(f"{name}, {what},", x, a, b, limit=limit, error_of=of) for what, of, x, a, b in parts])


def pick(x: Tensor, blocks: Blocks) -> Tensor:
    """Return the queries of blocks: (b, n, …) → (queries, …)."""
    return torch.cat([x[block].flatten(0, 1) for block in blocks])


def by_blocks(attend: Callable[..., Tensor], blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from the queries of each block to all keys up to its end, (b, n, h, d) → (queries, h, d).

    The N×d numbers per query are computed again in the backward pass, so that those of one block exist at a time.
    """
    calls = [(q[rows, i], k[rows, : i.stop], v[rows, : i.stop]) for rows, i in blocks]
    return torch.cat([checkpoint(attend, *call, use_reentrant=False).flatten(0, 1) for call in calls])


def definition(layer: Attention, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute a layer's attention by its equations: q, k and v (b, h, n, d) → (queries, h, d).

    >>> inputs = (torch.ones(1, 2, 5, 8) for _ in range(3))
    >>> definition(Attention(16, 2, "rope"), checked_queries(1, 5), *inputs).shape
    torch.Size([5, 2, 8])
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
    attend = by_heads(partial(op, **options))
    return by_blocks(attend, blocks, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def by_heads(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of (b, n, h, d) from attention of (b, h, n, d)."""
    return lambda *inputs: attend(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)


def wider(model: FarspanForCausalLM) -> FarspanForCausalLM:
    """Copy a model in :data:`WIDER`."""
    weight = model.lm_head.weight
    return copy.deepcopy(model).to(weight.device, WIDER[weight.dtype])
