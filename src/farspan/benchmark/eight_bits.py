"""Decoding from t in eight bits: contestants, whether they are right about their codes, and what quantizing costs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.kernel_checks import (
    DRAWS,
    LAST,
    LONG,
    Case,
    Compared,
    error_row,
    one_sequence,
    random_case,
    refuse_wrong,
)
from farspan.benchmark.truth import apart
from farspan.ops import Rotary, coca_attention, half_width_attention, half_width_attention_reference, quantize_t

EXACT = "exact, 8-bit t"
CODED = {EXACT: "exact", "slack, 8-bit t": "slack"}
"""Contestant → form."""
CASES = [
    *(Case(f"groups of {8 // g}", 8, g, 1, 4097, d) for d in (64, 128) for g in (8, 2, 1)),
    *(Case("slack", 4, g, 1, 3000, 128, options={"form": "slack"}) for g in (4, 1)),
    Case("three queries", 4, 2, 3, 3000, 128),
    Case("window", 4, 1, 1, 3000, 128, options={"window": 513}),
    Case("no rotation", 4, 1, 1, 3000, 64, options={"rotary": None}),
    Case("per_query dynamic NTK", 4, 2, 1, 5000, 64, law=LONG),
    Case("float32", 4, 2, 1, 1000, 64, torch.float32),
    *(Case("float16", 4, 2, n, 1000, 128, torch.float16) for n in (1, 100)),
    Case("prefill", 4, 2, 300, 1000, 64),
]
TOY_CASES = [
    Case("one query", 2, 2, 1, 70, 16),
    Case("few queries", 4, 2, 3, 70, 16),
    Case("prefill", 2, 1, 33, 40, 16),
]


def check_codes(device: str, *, toy: bool = False) -> list[dict[str, Any]]:
    """One row a case, with its error; :class:`ResultsDifferError` if one is too large."""
    rows = [check_case(case, device, draws=1 if toy else DRAWS) for case in (TOY_CASES if toy else CASES)]
    refuse_wrong(rows)
    return rows


@torch.no_grad()
def check_case(case: Case, device: str, *, draws: int) -> dict[str, Any]:
    """The kernels on codes against the equations in float64, on several inputs."""
    options = {"rotary": Rotary(case.d, scaling=case.law), **case.options}
    found = []
    for _ in range(draws):
        q, t, v = random_case(case, device)
        codes, t_scale = quantize_t(t)
        out = half_width_attention(q, codes, v, t_scale=t_scale, **options)
        found.append((out, *truths(q, t, v, codes, t_scale, options)[:2]))
    out, truth, plain = (torch.cat(parts) for parts in zip(*found, strict=True))
    return error_row(f"8-bit t, {case.name}, {case.n} of {case.m}, d {case.d}, {case.dtype}", out, truth, plain)


def truths(
    q: Tensor, t: Tensor, v: Tensor, codes: Tensor, t_scale: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: attention of what the codes stand for; the same with the error of full-width keys; that of t.

    These keys are made of t, not of codes, whose numbers their dtype would round once more: so codes are held to the
    very bounds that t is.
    """
    wide = (q.double(), v.double())
    of_codes = half_width_attention_reference(wide[0], codes, wide[1], t_scale=t_scale, **options)
    of_t = half_width_attention_reference(wide[0], t.double(), wide[1], **options)
    plain = coca_attention(q, t, v, **options, backend="sdpa")
    return of_codes, of_codes + plain.double() - of_t, of_t


def coded_calls(q: Tensor, t: Tensor, v: Tensor, rotary: Rotary) -> dict[str, Callable[[], Tensor]]:
    """The contestants: t is quantized before any clock starts, as a cache holds it."""
    codes, t_scale = quantize_t(t)
    return {
        name: lambda form=form: half_width_attention(q, codes, v, rotary=rotary, form=form, t_scale=t_scale)  # type: ignore[misc]
        for name, form in CODED.items()
    }


@torch.no_grad()
def compare_codes(
    inputs: Sequence[Tensor], calls: Mapping[str, Callable[[], Tensor]], rotary: Rotary
) -> tuple[dict[str, Compared], dict[str, float]]:
    """Each contestant's result beside the attention of its codes, and how far that is from the attention of t.

    The latter in float64, in the root mean square and as a part of it: what eight bits cost, whatever the kernel.
    """
    q, t, v = one_sequence(inputs)
    codes, t_scale = quantize_t(t)
    compared, quantizing = {}, {}
    for name, call in calls.items():
        of_codes, plain, of_t = truths(q, t, v, codes, t_scale, {"rotary": rotary, "form": CODED[name]})
        compared[name] = call()[:1, :, -LAST:], of_codes, plain
        quantizing[name] = apart(of_codes, of_t)
    return compared, quantizing
