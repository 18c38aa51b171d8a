"""Do heads with more anomalous pairs behave worse past the window, and what is a head worth?"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farspan.analysis.census import WEIGHTS, share
from farspan.analysis.run import Analysis, band_losses
from farspan.data.sources import needs
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.utils import Progress, silent

FEWEST = 4
"""Layers below which nothing is said: bootstrapped, three points show a relation in one draw of three without one."""
PRIMARY = ("past_pi_energy", "even", "head")
"""The comparison named before looking; the others are there to be weighed with their number in mind."""


def study_rows(found: Analysis, worth: Tensor | None = None) -> list[dict[str, Any]]:
    """Correlate each cause inside the window with each effect past it, over heads and over layers.

    Heads whose cause does not vary (CoCA: always 0) give no row, nor do fewer than :data:`FEWEST` layers. Heads of one
    layer are not independent, so layers are the honest unit; but a handful of layers cannot show how far they vary.
    The interval is the wider of those from resampling layers and from resampling heads.

    Args:
        worth: (layers, h, 2) of :func:`head_worth` at the training length and at the longest, if it was measured.
    """
    layers = sorted({layer for layer, _ in found.census})
    seen = [found.census[layer, "inside"] for layer in layers]
    # Shares of Θ past π, and of attention on damped tokens.
    causes = {
        f"past_pi_{w}": torch.stack([share(census.past[i], census.totals[i], [1]) for census in seen]).cpu()
        for i, w in enumerate(WEIGHTS)
    }
    causes["zone"] = torch.stack([share(census.zone[0, 2], census.totals[2], [1]) for census in seen]).cpu()

    def at(length: int, name: str) -> Tensor:
        return torch.stack([found.drift["none", length, layer].per_head()[name] for layer in layers])

    effects = {name: at(found.lengths[-1], name) - at(found.lengths[0], name) for name in ("even", "first", "far")}
    if worth is not None:  # what the head costs past the window, less what it costs inside
        effects["harm"] = worth[..., 0] - worth[..., 1]
    made = []
    for cause, effect, unit in ((c, e, u) for c in causes for e in effects for u in ("head", "layer")):
        x, y = causes[cause], effects[effect]
        if unit == "layer":
            x, y = x.mean(1, keepdim=True), y.mean(1, keepdim=True)
        if len(layers) >= FEWEST and all(bool((values != values[0, 0]).any()) for values in (x, y)):
            pairs = (x, y), (x.reshape(-1, 1), y.reshape(-1, 1))
            units = [rank_correlation(a, b, seed=found.settings.seed) for a, b in pairs]
            names = {"cause": cause, "effect": effect, "unit": unit, "primary": (cause, effect, unit) == PRIMARY}
            widest = max(units, key=lambda row: row["ci95"][1] - row["ci95"][0])
            made.append({"kind": "study", **names, **widest, "x": x, "y": y})
    return made


def rank_correlation(x: Tensor, y: Tensor, *, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Compute Spearman's ρ of paired values (units, values per unit) with a percentile bootstrap over the units.

    Returns:
        rho, ci95, n, resampled (units) and null: whether the interval includes no relation at all. Values that do not
        vary have no correlation: ρ is NaN, and the result counts as null.

    >>> round(rank_correlation(torch.arange(6.0)[:, None], torch.arange(6.0)[:, None] ** 2)["rho"], 6)
    1.0
    """
    stats: Any = needs("scipy.stats", "scipy", "farspan analyze")
    require(x.shape == y.shape, f"x and y must be paired, got {tuple(x.shape)} and {tuple(y.shape)}")
    require(x.numel() >= 3, f"x must hold at least 3 points for a correlation, got {x.numel()}; measure more heads")
    a, b = x.double().numpy(), y.double().numpy()
    require(bool(np.isfinite(a).all() and np.isfinite(b).all()), "x and y must be finite, got NaN or inf")

    def spearman(units: Any, axis: int = -1) -> Any:
        """(…, units) of indices → (…)."""
        ranks = [stats.rankdata(values[units].reshape(*units.shape[:-1], -1), axis=-1) for values in (a, b)]
        return stats.pearsonr(*ranks, axis=-1).statistic

    units, low, high = np.arange(len(a)), np.nan, np.nan
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        rho = float(spearman(units))
        if np.isfinite(rho):  # a draw of one unit many times over has no correlation
            options = {"n_resamples": resamples, "method": "percentile", "vectorized": True, "rng": seed}
            draws = stats.bootstrap((units,), spearman, **options).bootstrap_distribution
            low, high = np.nanquantile(draws, (0.025, 0.975))
    found = {"rho": rho, "ci95": [float(low), float(high)], "n": a.size, "resampled": len(a)}
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
    entering = model.model.embed_tokens(ids[None, :-1])
    whole = _losses(model, ids, _through(model, blocks, entering), lengths)
    found = torch.zeros(len(layers), heads, len(lengths), dtype=torch.float64)
    reached = 0
    for i, layer in enumerate(layers):
        entering, reached = _through(model, blocks[reached:layer], entering), layer
        attention: Any = blocks[layer].self_attn
        for head in range(heads):
            hook = attention.o_proj.register_forward_pre_hook(_silence(head, attention.head_dim))
            try:
                found[i, head] = _losses(model, ids, _through(model, blocks[layer:], entering), lengths) - whole
            finally:
                hook.remove()
            progress(i * heads + head + 1, len(layers) * heads, f"without layer {layer}, head {head}", phase="heads")
    return found


def _through(model: FarspanForCausalLM, blocks: nn.ModuleList, hidden: Tensor) -> Tensor:
    """Run hidden states (1, n, width) through some blocks."""
    context = model.model.context(hidden, rotary_length=hidden.shape[1] + 1)
    for block in blocks:
        hidden = block(hidden, context)
    return hidden


def _silence(head: int, width: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mixed = arguments[0].clone()
        mixed[..., head * width : (head + 1) * width] = 0.0
        return (mixed, *arguments[1:])

    return hook


def _losses(model: FarspanForCausalLM, ids: Tensor, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the mean loss of each length's band, (lengths) float64, from the last block's output."""
    hidden = model.model.norm(hidden)
    return torch.stack([band_losses(model, hidden, ids, length).mean() for length in lengths]).cpu()
