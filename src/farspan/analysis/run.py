"""Measure a model on some sequences, in one pass per sequence and scaling."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from farspan.analysis.census import Census
from farspan.analysis.curves import QUERIES, Decay, Drift, Microscope, band, distances, lengths
from farspan.analysis.factors import SCALINGS, Factors, frequencies_at, rotary_layers, scaled, under, walk
from farspan.errors import require, require_choice
from farspan.evaluation.perplexity import token_losses
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops.device import working_dtype
from farspan.utils import Progress, silent

REGIONS = ("inside", "past")
"""Queries within the training length, and beyond it."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        factor: of linear, NTK, dynamic NTK and YaRN scaling.
        queries: sampled per sequence for the census, half inside and half past the training length.
        drift_queries: sampled per sequence and length for attention past the window.
    """

    scalings: tuple[str, ...] = SCALINGS
    factor: float = 4.0
    queries: int = 64
    drift_queries: int = 16
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
        require(self.drift_queries >= 1, f"drift_queries must be at least 1, got {self.drift_queries}; try 16")
        require(0 <= self.seed < 2**63, f"seed must lie between 0 and 2^63 - 1, got {self.seed}; try 0")


@dataclass
class Analysis:
    """All sums; see the classes for their meaning."""

    settings: Settings
    attention: str
    train_length: int
    reach: int
    """Tokens of the longest sequence."""
    texts: int
    tokens: int
    theta: Tensor
    """(scalings, d/2): frequencies at the last token of the longest sequence."""
    lengths: list[int]
    census: dict[tuple[int, str], Census] = field(default_factory=dict)
    """By layer and region."""
    decay: dict[int, Decay] = field(default_factory=dict)
    slack: dict[int, Microscope] = field(default_factory=dict)
    drift: dict[tuple[str, int, int], Drift] = field(default_factory=dict)
    """By scaling, length and layer."""
    losses: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    """By scaling and length: summed loss of the band's tokens, and how many. "control": the same tokens with the
    context cut to one window, unscaled."""


def analyze(
    model: FarspanForCausalLM,
    texts: Sequence[Tensor],
    settings: Settings | None = None,
    progress: Progress = silent,
) -> Analysis:
    """Measure a model on sequences of token ids (n,), each at least two training lengths long.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="coca-exact", num_hidden_layers=1))
    >>> found = analyze(model, [torch.arange(128)], Settings(scalings=("none",), queries=4))
    >>> float(found.census[0, "past"].past.sum()), found.lengths
    (0.0, [64, 128])
    """
    settings, train_length = settings or Settings(), model.config.train_length
    layers, specs = rotary_layers(model, settings.layers), model.config.attention_specs
    require(
        "dynamic_ntk" not in settings.scalings or all(spec.kind != "linear-coca" for spec in specs),
        f"scalings must not have 'dynamic_ntk' with linear-coca layers, got {', '.join(settings.scalings)}; "
        "their sums cannot be rotated again",
    )
    require(len(texts) > 0, "texts must hold at least one token sequence, got none")
    for text in texts:
        require(
            text.shape[0] >= 2 * train_length,
            f"a text must have two windows = {2 * train_length} tokens, got {text.shape[0]}; use a longer text",
        )
        require(
            int(text.max()) < model.config.vocab_size,
            f"tokens must be below the vocabulary of the model, {model.config.vocab_size}, got {int(text.max())}; "
            "use the model's own tokenizer",
        )
    reach, rotary = max(text.shape[0] for text in texts), model.config.rotary()
    theta = [
        frequencies_at(scaled(rotary, method, settings.factor, train_length), reach) for method in settings.scalings
    ]
    found = Analysis(
        settings,
        ", ".join(dict.fromkeys(specs[i].name for i in layers)),
        train_length,
        reach,
        len(texts),
        sum(text.shape[0] for text in texts),
        torch.stack(theta).to(model.device),
        lengths(train_length, reach),
    )
    total, steps = len(settings.scalings) * len(texts) * len(layers), count(1)
    for method in settings.scalings:
        with under(model, method, settings.factor):
            for number, text in enumerate(texts):
                one = _Pass(found, method, text, settings.seed + number)

                def visit(made: Factors, norms: Tensor, one: "_Pass" = one, number: int = number) -> None:
                    one.visit(made, norms)
                    progress(next(steps), total, f"{one.method}, text {number + 1}, layer {made.layer}", phase="layers")

                one.losses(model, walk(model, text, layers, visit))
    return found


def sample(low: int, high: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` positions (or all, if there are no more) in low … high-1, rising, one from each equal part.

    >>> sample(0, 4, 9, torch.Generator()).tolist()
    [0, 1, 2, 3]
    """
    require(high > low, f"positions must not be empty, got {low} … {high - 1}; use a longer text")
    if high - low <= count:
        return torch.arange(low, high)
    edges = low + (high - low) * torch.arange(count + 1, dtype=torch.float64) / count
    drawn = edges[:-1] + torch.rand(count, generator=generator, dtype=torch.float64) * edges.diff()
    return drawn.long().unique()


class _Pass:
    """One sequence under one scaling: which queries are sampled, and where their sums go."""

    def __init__(self, found: Analysis, method: str, text: Tensor, seed: int) -> None:
        self.found, self.method, self.text = found, method, text
        generator = torch.Generator().manual_seed(seed)  # every scaling is measured through the same queries
        half, inside = max(1, found.settings.queries // 2), found.train_length
        self.queries = {
            "inside": sample(0, inside, half, generator),
            "past": sample(inside, text.shape[0], half, generator),
        }
        self.bands = {
            length: sample(*band(length, inside), found.settings.drift_queries, generator)
            for length in found.lengths
            if length <= text.shape[0]
        }

    def visit(self, made: Factors, norms: Tensor) -> None:
        """Add one layer to the sums; the census, curves and slack's microscope read the model as it is."""
        found, heads, device = self.found, made.query.shape[0], made.query.device
        for length, queries in self.bands.items():
            drift = found.drift.setdefault((self.method, length, made.layer), Drift(heads, found.train_length))
            first, last = band(length, found.train_length)
            drift.add(made, queries.to(device), norms[first:last])
        if self.method != "none":
            return
        reaches, dtype = (found.train_length - 1, found.reach - 1), working_dtype(made.query.real.dtype)
        for region in REGIONS:
            census = found.census.get((made.layer, region))
            census = census or Census(found.theta, reaches, found.train_length, heads, dtype)
            census.add(made, self.queries[region].to(device))
            found.census[made.layer, region] = census
        decay = found.decay.setdefault(made.layer, Decay(distances(found.reach)))
        decay.add(made, max(1, QUERIES // found.texts))
        if made.echo is not None:
            slack = found.slack.setdefault(made.layer, Microscope(heads, found.train_length))
            slack.add(made, torch.cat([self.queries[region] for region in REGIONS]).to(device))

    @torch.no_grad()
    def losses(self, model: FarspanForCausalLM, hidden: Tensor) -> None:
        """Add the loss of the tokens in each band; unscaled, also that with one window of context: content alone."""
        for length in self.bands:
            self._add_loss(model, hidden, self.method, length, 0)
            if self.method == "none":
                start = length - self.found.train_length
                window = self.text[None, start:length].to(model.device)
                control = model.model(window, use_cache=False).last_hidden_state
                self._add_loss(model, control, "control", length, start)

    def _add_loss(self, model: FarspanForCausalLM, hidden: Tensor, name: str, length: int, start: int) -> None:
        loss = band_losses(model, hidden, self.text, length, start)
        nll, tokens = self.found.losses.get((name, length), (0.0, 0))
        self.found.losses[name, length] = nll + float(loss.sum()), tokens + loss.numel()


def band_losses(model: FarspanForCausalLM, hidden: Tensor, text: Tensor, length: int, start: int = 0) -> Tensor:
    """Compute the loss of each token in the band of a length; hidden states begin at token `start` of the sequence."""
    first, last = band(length, model.config.train_length)
    last = min(last, text.shape[0] - 1)
    targets = text[None, first + 1 : last + 1].to(hidden.device)
    return token_losses(model, hidden[:, first - start : last - start], targets).double()
