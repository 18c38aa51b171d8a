"""Do heads with more anomalous pairs behave worse past the window, and what is a head worth?"""

import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farspan.analysis.census import WEIGHTS, share
from farspan.analysis.run import Analysis, band_losses
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.utils import Progress, silent

FEWEST = 4
"""Layers below which nothing is said: bootstrapped, three points show a relation in one draw of three without one."""
PRIMARY = ("past_pi_energy", "even", "head")
"""The comparison named before looking; the others are there to be weighed with their number in mind."""
RESAMPLES = 2000


def study_rows(found: Analysis, worth: Tensor | None = None) -> list[dict[str, Any]]:
    """Correlate each cause inside the window with each effect past it, over heads and over layers.

    Heads whose cause does not vary (CoCA: always 0) give no row, nor do fewer than :data:`FEWEST` layers. Heads of one
    layer are not independent, so layers are the honest unit; but a handful of layers cannot show how far they vary.
    The interval is the wider of those from resampling layers and from resampling heads.

    Args:
        worth: (layers, h, 2) of :func:`head_worth` at the training length and at the longest, if it was measured.
    """
    layers = found.layers
    if len(layers) < FEWEST:
        return []
    seen = [found.census[layer, "inside"] for layer in layers]
    # Shares of Θ past π, and of attention on damped tokens: (layers, h).
    causes = {
        f"past_pi_{w}": torch.stack([share(census.past[i], census.totals[i], [1]) for census in seen]).cpu()
        for i, w in enumerate(WEIGHTS)
    }
    causes["zone"] = torch.stack([share(census.zone[0, 2], census.totals[2], [1]) for census in seen]).cpu()
    ends = [[found.drift["none", found.lengths[i], layer].row() for layer in layers] for i in (0, -1)]
    effects = {
        name: torch.stack([long[name] - short[name] for short, long in zip(*ends, strict=True)])
        for name in ("even", "first", "far")
    }
    if worth is not None:  # what the head costs past the window, less what it costs inside
        effects["harm"] = worth[..., 0] - worth[..., 1]
    made = []
    for cause, effect, unit in product(causes, effects, ("head", "layer")):
        x, y = causes[cause], effects[effect]
        if unit == "layer":
            x, y = x.mean(1, keepdim=True), y.mean(1, keepdim=True)
        if all(bool((values != values[0, 0]).any()) for values in (x, y)):
            units = [rank_correlation(*pair, found.settings.seed) for pair in ((x, y), (x.view(-1, 1), y.view(-1, 1)))]
            names = {"cause": cause, "effect": effect, "unit": unit, "primary": (cause, effect, unit) == PRIMARY}
            widest = max(units, key=lambda row: row["ci95"][1] - row["ci95"][0])
            made.append({"kind": "study", **names, **widest, "x": x, "y": y})
    return made


def rank_correlation(x: Tensor, y: Tensor, seed: int = 0) -> dict[str, Any]:
    """Compute Spearman's ρ of paired values (units, values per unit) with a percentile bootstrap over the units.

    Returns:
        rho, ci95, n, resampled (units) and null: whether the interval includes no relation at all. Values that do not
        vary have no correlation: ρ is NaN, and the result counts as null.

    >>> round(rank_correlation(torch.arange(6.0)[:, None], torch.arange(6.0)[:, None] ** 2)["rho"], 6)
    1.0
    """
    from scipy import stats  # type: ignore[import-untyped]

    require(bool(x.isfinite().all() and y.isfinite().all()), "values must be finite for a correlation, got NaN or inf")
    both = x.double().numpy(), y.double().numpy()

    def spearman(units: Any, axis: int = -1) -> Any:
        """(…, units) of indices → (…)."""
        ranks = [stats.rankdata(values[units].reshape(*units.shape[:-1], -1), axis=-1) for values in both]
        return stats.pearsonr(*ranks, axis=-1).statistic

    units, low, high = np.arange(len(x)), np.nan, np.nan
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        rho = float(spearman(units))
        if np.isfinite(rho):  # a draw of one unit many times over has no correlation
            options = {"n_resamples": RESAMPLES, "method": "percentile", "vectorized": True, "rng": seed}
            draws = stats.bootstrap((units,), spearman, **options).bootstrap_distribution
            low, high = np.nanquantile(draws, (0.025, 0.975))
    found = {"rho": rho, "ci95": [float(low), float(high)], "n": x.numel(), "resampled": len(x)}
    return {**found, "null": not (low > 0 or high < 0)}


@torch.no_grad()
def head_worth(
    model: FarspanForCausalLM,
    text: Tensor,
    layers: Sequence[int],
    lengths: Sequence[int],
    progress: Progress = silent,
) -> Tensor:
    """Measure how much the loss rises when one head alone is silenced: (layers, h, lengths), in nats per token.

    A negative value is a head that the model does better without. One pass over the sequence (n,) per head, from its
    layer on: what comes before is the same for all heads of the layer. `layers` must rise.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope", num_hidden_layers=1))
    >>> head_worth(model, torch.arange(128), [0], [64, 128]).shape
    torch.Size([1, 4, 2])
    """
    ids = text[: min(max(lengths), text.shape[0] - 1) + 1].to(model.device)
    blocks, heads = model.model.layers, model.config.num_attention_heads

    def through(blocks: nn.ModuleList, hidden: Tensor) -> Tensor:
        context = model.model.context(hidden, rotary_length=hidden.shape[1] + 1)
        for block in blocks:
            hidden = block(hidden, context)
        return hidden

    def losses(hidden: Tensor) -> Tensor:
        """Return the mean loss of each length's band, (lengths) float64, from the last block's output."""
        hidden = model.model.norm(hidden)
        return torch.stack([band_losses(model, hidden, ids, length).mean() for length in lengths]).cpu()

    entering = model.model.embed_tokens(ids[None, :-1])
    whole, reached = losses(through(blocks, entering)), 0
    found = torch.zeros(len(layers), heads, len(lengths), dtype=torch.float64)
    for i, layer in enumerate(layers):
        entering, reached = through(blocks[reached:layer], entering), layer
        mixing: Any = blocks[layer].self_attn.o_proj
        for head, columns in enumerate(mixing.weight.chunk(heads, dim=1)):
            kept = columns.clone()
            try:
                columns.zero_()
                found[i, head] = losses(through(blocks[layer:], entering)) - whole
            finally:
                columns.copy_(kept)
            progress(i * heads + head + 1, len(layers) * heads, f"without layer {layer}, head {head}", phase="heads")
    return found
