"""Measure a model on some sequences, in one pass per sequence and scaling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, product

import torch
from torch import Tensor

from farspan.analysis.census import Census
from farspan.analysis.curves import QUERIES, Decay, Drift, band, distances, lengths
from farspan.analysis.factors import SCALINGS, Factors, frequencies, rotary_layers, scaled, walk
from farspan.errors import require, require_choice
from farspan.evaluation.losses import token_losses
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops.device import working_dtype
from farspan.utils import Progress, silent

REGIONS = ("inside", "past")
"""Queries within the training length, and beyond it."""
DRIFT_QUERIES = 16
"""Queries sampled per sequence and length for attention past the window."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        factor: of linear, NTK, dynamic NTK and YaRN scaling.
        queries: sampled per sequence for the census, half inside and half past the training length.
    """

    scalings: tuple[str, ...] = SCALINGS
    factor: float = 4.0
    queries: int = 64
    layers: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for method in self.scalings:
            require_choice("scalings", method, SCALINGS)
        require(
            self.scalings[:1] == ("none",),
            f"scalings must begin with 'none', which the others are compared with, got {', '.join(self.scalings)!r}",
        )
        require(1 <= self.factor < 1e6, f"factor must lie between 1 and a million, got {self.factor}; the paper uses 4")
        require(self.queries >= 2, f"queries must be at least 2, one per region, got {self.queries}; try 64")
        require(0 <= self.seed < 2**63, f"seed must lie between 0 and 2^63 - 1, got {self.seed}; try 0")


class Analysis:
    """All sums; see the classes for their meaning.

    =========  ====================================================================================================
    `theta`    (scalings, d/2) float64, dynamic NTK's at the last token of the longest text
    `census`   by layer and region
    `decay`    by layer
    `drift`    by scaling, length and layer
    `losses`   by scaling and length: the summed loss of the last half window, and its tokens; "control" is the same
               with the context cut to one window, unscaled
    =========  ====================================================================================================
    """

    def __init__(self, model: FarspanForCausalLM, texts: Sequence[Tensor], settings: Settings) -> None:
        specs = model.config.attention_specs
        self.settings, self.train_length = settings, model.config.train_length
        self.layers = rotary_layers(model, settings.layers)
        self.attention = ", ".join(dict.fromkeys(specs[i].name for i in self.layers))
        self.sizes, least = [text.shape[0] for text in texts], 2 * self.train_length
        require(
            min(self.sizes, default=0) >= least,
            f"texts must have two windows = {least} tokens, got {min(self.sizes, default='none that long')}; "
            "use longer ones, or a larger text_tokens",
        )
        own, inside, self.reach = model.config.rotary(), self.train_length, max(self.sizes)
        self.lengths = lengths(inside, self.reach)
        self.rotaries = {name: scaled(own, name, settings.factor, inside) for name in settings.scalings}
        last = torch.tensor([self.reach - 1])
        theta = [frequencies(rotary, self.reach, last) for rotary in self.rotaries.values()]
        self.theta, reaches = torch.cat(theta).to(model.device), (inside - 1, self.reach - 1)
        self.heads, dtype = model.config.num_attention_heads, working_dtype(model.dtype)
        self.census = {
            at: Census(self.theta, reaches, inside, self.heads, dtype) for at in product(self.layers, REGIONS)
        }
        self.decay = {layer: Decay(distances(self.reach)) for layer in self.layers}
        each = product(self.rotaries, self.layers, self.lengths)
        self.drift = {(method, length, layer): Drift(self.heads, inside) for method, layer, length in each}
        self.losses: dict[tuple[str, int], tuple[float, int]] = {}

    @torch.no_grad()
    def add(self, model: FarspanForCausalLM, method: str, text: Tensor, seed: int, tell: Callable[[int], None]) -> None:
        """Add a sequence under a scaling; census and curves read the model as it is."""
        generator = torch.Generator().manual_seed(seed)  # every scaling is measured through the same queries
        inside, half = self.train_length, self.settings.queries // 2
        limits = {"inside": (0, inside), "past": (inside, text.shape[0])}
        regions = {name: sample(*ends, half, generator).to(model.device) for name, ends in limits.items()}
        bands = {
            length: sample(*band(length, inside), DRIFT_QUERIES, generator).to(model.device)
            for length in self.lengths
            if length <= text.shape[0]
        }

        def visit(made: Factors) -> None:
            for length, queries in bands.items():
                self.drift[method, length, made.layer].add(made, queries)
            if method == "none":
                for region, queries in regions.items():
                    self.census[made.layer, region].add(made, queries)
                self.decay[made.layer].add(made, max(1, QUERIES // len(self.sizes)))
            tell(made.layer)

        hidden = walk(model, text, self.layers, visit)
        for length in bands:
            found = {method: band_losses(model, hidden, text, length)}
            if method == "none":
                start = length - inside
                window = text[None, start:length].to(model.device)
                control = model.model(window, use_cache=False).last_hidden_state
                found["control"] = band_losses(model, control, text, length, start)
            for name, loss in found.items():
                nll, tokens = self.losses.get((name, length), (0.0, 0))
                self.losses[name, length] = nll + float(loss.sum()), tokens + loss.numel()


def analyze(
    model: FarspanForCausalLM, texts: Sequence[Tensor], settings: Settings | None = None, progress: Progress = silent
) -> Analysis:
    """Measure a model on sequences of token ids (n,), each at least two training lengths long.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="coca-exact", num_hidden_layers=1))
    >>> found = analyze(model, [torch.arange(128)], Settings(scalings=("none",), queries=4))
    >>> float(found.census[0, "past"].past.sum()), found.lengths
    (0.0, [64, 128])
    """
    found = Analysis(model, texts, settings or Settings())
    passes, steps = list(product(found.rotaries, range(len(texts)))), count(1)
    total = len(passes) * len(found.layers)
    try:
        for method, number in passes:
            model.share_rotary(found.rotaries[method])

            def tell(layer: int, where: str = f"{method}, text {number + 1}") -> None:
                progress(next(steps), total, f"{where}, layer {layer}", phase="layers")

            found.add(model, method, texts[number], found.settings.seed + number, tell)
    finally:
        model.share_rotary(model.config.rotary())
    return found


def sample(low: int, high: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` positions (or all, if there are no more) in low … high-1, rising, one from each equal part.

    >>> sample(0, 4, 9, torch.Generator()).tolist()
    [0, 1, 2, 3]
    """
    if high - low <= count:
        return torch.arange(low, high)
    edges = low + (high - low) * torch.arange(count + 1, dtype=torch.float64) / count
    drawn = edges[:-1] + torch.rand(count, generator=generator, dtype=torch.float64) * edges.diff()
    return drawn.long().unique()


def band_losses(model: FarspanForCausalLM, hidden: Tensor, text: Tensor, length: int, start: int = 0) -> Tensor:
    """Compute the loss of each token in the band of a length; hidden states begin at token `start` of the sequence."""
    first, last = band(length, model.config.train_length)
    last = min(last, text.shape[0] - 1)
    targets = text[None, first + 1 : last + 1].to(hidden.device)
    return token_losses(model, hidden[:, first - start : last - start], targets).double()
