"""`results/analysis-*.json` as typed values: one look at one model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.errors import require


def theorems(attention: str) -> tuple[str, ...]:
    """The bounds that must hold on every score: Eq. 20 only where all initial angles are zero."""
    return ("eq19", "eq20", "eq21") if attention in ("coca-exact", "coca-strict") else ("eq19", "eq21")


KINDS = {
    "model": ("label", "attention", "train_length", "longest", "texts", "tokens", "layers", "heads", "pairs", "laws"),
    "census": ("layer", "region", "histogram", "past_pi", "past_pi_pair", "zone", "damped", "damped_pair"),
    "borders": ("law", "border", "inside", "past", "ever_inside", "first_past"),
    "curve": ("layer", "distance", "samples", "mean", "quantiles", "bound_eq19", "bound_eq20", "broken"),
    "slack": ("layer", "absolute_share", "rising_share", "mean_angle", "moved_share"),
    "drift": ("law", "length", "layer", "even", "first", "far", "logit_top", "logit_spread", "hidden_norm"),
    "loss": ("law", "length", "loss", "control", "tokens"),
    "window": ("law", "at_least", "at_most", "cases"),
    "study": ("cause", "effect", "primary", "rho", "ci95", "n", "null", "x", "y"),
}
"""What each kind of row must have for the page."""


@dataclass(frozen=True)
class Look:
    """The rows of one analysed model, by kind."""

    model: Mapping[str, Any]
    rows: Mapping[str, tuple[Mapping[str, Any], ...]]

    @property
    def label(self) -> str:
        return str(self.model["label"])

    @property
    def wavelengths(self) -> list[float]:
        """Tokens that each pair takes for a full turn."""
        return [2 * math.pi / theta for theta in self.model["theta"][0]]

    def of(self, kind: str, **wanted: Any) -> list[Mapping[str, Any]]:
        """The rows of a kind whose fields have these values."""
        return [row for row in self.rows[kind] if all(row[name] == value for name, value in wanted.items())]

    def mean(self, kind: str, read: Any, **wanted: Any) -> float:
        """The mean over layers of what `read` takes from a row."""
        values = [read(row) for row in self.of(kind, **wanted)]
        return sum(values) / len(values)


def relation(row: Mapping[str, Any]) -> tuple[str, str]:
    """The correlation that a row of the study found, and what it comes to: a null result as such.

    >>> relation({"rho": 0.314, "ci95": [-0.1, 0.6], "null": True})
    ('ρ = 0.31 (95% -0.10 to 0.60)', 'no relation told from chance')
    """
    low, high = row["ci95"]
    found = "no relation told from chance" if row["null"] else "a relation beyond chance"
    return f"ρ = {row['rho']:.2f} (95% {low:.2f} to {high:.2f})", found


def parse_look(raw: list[Any], where: Path) -> Look:
    """A look from the rows of a result file; refused with the file's name where something is missing."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in KINDS}
    for i, row in enumerate(raw):
        kind = row.get("kind") if isinstance(row, Mapping) else None
        require(
            kind in KINDS, f"{where} row {i} must be one of {', '.join(KINDS)}, got {kind!r}; write it with `farspan`"
        )
        missing = [name for name in KINDS[str(kind)] if name not in row]
        require(not missing, f"{where} row {i} must have {', '.join(missing)}; write it again with `farspan analyze`")
        by_kind[str(kind)].append(row)
    for kind in ("model", "census", "curve", "drift", "loss"):
        require(bool(by_kind[kind]), f"{where} must have a {kind} row, got none; write it again with `farspan analyze`")
    return Look(by_kind["model"][0], {kind: tuple(found) for kind, found in by_kind.items()})
