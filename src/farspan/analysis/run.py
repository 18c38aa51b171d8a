"""A model and some texts → every number of the analysis, in one pass a text and scaling law."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farspan.analysis.borders import reach_grid
from farspan.analysis.capture import rotary_layers, walk
from farspan.analysis.census import Census
from farspan.analysis.decay import QUERIES as DECAY_QUERIES
from farspan.analysis.decay import Decay, distances
from farspan.analysis.drift import Drift, band, lengths
from farspan.analysis.factors import Factors
from farspan.analysis.laws import LAWS, frequencies_at, sample, scaled, under
from farspan.analysis.slack import Microscope
from farspan.errors import require, require_choice
from farspan.evaluation.perplexity import token_losses
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops.device import working_dtype
from farspan.ops.rotary import Rotary

REGIONS = ("inside", "past")
"""Queries within the training length, and beyond it."""
Report = Callable[[int, int, str], None]
"""Called with layers read, layers in all, and what is being read."""


@dataclass(frozen=True)
class Settings:
    """How to look.

    queries: sampled a text for the census, half inside and half past the training length.
    drift_queries: sampled a text and length for attention past the window.
    factor: of PI, NTK, dynamic NTK and YaRN.
    """

    laws: tuple[str, ...] = LAWS
    factor: float = 4.0
    queries: int = 64
    drift_queries: int = 16
    layers: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for law in self.laws:
            require_choice("laws", law, LAWS)
        require(
            len(self.laws) > 0 and self.laws[0] == "none",
            f"laws must begin with 'none', which the others are compared with, got {', '.join(self.laws)!r}; add it",
        )
        require(self.factor >= 1, f"factor must be at least 1, got {self.factor}; the paper uses 4")
        require(self.queries >= 2, f"queries must be at least 2, one a region, got {self.queries}; try 64")
        require(self.drift_queries >= 1, f"drift_queries must be at least 1, got {self.drift_queries}; try 16")


@dataclass
class Analysis:
    """All sums, by layer; see the classes for their meaning."""

    settings: Settings
    attention: str
    train_length: int
    reach: int
    """Tokens of the longest text."""
    texts: int
    tokens: int
    theta: Tensor
    """(laws, d/2): frequencies at the longest text's last token."""
    lengths: list[int]
    census: dict[tuple[int, str], Census] = field(default_factory=dict)
    decay: dict[int, Decay] = field(default_factory=dict)
    slack: dict[int, Microscope] = field(default_factory=dict)
    drift: dict[tuple[str, int, int], Drift] = field(default_factory=dict)
    """By law, length and layer."""
    losses: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    """By law and length: summed loss of the band's tokens, and how many. Law "control": the same tokens with the
    context cut to one window, unscaled."""


def analyze(
    model: FarspanForCausalLM, texts: Sequence[Tensor], settings: Settings | None = None, report: Report | None = None
) -> Analysis:
    """Look at a model on texts of token ids (n,), each at least two training lengths long.

    >>> from farspan import FarspanConfig
    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="coca-exact", num_hidden_layers=1))
    >>> found = analyze(model, [torch.arange(128)], Settings(laws=("none",), queries=4))
    >>> float(found.census[0, "past"].past.sum()), found.lengths
    (0.0, [64, 128])
    """
    settings, train_length = settings or Settings(), model.config.train_length
    layers = chosen_layers(model, settings.layers)
    require(
        "dynamic" not in settings.laws or all(spec.kind != "linear-coca" for spec in model.config.attention_specs),
        f"laws must leave 'dynamic' out where there are linear-coca layers, got {', '.join(settings.laws)}; "
        "their sums cannot be turned again",
    )
    require(len(texts) > 0, "texts must hold at least one token sequence, got none")
    for text in texts:
        require(
            text.shape[0] >= 2 * train_length,
            f"a text must have two windows = {2 * train_length} tokens, got {text.shape[0]}; use a longer text",
        )
    reach = max(text.shape[0] for text in texts)
    rotary = model.config.rotary()
    theta = torch.stack([_frequencies(rotary, law, settings, train_length, reach) for law in settings.laws])
    found = Analysis(
        settings,
        ", ".join(dict.fromkeys(model.config.attention_specs[i].name for i in layers)),
        train_length,
        reach,
        len(texts),
        sum(text.shape[0] for text in texts),
        theta.to(model.device),
        lengths(train_length, reach),
    )
    total, done = len(settings.laws) * len(texts) * len(layers), 0
    for law in settings.laws:
        with under(model, law, settings.factor):
            for number, text in enumerate(texts):
                look = _Look(found, law, text, settings.seed + number)

                def visit(made: Factors, norms: Tensor, look: "_Look" = look, number: int = number) -> None:
                    nonlocal done
                    look.visit(made, norms)
                    done += 1
                    if report is not None:
                        report(done, total, f"{look.law}, text {number + 1}, layer {made.layer}")

                hidden = walk(model, text, layers, visit)
                look.losses(model, hidden)
                if law == "none":
                    look.controls(model)
    return found


def chosen_layers(model: FarspanForCausalLM, wanted: tuple[int, ...] | None) -> list[int]:
    """The rotary layers, or those of them that were asked for."""
    have = rotary_layers(model)
    for layer in wanted or ():
        require(
            layer in have,
            f"layers must be rotary layers of this model ({_ranges(have)}), got {layer}; choose among these",
        )
    return have if wanted is None else sorted(set(wanted))


def _ranges(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole and len(numbers) > 2 else ", ".join(map(str, numbers))


def _frequencies(rotary: Rotary, law: str, settings: Settings, train_length: int, reach: int) -> Tensor:
    return frequencies_at(scaled(rotary, law, settings.factor, train_length), reach)


class _Look:
    """One text under one law: which queries are sampled, and where their sums go."""

    def __init__(self, found: Analysis, law: str, text: Tensor, seed: int) -> None:
        self.found, self.law, self.text = found, law, text
        generator = torch.Generator().manual_seed(seed)  # every law is looked at through the same queries
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
        """Add one layer to the sums; the census, curves and slack's microscope look at the model as it is."""
        found, heads, device = self.found, made.query.shape[0], made.query.device
        for length, queries in self.bands.items():
            drift = found.drift.setdefault((self.law, length, made.layer), Drift(heads, found.train_length))
            first, last = band(length, found.train_length)
            drift.add(made, queries.to(device), norms[first:last])
        if self.law != "none":
            return
        for region in REGIONS:
            if (made.layer, region) not in found.census:
                found.census[made.layer, region] = self._census(heads, working_dtype(made.query.real.dtype))
            found.census[made.layer, region].add(made, self.queries[region].to(device))
        decay = found.decay.setdefault(made.layer, Decay(distances(found.reach)))
        decay.add(made, max(1, DECAY_QUERIES // found.texts))
        if made.echo is not None:
            slack = found.slack.setdefault(made.layer, Microscope(heads, found.train_length))
            slack.add(made, torch.cat([self.queries[region] for region in REGIONS]).to(device))

    def _census(self, heads: int, dtype: torch.dtype) -> Census:
        found = self.found
        grid = reach_grid(found.theta, (found.train_length - 1, found.reach - 1), dtype)
        return Census(grid, found.theta, found.train_length, heads)

    def losses(self, model: FarspanForCausalLM, hidden: Tensor) -> None:
        """Loss of the tokens in each length's band."""
        for length in self.bands:
            self._add_loss(model, hidden, self.law, length, 0)

    @torch.no_grad()
    def controls(self, model: FarspanForCausalLM) -> None:
        """The loss of the same tokens when the model sees one window only: what content alone would give."""
        for length in self.bands:
            start = length - self.found.train_length
            window = self.text[None, start:length].to(model.device)
            hidden = model.model(window, use_cache=False).last_hidden_state
            self._add_loss(model, hidden, "control", length, start)

    @torch.no_grad()
    def _add_loss(self, model: FarspanForCausalLM, hidden: Tensor, name: str, length: int, start: int) -> None:
        """Add a band's loss; hidden begins at token `start` of the text."""
        first, last = band(length, self.found.train_length)
        last = min(last, self.text.shape[0] - 1)
        targets = self.text[None, first + 1 : last + 1].to(hidden.device)
        loss = token_losses(model, hidden[:, first - start : last - start], targets).double().sum()
        nll, tokens = self.found.losses.get((name, length), (0.0, 0))
        self.found.losses[name, length] = nll + float(loss), tokens + last - first
