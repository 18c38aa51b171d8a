"""What a reader calls the variants and scaling laws, and how each is drawn."""

from collections.abc import Sequence
from typing import Any

from farspan.report.collect import Run

# Okabe and Ito's colours, told apart with every common colour vision and on light and dark; markers say it once more.
STYLES = {
    "alibi": ("ALiBi", "#8a8a8a", "s"),
    "rope": ("RoPE", "#D55E00", "o"),
    "coca-slack": ("CoCA slack", "#E69F00", "^"),
    "coca-strict": ("CoCA strict", "#009E73", "D"),
    "coca-exact": ("CoCA exact", "#0081c9", "v"),
    "cosformer": ("cosFormer", "#0072B2", "*"),
    "cosformer-plain": ("cosFormer without re-weighting", "#56B4E9", "X"),
    "linear-coca": ("Linear CoCA (experimental)", "#CC79A7", "p"),
}
OTHER = ("#CC79A7", "P")
LAW_STYLES = {
    "none": ("no scaling", "#1f2328", "o"),
    "pi": ("PI", "#E69F00", "s"),
    "ntk": ("NTK", "#0081c9", "^"),
    "dynamic": ("dynamic NTK", "#009E73", "D"),
    "yarn": ("YaRN", "#CC79A7", "v"),
}
LAW_STYLES |= {"linear": LAW_STYLES["pi"], "dynamic_ntk": LAW_STYLES["dynamic"]}
"""The scaling laws that `farspan analyze` compares."""
LAWS = {"ntk": "dynamic NTK", "static-ntk": "static NTK", "pi": "PI", "yarn": "YaRN", "llama3": "Llama 3's law"}
"""What rows of results call a law (:mod:`farspan.evaluation.laws`), in words. A plain "ntk" is dynamic there."""

PAPER_LAW = "ntk-4"
"""The law of the paper's tables, as rows of results call it."""

CONTESTANTS = {"rotated for SDPA": "keys made for SDPA", "cudnn": "cuDNN"}
"""What benchmarks call a contestant, part by part, in words."""


def variant_name(variant: str) -> str:
    """
    >>> variant_name("coca-exact"), variant_name("mine")
    ('CoCA exact', 'mine')
    """
    return STYLES[variant][0] if variant in STYLES else variant


def contestant_name(contestant: str) -> str:
    """
    >>> contestant_name("coca-exact, cudnn"), contestant_name("coca-exact, rotated cache")
    ('CoCA exact, cuDNN', 'CoCA exact, rotated cache')
    """
    return ", ".join(CONTESTANTS.get(part, variant_name(part)) for part in contestant.split(", "))


def variant_style(variant: str) -> dict[str, Any]:
    """Colour and marker of a variant, as matplotlib takes them."""
    colour, marker = STYLES[variant][1:] if variant in STYLES else OTHER
    return {"color": colour, "marker": marker}


def scaling_name(scaling: str) -> str:
    """
    >>> scaling_name("none"), scaling_name("ntk-4/per_request"), scaling_name("yarn-4+log")
    ('no scaling', 'dynamic NTK 4 per request', 'YaRN 4, log length')
    >>> scaling_name("static-ntk-4")
    'static NTK 4'
    """
    scaling, _, log = scaling.partition("+")
    law, _, mode = scaling.partition("/")
    kind, _, factor = law.rpartition("-")
    name = "no scaling" if law == "none" else f"{LAWS[kind]} {factor}" if kind in LAWS else law
    return name + (f" {mode.replace('_', ' ')}" if mode else "") + (", log length" if log else "")


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def variants_in(run: Run) -> list[str]:
    """The variants measured or trained, in the order of the paper's tables."""
    found = {row.variant for row in run.rows}
    order = list(STYLES)
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
