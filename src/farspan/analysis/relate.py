"""The question of the study: do heads with more anomalous pairs behave worse past the window?"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from farspan.analysis.census import WEIGHTS, share
from farspan.analysis.rows import plain
from farspan.analysis.run import Analysis
from farspan.analysis.study import Correlation, rank_correlation

CAUSES = {**{f"past_pi_{w}": f"share of Θ past π, {w}" for w in WEIGHTS}, "zone": "attention on damped tokens"}
EFFECTS = {
    "even": "rise of attention's evenness",
    "first": "rise of the mass on the first tokens",
    "far": "mass beyond the training length",
    "harm": "loss that the head costs past the window, less what it costs inside",
}
FEWEST = 4
"""Layers below which nothing is said."""
PRIMARY = ("past_pi_energy", "even", "head")
"""The comparison named before looking; the others are there to be weighed with their number in mind."""


def study_rows(found: Analysis, worth: Tensor | None = None) -> list[dict[str, Any]]:
    """Rank correlations over heads, and over layers, of each cause inside the window with each effect past it.

    worth: (layers, h, 2) of :func:`head_worth` at the training length and at the longest, if it was measured.
    Heads whose cause does not vary (CoCA: always 0) give no row, nor do fewer than :data:`FEWEST` layers: bootstrapped,
    three points show a relation in one draw of three where there is none.
    """
    layers = sorted({layer for layer, _ in found.census})
    causes, effects = _causes(found, layers), dict(_effects(found, layers))
    if worth is not None:
        effects["harm"] = worth[..., 0] - worth[..., 1]
    made = []
    for cause, x in causes.items():
        for effect, y in effects.items():
            for unit, a, b in (("head", x, y), ("layer", x.mean(1, keepdim=True), y.mean(1, keepdim=True))):
                if len(layers) >= FEWEST and _varies(a) and _varies(b):
                    made.append(_row(cause, effect, unit, a, b, found.settings.seed))
    return made


def _row(cause: str, effect: str, unit: str, x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    result = _widest(x, y, seed)
    return {
        "kind": "study",
        "cause": cause,
        "effect": effect,
        "unit": unit,
        "primary": (cause, effect, unit) == PRIMARY,
        "rho": plain(result.rho),
        "ci95": [plain(result.low), plain(result.high)],
        "n": result.n,
        "resampled": result.groups,
        "null": result.null,
        "x": plain(x),
        "y": plain(y),
    }


def _varies(values: Tensor) -> bool:
    return bool((values != values.flatten()[0]).any())


def _widest(x: Tensor, y: Tensor, seed: int) -> Correlation:
    """(layers, h) each: the wider of the intervals from resampling layers and from resampling heads.

    Heads of one layer are not independent, so layers are the honest unit; but a handful of layers cannot show how far
    they vary.
    """
    layer = torch.arange(x.shape[0]).repeat_interleave(x.shape[1]).tolist()
    values = x.flatten().tolist(), y.flatten().tolist()
    found = [rank_correlation(*values, groups=groups, seed=seed) for groups in (layer, None)]
    return max(found, key=lambda result: result.high - result.low)


def _causes(found: Analysis, layers: list[int]) -> dict[str, Tensor]:
    """(layers, h) each, from queries inside the training length."""
    seen = [found.census[layer, "inside"] for layer in layers]
    causes = {
        f"past_pi_{w}": torch.stack([share(census.past[i], census.totals[i], [1]) for census in seen])
        for i, w in enumerate(WEIGHTS)
    }
    causes["zone"] = torch.stack([share(census.zone[0, 2], census.totals[2], [1]) for census in seen])
    return {name: values.cpu() for name, values in causes.items()}


def _effects(found: Analysis, layers: list[int]) -> Iterator[tuple[str, Tensor]]:
    """(layers, h) each: the change from the training length to the longest."""

    def at(length: int, name: str) -> Tensor:
        return torch.stack([found.drift["none", length, layer].per_head()[name] for layer in layers])

    first, last = found.lengths[0], found.lengths[-1]
    for name in ("even", "first", "far"):
        yield name, at(last, name) - at(first, name)
