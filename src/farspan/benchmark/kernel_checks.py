"""Is every kernel right on this device? Each against the float64 equations, before its speed is worth a word."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError
from farspan.ops import DynamicNTK, Rotary, YaRN, coca_attention, coca_attention_reference, coca_features
from farspan.ops.masking import AttentionMask, make_mask

LAST = 4
"""Queries of a timed call that are compared."""
DRAWS = 32
"""Inputs a case is checked with. Full-width keys and ours are rounded at other angles: which of two paths is nearer to
the truth on one input is chance."""
USUAL, WORST = 1.5, 2.0
"""How many times the full-width path's error ours may have: in the root mean square, and at its largest, which a few
scores decide."""

Compared = tuple[Tensor, Tensor, Tensor]
"""A result, the same by the equations in float64, and the full-width path's."""


class Case(NamedTuple):
    """One call: h query heads on g key heads of width d, n queries at the end of m keys."""

    name: str
    h: int
    g: int
    n: int
    m: int
    d: int
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    law: Any = None


def _left_padding(m: int) -> dict[str, Any]:
    """Row 0 whole, row 1 without its first third."""
    return {"padding_mask": torch.arange(m)[None] >= torch.tensor([[0], [m // 3]])}


def _spread(n: int, m: int, *, free: bool) -> dict[str, Any]:
    """Positions with gaps that differ by row; those of the queries apart where they are free."""
    key = 3 * torch.arange(m)[None] + torch.tensor([[0], [40_000]])
    return {"positions": (key[:, -n:] + 5, key) if free else key}


LONG = DynamicNTK(4, 1024)
CASES = [
    *(Case(f"decode, groups of {8 // g}", 8, g, 1, 4097, d) for d in (64, 128) for g in (8, 2, 1)),
    *(Case("decode, long", 8, 2, 1, 32_768, d) for d in (64, 128)),
    *(Case(f"decode, slack, groups of {8 // g}", 8, g, 1, 3000, 128, options={"form": "slack"}) for g in (8, 4, 2, 1)),
    Case("decode, three queries", 4, 2, 3, 3000, 128),
    Case("decode, window", 4, 2, 1, 3000, 128, options={"window": 513}),
    Case("decode, no rotation", 4, 2, 1, 3000, 64, options={"rotary": None}),
    Case("decode, per_query dynamic NTK", 4, 2, 1, 5000, 64, law=LONG),
    Case("decode, YaRN", 4, 2, 1, 3000, 64, law=YaRN(4, 1024)),
    Case("decode, far", 2, 1, 1, 2000, 64, options={"positions": 131_072}),
    Case("decode, left padding", 4, 2, 1, 800, 64, options=_left_padding(800)),
    Case("decode, positions per row", 4, 2, 1, 800, 64, options=_spread(1, 800, free=False)),
    *(Case("decode, float32", 4, 2, 1, 1000, d, torch.float32) for d in (64, 128)),
    Case("decode, float16", 4, 2, 1, 1000, 128, torch.float16),
    Case("decode, width 8", 2, 1, 1, 65, 8),
    *(Case("features", 4, 2, 300, 1000, d) for d in (64, 128)),
    Case("features, width 256", 2, 1, 100, 300, 256),
    Case("features, slack", 4, 1, 200, 800, 64, options={"form": "slack"}),
    Case("features, per_query dynamic NTK", 2, 1, 500, 3000, 64, law=LONG),
    Case("features, left padding", 4, 2, 300, 800, 64, options=_left_padding(800)),
    Case("features, positions per row", 4, 2, 300, 800, 64, options=_spread(300, 800, free=False)),
    Case("features, free positions", 4, 2, 300, 800, 64, options=_spread(300, 800, free=True)),
]
"""Cases named "decode" run on the half-width kernel, "features" on the feature kernel and SDPA."""
TOY_CASES = [
    Case("decode", 2, 1, 1, 70, 16),
    Case("decode, left padding", 2, 1, 3, 40, 16, options=_left_padding(40)),
    Case("decode, positions per row", 2, 1, 3, 40, 16, options=_spread(3, 40, free=False)),
    Case("features", 2, 1, 33, 40, 16),
    Case("features, free positions", 2, 1, 3, 40, 16, options=_spread(3, 40, free=True)),
]


def check_kernels(device: str, *, toy: bool = False) -> list[dict[str, Any]]:
    """One row a kernel and case, with its error; :class:`ResultsDifferError` if one is too large."""
    cases = TOY_CASES if toy else CASES
    rows = [check_case(case, device, draws=1 if toy else DRAWS) for case in cases]
    sizes = (16,) if toy else (64, 128)
    rows += [check_lengths(device, d, n, shifted) for d in sizes for n in (1, 12) for shifted in (False, True)]
    rows += [check_preparation(device, form, d) for form in ("exact", "slack") for d in sizes]
    refuse_wrong(rows)
    return rows


def refuse_wrong(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`ResultsDifferError` with every :func:`complaint` about the rows, if there is one."""
    wrong = [f"{row['case']}: {why}" for row in rows if (why := complaint(row))]
    if wrong:
        raise ResultsDifferError(f"{len(wrong)} of {len(rows)} kernel checks fail: {'; '.join(wrong)}")


def random_case(case: Case, device: str, b: int = 2) -> list[Tensor]:
    """q, t and v of a case."""
    sizes = ((b, case.h, case.n, case.d), (b, case.g, case.m, case.d // 2), (b, case.g, case.m, case.d))
    q, t, v = (torch.randn(size, device=device) for size in sizes)
    return [x.to(case.dtype) for x in (q, t.relu(), v)]


def error_row(name: str, out: Tensor, truth: Tensor, plain: Tensor) -> dict[str, Any]:
    """The largest error, that of the full-width path in the same dtype, and what is allowed, with a rounding to spare.

    `rms_ratio` compares root mean squares, which say more than the largest of few; None where the path has no error.
    """
    ours, theirs = (float((x.double() - truth).abs().max()) for x in (out, plain))
    usual, theirs_usual = (float((x.double() - truth).square().mean().sqrt()) for x in (out, plain))
    rounding = float(truth.abs().max()) * torch.finfo(out.dtype).eps
    row = {"kind": "check", "case": name, "error": ours, "full_width": theirs, "allowed": WORST * theirs + rounding}
    return row | {"rms_ratio": usual / theirs_usual if theirs_usual > 0 else None}


def complaint(row: Mapping[str, Any], *, one_input: bool = False) -> str | None:
    """What is wrong with an :func:`error_row`; None if nothing is.

    Of `one_input` only the largest error is judged. Its root mean square is up to the few heads with a sharp softmax:
    most inputs have less than the other path's, and a few, by chance, up to three times as much.

    >>> complaint({"error": 1e-3, "allowed": 2e-3, "rms_ratio": 1.6})
    'its error is usually 1.60 times that of the full-width path (allowed: 1.5)'
    """
    if not row["error"] <= row["allowed"]:
        return f"{row['error']:.1e} (allowed: {row['allowed']:.1e})"
    if not one_input and row["rms_ratio"] is not None and not row["rms_ratio"] <= USUAL:
        return f"its error is usually {row['rms_ratio']:.2f} times that of the full-width path (allowed: {USUAL})"
    return None


def _moved(options: Any, device: str) -> Any:
    """The options, their tensors on the device."""
    if isinstance(options, dict):
        return {name: _moved(value, device) for name, value in options.items()}
    if isinstance(options, tuple):
        return tuple(_moved(value, device) for value in options)
    return options.to(device) if isinstance(options, Tensor) else options


@torch.no_grad()
def check_case(case: Case, device: str, *, draws: int) -> dict[str, Any]:
    """:func:`coca_attention` on the kernels and on SDPA, both against the equations in float64, on several inputs."""
    options = {"rotary": Rotary(case.d, scaling=case.law), **_moved(case.options, device)}
    found = []
    for _ in range(draws):
        inputs = random_case(case, device)
        truth = coca_attention_reference(*(x.double() for x in inputs), **options)
        found.append([truth, *(coca_attention(*inputs, **options, backend=one) for one in ("triton", "sdpa"))])
    truth, out, plain = (torch.cat(parts) for parts in zip(*found, strict=True))
    return error_row(f"{case.name}, {case.n} of {case.m}, d {case.d}, {case.dtype}", out, truth, plain)


def check_at_size(what: str, compared: Mapping[str, Compared]) -> dict[str, dict[str, Any]]:
    """Fields of a row: how far each contestant was off as it was timed.

    Raises:
        ResultsDifferError: one is farther off than :func:`error_row` allows.
    """
    found: dict[str, dict[str, Any]] = {"error_as_timed": {}, "allowed_as_timed": {}, "rms_ratio_as_timed": {}}
    for name, each in compared.items():
        row = error_row(name, *each)
        if why := complaint(row, one_input=True):
            raise ResultsDifferError(f"{name} as timed is wrong on {what}: {why}")
        for field, values in found.items():
            values[name] = row[field.removesuffix("_as_timed")]
    return found


def one_sequence(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, t and v of the first sequence with its last queries, for which the equations fit into memory."""
    q, t, v = (x[:1] for x in inputs)
    return q[:, :, -LAST:], t, v


@torch.no_grad()
def compare_forms(inputs: Sequence[Tensor], outs: Mapping[str, Tensor], rotary: Rotary | None) -> dict[str, Compared]:
    """Each form's output (b, h, n, d) of q, t, v, as far as :func:`one_sequence` goes."""
    q, t, v = one_sequence(inputs)
    compared = {}
    for form, out in outs.items():
        truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=rotary, form=form)
        plain = coca_attention(q, t, v, rotary=rotary, form=form, backend="sdpa")
        compared[form] = out[:1, :, -LAST:], truth, plain
    return compared


@torch.no_grad()
def check_lengths(device: str, d: int, n: int, shifted: bool) -> dict[str, Any]:
    """Check rows of different lengths in a static cache, with NaN beyond the end of each.

    `shifted`: each row from a position of its own, which dynamic NTK depends on.
    """
    case = Case("lengths", 4, 2, n, 1024 if d > 16 else 64, d)
    q, t, v = random_case(case, device, b=3)
    lengths = torch.tensor([case.m, case.m // 3, n], device=device)
    written = (torch.arange(case.m, device=device) < lengths[:, None])[:, None, :, None]
    held = [torch.where(written, x, torch.nan) for x in (t, v)]
    starts = [0, case.m, 7 * case.m] if shifted else [0, 0, 0]
    rotary = Rotary(d, scaling=DynamicNTK(4, case.m // 2) if shifted else None)
    mask = static_mask(n, case.m, lengths, torch.tensor(starts, device=device))
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=rotary, mask=mask)
    out = coca_attention(q, *held, rotary=rotary, mask=mask, backend="triton")
    plain = torch.stack(
        [
            coca_attention(*(x[i, :, :m][None] for x in (q, t, v)), rotary=rotary, positions=start, backend="sdpa")[0]
            for i, (m, start) in enumerate(zip(lengths.tolist(), starts, strict=True))
        ]
    )
    return error_row(f"lengths{', first per row' if shifted else ''}, {n} queries, d {d}", out, truth, plain)


def static_mask(n: int, m: int, lengths: Tensor, starts: Tensor) -> AttentionMask:
    """Make the mask of n queries at the end of each row's keys, of which there are `lengths` (b) in m slots.

    Slot 0 of a row is at position `starts` (b).
    """
    key = starts[:, None] + torch.arange(m, device=lengths.device)
    query = (starts + lengths)[:, None] + torch.arange(-n, 0, device=lengths.device)
    shared: dict[str, Any] = {"positions": (query, key), "lengths": lengths, "firsts": lambda: starts}
    return AttentionMask(n, m, lengths.device, first=None, aligned=False, **shared)


def check_preparation(device: str, form: str, d: int) -> dict[str, Any]:
    """q̃, k̃ and the gradients of q and t, fused and by plain torch in bfloat16, against float64."""
    from farspan.ops.triton.coca_features import prepare_op

    case = Case("prepare", 6, 2, 300 if d > 16 else 30, 300 if d > 16 else 30, d)
    q, t, _ = random_case(case, device)
    rotary, start = Rotary(d), 130_000
    angles = make_mask(case.n, case.m, 2, q.device, positions=start).angles(rotary)
    results: list[Tensor] = []
    weights = [torch.randn(2, heads, case.n, d, device=device).bfloat16() for heads in (case.h, case.g)]
    for which in range(3):
        leaves = [x.detach().to(torch.float64 if which == 0 else x.dtype).requires_grad_() for x in (q, t)]
        if which == 2:
            out = prepare_op(leaves[0], leaves[1], angles.steps, None, None, start, start, form, 1.0)
        else:
            dtype = leaves[0].dtype
            out = coca_features(leaves[0], leaves[1], angles.query(dtype), angles.key(dtype), form=form)
        gradients = torch.autograd.grad(out, leaves, [w.to(out[0].dtype) for w in weights])
        results.append(torch.cat([x.detach().flatten() for x in (*out, *gradients)]))
    truth, plain, fused = results
    return error_row(f"preparation, {form}, d {d}, forward and backward", fused, truth, plain)
