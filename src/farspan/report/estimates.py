"""Measurements of several seeds → one number with its spread and its counts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farspan.intervals import wilson
from farspan.report.collect import Run
from farspan.report.records import Passkey, Perplexity, Share


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, the smallest and largest seed, and what was counted."""

    value: float
    low: float
    high: float
    seeds: int
    interval: tuple[float, float] | None = None
    """95% Wilson interval of a share, over all cases of all seeds."""
    cases: int = 0
    texts: int = 0
    tokens: int = 0


def perplexity_of(rows: Sequence[Perplexity]) -> Estimate | None:
    """The mean of the seeds' perplexities; texts and tokens are those of one seed."""
    if not rows:
        return None
    values = [row.ppl for row in rows]
    mean = sum(values) / len(values)
    texts, tokens = min(row.texts for row in rows), min(row.tokens for row in rows)
    return Estimate(mean, min(values), max(values), len(rows), texts=texts, tokens=tokens)


def share_of(shares: Iterable[Share | Passkey]) -> Estimate | None:
    """All right cases over all cases; the seeds' own shares give the range."""
    counted = [share for share in shares if share.cases]
    if not counted:
        return None
    cases, correct = sum(share.cases for share in counted), sum(share.correct for share in counted)
    each = [share.correct / share.cases for share in counted]
    return Estimate(correct / cases, min(each), max(each), len(counted), wilson(correct, cases), cases=cases)


def perplexity_at(run: Run, variant: str, scaling: str, length: int) -> Estimate | None:
    """Sliding-window perplexity."""
    return perplexity_of(
        [row for row in run.perplexity if _is(row, variant, scaling, length) and row.mode == "sliding"]
    )


def control_at(run: Run, variant: str, scaling: str, length: int) -> Estimate | None:
    """The truncation control: the same target tokens with the context cut to the training length.

    One row serves all lengths where the run has only one: sliding windows score the same tokens at every length. Inside
    the training length dynamic NTK changes nothing, so that the unscaled row serves every scaling.
    """
    for law in (scaling, "none"):
        rows = [
            row for row in run.perplexity if row.mode == "truncated" and (row.variant, row.scaling) == (variant, law)
        ]
        one_serves_all = len({row.length for row in rows}) == 1
        chosen = [row for row in rows if one_serves_all or row.length == length]
        if chosen:
            return perplexity_of(chosen)
    return None


def passkey_at(run: Run, variant: str, scaling: str, length: int, part: str = "all") -> Estimate | None:
    """Passkey accuracy; part "near" or "far" counts only keys within or beyond the training length of the end."""
    rows = [row for row in run.passkey if _is(row, variant, scaling, length)]
    return share_of(row if part == "all" else getattr(row, part) for row in rows)


def passkey_between(run: Run, variant: str, scaling: str, low: float, high: float) -> Estimate | None:
    """Passkey accuracy over all lengths, for keys with low < distance ≤ high tokens."""
    by_seed: dict[int, list[bool]] = {}
    for row in run.passkey:
        if (row.variant, row.scaling) == (variant, scaling):
            by_seed.setdefault(row.seed, []).extend(right for far, right in row.outcomes if low < far <= high)
    return share_of(Share(len(right), sum(right)) for right in by_seed.values())


def passkey_at_depth(run: Run, variant: str, scaling: str, length: int, low: float, high: float) -> Estimate | None:
    """Passkey accuracy for keys whose depth (0 = start of the prompt, 1 = its end) lies in [low, high)."""
    shares = []
    for row in run.passkey:
        if _is(row, variant, scaling, length):
            right = [ok for far, ok in row.outcomes if low <= 1 - far / length < high]
            shares.append(Share(len(right), sum(right)))
    return share_of(shares)


def scalings(run: Run, variant: str) -> list[str]:
    """The scaling laws measured for a variant: "none" first, then by factor."""
    found = {row.scaling for rows in (run.perplexity, run.passkey) for row in rows if row.variant == variant}
    return sorted(found, key=scaling_order)


def scaling_order(scaling: str) -> tuple[bool, int, str]:
    """Sort key: "none", then "ntk-2", "ntk-4", …, each before its "/per_request".

    >>> sorted(["ntk-16", "ntk-4/per_request", "ntk-4", "none"], key=scaling_order)
    ['none', 'ntk-4', 'ntk-4/per_request', 'ntk-16']
    """
    digits = "".join(c for c in scaling.partition("/")[0] if c.isdigit())
    return (scaling != "none", int(digits or 0), scaling)


def _is(row: Perplexity | Passkey, variant: str, scaling: str, length: int) -> bool:
    return (row.variant, row.scaling, row.length) == (variant, scaling, length)
