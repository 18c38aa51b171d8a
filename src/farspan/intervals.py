"""Uncertainty of a counted share."""

import math
from typing import Any

from farspan.errors import require


def wilson(correct: int, cases: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95% Wilson interval of correct/cases; sensible at 0 and at 1, where the usual one collapses.

    >>> [round(x, 3) for x in wilson(10, 10)]
    [0.722, 1.0]
    """
    require(cases >= 1 and 0 <= correct <= cases, f"correct must lie in 0 … cases ≥ 1, got {correct} of {cases}")
    share, spread = correct / cases, z * z / cases
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def share(correct: int, cases: int) -> dict[str, Any]:
    """What a result says of a counted share: ``cases, correct, accuracy, ci95``; of no cases the last two are None.

    >>> share(3, 4)["accuracy"], share(0, 0)["accuracy"]
    (0.75, None)
    """
    accuracy, ci95 = (correct / cases, list(wilson(correct, cases))) if cases else (None, None)
    return {"cases": cases, "correct": correct, "accuracy": accuracy, "ci95": ci95}
