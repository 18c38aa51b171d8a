"""An analysis → rows of a result file: shares and means, with what they were counted over."""

import math
from typing import Any

import torch
from torch import Tensor

from farspan.analysis.borders import BORDERS, crossings
from farspan.analysis.census import WEIGHTS, Census, share
from farspan.analysis.decay import QUANTILES
from farspan.analysis.laws import widening
from farspan.analysis.run import Analysis

DIGITS = 6
"""Significant digits of what a file keeps; the analysis itself holds all."""


def plain(value: Tensor | float) -> Any:
    """Numbers as JSON holds them: lists of any depth, rounded, None for what is not a number.

    >>> plain(torch.tensor([[1.23456789, torch.nan]]))
    [[1.23457, None]]
    """
    if isinstance(value, Tensor):
        return plain_list(value.double().tolist())
    return plain_list(value)


def plain_list(value: Any) -> Any:
    if isinstance(value, list):
        return [plain_list(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def rows(found: Analysis, label: str) -> list[dict[str, Any]]:
    """Every row: ``kind`` says which of model, census, borders, curve, slack, drift, loss it is."""
    made = [model_row(found, label)]
    made += [census_row(found, layer, region) for layer, region in found.census]
    made += border_rows(found)
    made += [curve_row(found, layer) for layer in found.decay]
    made += [slack_row(found, layer) for layer in found.slack]
    made += drift_rows(found)
    return made + loss_rows(found)


def model_row(found: Analysis, label: str) -> dict[str, Any]:
    """What was looked at, and how."""
    settings, layers = found.settings, sorted({layer for layer, _ in found.census})
    census = next(iter(found.census.values()))
    wide = [widening(found.theta[0], theta) for theta in found.theta]
    return {
        "kind": "model",
        "label": label,
        "attention": found.attention,
        "train_length": found.train_length,
        "longest": found.reach,
        "texts": found.texts,
        "tokens": found.tokens,
        "layers": layers,
        "heads": census.heads,
        "pairs": found.theta.shape[1],
        "laws": list(settings.laws),
        "factor": settings.factor,
        "lengths": found.lengths,
        "theta": plain(found.theta),
        "widening": {law: plain(row) for law, row in zip(settings.laws, wide, strict=True)},
    }


def census_row(found: Analysis, layer: int, region: str) -> dict[str, Any]:
    """One layer's initial angles: shares in all, by head, by pair and by both."""
    census, laws = found.census[layer, region], found.settings.laws
    past, totals, histogram = census.past, census.totals, census.histogram.sum((1, 2))
    return {
        "kind": "census",
        "layer": layer,
        "region": region,
        "queries": census.queries,
        "pairs": census.pairs,
        "histogram": {w: plain(share(histogram[i], totals[i].sum())) for i, w in enumerate(WEIGHTS)},
        "past_pi": {w: plain(share(past[i].sum(), totals[i].sum()).item()) for i, w in enumerate(WEIGHTS)},
        "past_pi_head": {w: plain(share(past[i], totals[i], [1])) for i, w in enumerate(WEIGHTS)},
        "past_pi_pair": {w: plain(share(past[i], totals[i], [0])) for i, w in enumerate(WEIGHTS)},
        "past_pi_head_pair": plain(share(past[0], totals[0])),
        "tau_pair": plain(census.mean_tau()[0]),
        "zone": {law: _zone(census, k) for k, law in enumerate(laws)},
        "zone_head": {law: plain(share(census.zone[k, 2], totals[2], [1])) for k, law in enumerate(laws)},
        "damped": {law: plain(share(census.damped[k].sum(), totals[0].sum()).item()) for k, law in enumerate(laws)},
        "damped_pair": {law: plain(share(census.damped[k], totals[0], [0])) for k, law in enumerate(laws)},
    }


def _zone(census: Census, law: int) -> dict[str, Any]:
    zone, totals = census.zone[law], census.totals
    return {w: plain(share(zone[i].sum(), totals[i].sum()).item()) for i, w in enumerate(WEIGHTS)}


def border_rows(found: Analysis) -> list[dict[str, Any]]:
    """By law and border, for each frequency, over all layers and heads: crossings inside and past the training length.

    `first_past`: share of pairs of query and key that cross this border for the first time past the training length.
    """
    made, seen = [], [census for (_, region), census in found.census.items() if region == "inside"]
    for k, law in enumerate(found.settings.laws):
        near = [crossings(census, k, found.train_length - 1) for census in seen]
        far = [crossings(census, k, found.reach - 1) for census in seen]
        inside, total = (torch.stack([c.mean for c in each]).mean((0, 2)) for each in (near, far))
        ever, ever_far = (torch.stack([c.ever for c in each]).mean((0, 2)) for each in (near, far))
        for i, border in enumerate(BORDERS):
            made.append(
                {
                    "kind": "borders",
                    "law": law,
                    "border": border,
                    "inside": plain(inside[i]),
                    "past": plain(total[i] - inside[i]),
                    "ever_inside": plain(ever[i]),
                    "first_past": plain(ever_far[i] - ever[i]),
                }
            )
    return made


def curve_row(found: Analysis, layer: int) -> dict[str, Any]:
    """One layer's logits against distance, and how often a bound failed."""
    decay = found.decay[layer]
    bounds = decay.mean_bounds()
    return {
        "kind": "curve",
        "layer": layer,
        "distance": decay.at,
        "samples": decay.samples,
        "mean": plain(decay.mean()),
        "quantiles": {f"{q:g}": plain(row) for q, row in zip(QUANTILES, decay.quantiles(), strict=True)},
        "bound_eq19": plain(bounds[0]),
        "bound_eq20": plain(bounds[1]),
        "broken": decay.broken,
    }


def slack_row(found: Analysis, layer: int) -> dict[str, Any]:
    """One slack layer under the microscope, by head."""
    slack = found.slack[layer]
    return {
        "kind": "slack",
        "layer": layer,
        "queries": slack.queries,
        "shift": slack.shift,
        "absolute_share": plain(slack.absolute_share()),
        "rising_share": plain(slack.rising_share()),
        "mean_angle": plain(slack.mean_angle()),
        "moved_share": plain(slack.moved_share()),
    }


def drift_rows(found: Analysis) -> list[dict[str, Any]]:
    """By law, length and layer: attention by head, scores and norms."""
    return [
        {
            "kind": "drift",
            "law": law,
            "length": length,
            "layer": layer,
            "queries": drift.queries,
            **{name: plain(values) for name, values in drift.per_head().items()},
            **{name: plain(value) for name, value in drift.per_layer().items()},
        }
        for (law, length, layer), drift in found.drift.items()
    ]


def loss_rows(found: Analysis) -> list[dict[str, Any]]:
    """By law and length: the loss of the band's tokens, and with the context cut to one window."""
    made = []
    for (law, length), (nll, tokens) in found.losses.items():
        if law != "control":
            loss, control = plain(nll / tokens), plain(found.losses["control", length][0] / tokens)
            made.append(
                {"kind": "loss", "law": law, "length": length, "loss": loss, "control": control, "tokens": tokens}
            )
    return made


def arrays(found: Analysis) -> dict[str, Tensor]:
    """The whole census, layer by layer with heads and pairs, for those who want to go on from it."""
    made = {"theta": found.theta}
    for (layer, region), census in found.census.items():
        for name in ("histogram", "past", "zone", "damped", "gap"):
            made[f"{name}-{region}-{layer}"] = getattr(census, name)
    return made
