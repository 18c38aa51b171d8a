"""The effective window from passkey outcomes (App. B.1): finds bound it from below, lasting failure from above."""

from collections.abc import Sequence
from dataclasses import dataclass

from farspan.errors import require


@dataclass(frozen=True)
class EffectiveWindow:
    """Bounds in tokens from the end of the text."""

    at_least: int
    """Up to here at least half of the keys are found in every range of distances; 0 where not even the nearest are."""
    at_most: int | None
    """Keys farther than this were never found; None where the farthest range still has some."""
    cases: int


def effective_window(outcomes: Sequence[tuple[int, bool]], edges: Sequence[int]) -> EffectiveWindow:
    """Bounds from (distance of the key, found) and the ranges' upper edges; ranges without a case are passed over.

    >>> outcomes = [(10, True), (20, True), (90, True), (95, False), (150, False), (300, False)]
    >>> effective_window(outcomes, [50, 100, 200, 400])
    EffectiveWindow(at_least=100, at_most=100, cases=6)
    """
    require(len(outcomes) > 0, "outcomes must hold at least one passkey case, got none; run `farspan eval passkey`")
    require(list(edges) == sorted(set(edges)) and len(edges) > 0, f"edges must rise, got {list(edges)}")
    ranges = []
    for low, high in zip([0, *edges], edges, strict=False):
        found = [right for distance, right in outcomes if low < distance <= high or (low == 0 and distance == 0)]
        if found:
            ranges.append((high, sum(found), len(found)))
    at_least = 0
    for high, right, cases in ranges:
        if 2 * right < cases:
            break
        at_least = high
    at_most = None
    before = 0
    for high, right, _ in ranges:
        if right:
            before, at_most = high, None
        elif at_most is None:
            at_most = before
    return EffectiveWindow(at_least, at_most, sum(cases for _, _, cases in ranges))
