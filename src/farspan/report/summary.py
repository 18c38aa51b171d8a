"""What the numbers say, in plain words: computed, and honest in both directions."""

import math

from farspan.report.build import passkey_lengths, sliding_lengths
from farspan.report.collect import Run
from farspan.report.estimates import Estimate, control_at, perplexity_at, scaling_order, scalings, share_of
from farspan.report.experiment import Experiment
from farspan.report.names import PAPER_LAW, listed, scaling_name, variant_name, variants_in
from farspan.report.tables import perplexity_text, share_text

BASELINE = "rope"
CANDIDATES = ("coca-exact", "coca-slack", "coca-strict")
BETTER = "Holds up better than RoPE here"


def summary(run: Run) -> list[str]:
    """The verdict: perplexity of each CoCA form against RoPE, passkey, the control, and what weakens them.

    Words go to the unscaled models and to the paper's NTK factor; the other scaling laws are counted, and in tables.
    """
    laws = sorted({law for variant in variants_in(run) for law in scalings(run, variant)}, key=scaling_order)
    scaled = [law for law in laws if law != "none"]
    shown = [law for law in ("none", PAPER_LAW if PAPER_LAW in scaled else next(iter(scaled), "")) if law in laws]
    said = [perplexity_verdict(run, law) for law in shown]
    said += [tally_verdict(run, laws)] if len(laws) > len(shown) else []
    said += [passkey_verdict(run, law) for law in shown]
    said += [control_verdict(run, law) for law in shown]
    kept = [text for text in said if text]
    if not kept:
        kept = ["RoPE and CoCA were not both measured past the training length: this run compares nothing yet."]
    return kept + _caveats(run)


def _under(law: str) -> str:
    return "Without scaling" if law == "none" else f"With {scaling_name(law)}"


Pair = tuple[Estimate, Estimate]
"""Perplexity at the training length, and at the longest window."""


def _ends(run: Run, law: str) -> tuple[list[int], dict[str, Pair]]:
    """The shortest and longest window that RoPE and every measured CoCA form have, and their perplexities there."""
    found = {}
    for variant in (BASELINE, *CANDIDATES):
        by_length = {n: e for n in sliding_lengths(run) if (e := perplexity_at(run, variant, law, n))}
        if by_length:
            found[variant] = by_length
    common = set.intersection(*(set(by_length) for by_length in found.values())) if found else set()
    both = sorted(n for n in common if n >= (run.train_length or 0))
    if BASELINE not in found or len(found) < 2 or len(both) < 2:
        return [], {}
    return both, {variant: (by_length[both[0]], by_length[both[-1]]) for variant, by_length in found.items()}


def perplexity_verdict(run: Run, law: str) -> str | None:
    """How far RoPE's and CoCA's perplexity rise from the training length to the longest window, and who is better."""
    lengths, pairs = _ends(run, law)
    if not pairs:
        return None
    rope = pairs.pop(BASELINE)
    start = f"the training length of {lengths[0]:,}" if lengths[0] == run.train_length else f"{lengths[0]:,} tokens"
    changes = [f"{variant_name(variant)}'s {_change(*pair)}" for variant, pair in pairs.items()]
    opening = (
        f"{_under(law)}, past {start} RoPE's perplexity {_change(*rope)} by {lengths[-1]:,} tokens; {listed(changes)}."
    )
    judged: dict[str, list[str]] = {}
    for variant, pair in pairs.items():
        judged.setdefault(_judge(rope, pair), []).append(variant_name(variant))
    return " ".join([opening, *(f"{verdict}: {listed(names)}." for verdict, names in judged.items())])


def tally_verdict(run: Run, laws: list[str]) -> str | None:
    """In how many of all scaling laws each form is better."""
    better: dict[str, list[bool]] = {}
    for law in laws:
        pairs = _ends(run, law)[1]
        for variant in pairs.keys() - {BASELINE}:
            better.setdefault(variant, []).append(_judge(pairs[BASELINE], pairs[variant]).startswith(BETTER))
    counts = [f"{variant_name(v)} in {sum(better[v])} of {len(better[v])}" for v in CANDIDATES if v in better]
    return (
        f"Over all scaling laws measured, perplexity holds up better than RoPE's with {listed(counts)}."
        if counts
        else None
    )


def _change(start: Estimate, end: Estimate) -> str:
    """ "rises ×12.3 (19.66 → 241.82)", or falls."""
    ends = f"({perplexity_text(start.value)} → {perplexity_text(end.value)})"
    if not (math.isfinite(start.value) and math.isfinite(end.value)):
        return f"is not finite {ends}"
    ratio = end.value / start.value
    shown = f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.0e}"
    return f"{'rises' if ratio >= 1 else 'falls to'} ×{shown} {ends}"


def _judge(rope: Pair, coca: Pair) -> str:
    """Better means both: it grows less, and ends lower."""
    if any(math.isnan(estimate.value) for estimate in (*rope, *coca)):
        return "Not a number, so that nothing can be said"
    grows_less = _growth(coca) < _growth(rope)
    ends_lower = coca[1].value < rope[1].value
    if grows_less and ends_lower:
        verdict = BETTER
    elif grows_less:
        verdict = "Grows less but does not end lower, not better than RoPE here"
    elif ends_lower:
        verdict = "Ends lower but does not grow less, not better at extrapolating than RoPE here"
    else:
        verdict = "Not better than RoPE here"
    overlap = coca[1].low <= rope[1].high and rope[1].low <= coca[1].high
    if overlap and max(coca[1].seeds, rope[1].seeds) > 1:
        verdict += " (not settled, the seeds' ranges overlap)"
    return verdict


def _growth(pair: Pair) -> float:
    return pair[1].value / pair[0].value


def passkey_verdict(run: Run, law: str) -> str | None:
    """Passkey accuracy past the training length, over the lengths that RoPE and every measured CoCA form have."""
    rows = {v: [r for r in run.passkey if (r.variant, r.scaling) == (v, law)] for v in (BASELINE, *CANDIDATES)}
    lengths = [{row.length for row in found} for found in rows.values() if found]
    past = {n for n in set.intersection(*lengths) if n > (run.train_length or 0)} if lengths else set()
    shares = {v: e for v, found in rows.items() if (e := share_of(row for row in found if row.length in past))}
    if BASELINE not in shares or len(shares) < 2:
        return None
    rope = shares.pop(BASELINE)
    reach = f"{min(past):,} to {max(past):,} tokens" if len(past) > 1 else f"{min(past):,} tokens"
    each = [f"{variant_name(variant)} {_share(share)}, {_compare(rope, share)}" for variant, share in shares.items()]
    counts = sorted({share.cases for share in (rope, *shares.values())})
    cases = f"{counts[0]:,} cases each" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} cases by seeds"
    return f"{_under(law)}, passkey at {reach}, {cases}: RoPE {_share(rope)}; {'; '.join(each)}."


def _compare(rope: Estimate, coca: Estimate) -> str:
    """Ahead or behind only where the intervals do not touch."""
    (rope_low, rope_high), (low, high) = rope.interval or (0.0, 1.0), coca.interval or (0.0, 1.0)
    if low > rope_high:
        return "finds more keys"
    return "finds fewer keys: not better" if rope_low > high else "not told apart from RoPE by these cases"


def _share(estimate: Estimate) -> str:
    low, high = estimate.interval or (math.nan, math.nan)
    return f"{share_text(estimate.value)} (95% {share_text(low)}–{share_text(high)})"


def control_verdict(run: Run, law: str) -> str | None:
    """Who gains from the longest window, against simply cutting the context to the training length."""
    lengths = sliding_lengths(run)
    if not lengths or lengths[-1] <= (run.train_length or 0):
        return None
    last = lengths[-1]
    gains: list[str] = []
    loses: list[str] = []
    for variant in variants_in(run):
        full, cut = perplexity_at(run, variant, law, last), control_at(run, variant, law, last)
        if full and cut:
            (gains if full.value < cut.value else loses).append(variant_name(variant))
    if not gains and not loses:
        return None
    start = f"{_under(law)}, at {last:,} tokens against the control (context cut to {run.train_length:,}):"
    if not gains:
        return f"{start} no variant gains from the longer context."
    rest = f"; {listed(loses)} do no better than with the context cut" if loses else ""
    return f"{start} {listed(gains)} {'gains' if len(gains) == 1 else 'gain'} from the longer context{rest}."


def _caveats(run: Run) -> list[str]:
    seeds = {row.seed for row in run.rows}
    if len(seeds) == 1:
        return ["One seed only: part of any difference between variants is the luck of that seed."]
    return []


def notes(run: Run, experiments: list[Experiment]) -> list[str]:
    """Conditions a reader must know, and what was not run."""
    said = []
    shares = sorted({row.passkey_share for row in run.training})
    if shares and shares[-1] > 0:
        every = "the same for every variant" if len(shares) == 1 else "not the same for every variant"
        share = " to ".join(f"{share:.1%}" for share in dict.fromkeys((shares[0], shares[-1])))
        said.append(
            f"Passkey documents no longer than the training length make up {share} of the training text, {every}: "
            "models this small do not learn retrieval from so little text otherwise. The paper mentions none."
        )
    elif shares:
        said.append("No passkey documents were mixed into the training text.")
    if run.training:
        sizes, tokens = [row.parameters for row in run.training], [row.tokens for row in run.training]
        said.append(
            f"Models here have {_span(sizes)} parameters and saw {_span(tokens)} tokens; "
            "the paper's have 350M and about 50B. Compare the shape of the curves, not the values."
        )
    else:
        said.append("No training records were found; the training length is taken to be the shortest length measured.")
    said.append("Perplexity over seeds is the mean of the seeds'; accuracy is all right cases over all cases.")
    strides = sorted({row.stride for row in run.perplexity if row.mode == "sliding"})
    if strides:
        said.append(f"Perplexity: sliding windows, stride {', '.join(map(str, strides))}; each token is scored once.")
    return said + not_run(run, experiments)


def training_text(run: Run) -> str:
    """Whether the models can be compared: the same tokens and steps."""
    if len({(row.tokens, row.steps) for row in run.training}) > 1:
        return "The models differ in tokens or steps: part of any difference between them is that."
    return "Every model saw the same number of tokens in the same number of steps."


def _span(numbers: list[int]) -> str:
    """The smallest and the largest, or the one that all are."""
    return " to ".join(dict.fromkeys((amount(min(numbers)), amount(max(numbers)))))


def amount(number: float) -> str:
    """
    >>> amount(33_400_000), amount(1500), amount(12)
    ('33.4M', '1.5k', '12')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def not_run(run: Run, experiments: list[Experiment]) -> list[str]:
    """The lines of the paper's tables that this run has no number for, and the lengths it does not reach."""
    missing: dict[str, list[str]] = {}
    for experiment in experiments:
        for row in experiment.rows:
            rows = run.perplexity if (row.kind or experiment.kind) == "perplexity" else run.passkey
            if not any((found.variant, found.scaling) == (row.variant, row.scaling) for found in rows):
                missing.setdefault(experiment.title.partition(":")[0], []).append(row.label)
    said = [f"Not run, {title}: {'; '.join(dict.fromkeys(labels))}." for title, labels in missing.items()]
    lengths = sliding_lengths(run) + passkey_lengths(run)
    wanted = max((max(experiment.lengths) // experiment.train_length for experiment in experiments), default=0)
    if lengths and run.train_length and max(lengths) < wanted * run.train_length:
        said.append(
            f"The longest text is {max(lengths):,} tokens, ×{max(lengths) / run.train_length:g} the training length; "
            f"the paper goes to ×{wanted}."
        )
    return said
