"""Whether each layer of the benchmark computes its family's function: small against float64, and as it is timed."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import reason, refuse
from farspan.benchmark.layer_peers import OTHERWISE, Peer, Shape, contestants, family_of
from farspan.benchmark.truth import LOOSE, definition, far
from farspan.layers import Attention

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
"""What rounding alone may add to an error: one of the result, or in float32, which has toys only, of a few sums."""


def results(layer: Attention, run: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output and gradients, for a given gradient of the output."""
    x = x.detach().requires_grad_()
    out = run(x)
    names, leaves = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, [x, *leaves], weights)
    return {"output": out.detach(), **dict(zip(("d input", *(f"d {name}" for name in names)), gradients, strict=True))}


def check(shape: Shape, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A row for each contestant: its worst error against the equations in float64, output and gradients.

    Allowed is twice the error of the equations evaluated in `dtype`, and :data:`ROUNDING`; a layer on another's kernel
    must only be the same function (:data:`LOOSE`): how exactly it computes is not ours to refuse.
    """
    layers, _ = contestants(shape, device)
    x = torch.randn(shape.b, shape.n, shape.hidden, device=device).to(dtype)
    weights = torch.randn_like(x)
    truths: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    rows = []
    for name, layer in layers.items():
        family = family_of(name)
        layer.to(device, dtype)
        if family not in truths:
            truths[family] = _by_definition(shape, family, layer, x, weights)
        truth, plain = truths[family]
        try:
            got = results(layer, layer, x, weights)
        except RuntimeError as failure:
            if name == family:
                raise
            rows.append({"kind": "check", "attention": name, **shape._asdict(), "missing": reason(failure)})
            continue
        least = 0.0 if name == family or name in OTHERWISE else LOOSE[dtype]
        shares = {what: _share(got[what], plain[what], truth[what], least) for what in truth}
        worst = max(shares, key=lambda what: shares[what][0] / shares[what][1])
        error, allowed = shares[worst]
        row = {"kind": "check", "attention": name, **shape._asdict(), "of": worst, "error": error}
        rows.append(row | {"allowed": allowed})
    refuse(rows, "layers")
    return rows


def _by_definition(
    shape: Shape, family: str, layer: Attention, x: Tensor, weights: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The equations in float64, and in x's dtype."""
    found = []
    for dtype in (torch.float64, x.dtype):
        twin = Peer(shape, family, definition)
        twin.load_state_dict(layer.state_dict())
        twin.to(x.device, dtype)
        found.append(results(twin, twin, x.to(dtype), weights.to(dtype)))
    return found[0], found[1]


def _share(got: Tensor, plain: Tensor, truth: Tensor, least: float) -> tuple[float, float]:
    return far(got, truth), max(least, 2 * far(plain, truth) + ROUNDING[got.dtype])


def check_as_timed(name: str, got: Mapping[str, Tensor], want: Sequence[Tensor]) -> dict[str, Any]:
    """A row: a compiled layer at the size it is timed at, against its family's own layer as written.

    Its worst result counts: the output, or the gradients of the input and of each weight, all of a training step.
    """
    errors = {what: far(x, y) for (what, x), y in zip(got.items(), want, strict=True)}
    worst = max(errors, key=lambda what: math.inf if math.isnan(errors[what]) else errors[what])
    row = {"kind": "check as timed", "attention": name, "of": worst, "error": errors[worst]}
    row["allowed"] = LOOSE[got[worst].dtype]
    refuse([row], "layers")
    return row
