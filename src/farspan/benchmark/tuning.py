"""Which tiles are fastest for decoding on this device: the source of the tables in ops.triton.coca_decode."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.ahead import compile_ahead, refused
from farspan.benchmark.clock import clock, copy_speed
from farspan.benchmark.kernel_checks import complaint, error_row
from farspan.benchmark.kernels import NOTED, TOY, Shape, assembler_row, random_inputs
from farspan.ops import Rotary, coca_attention, coca_attention_reference
from farspan.ops.device import has_sound_wgmma
from farspan.ops.masking import make_mask

SPLITS = (1.0, 2.0, 0.5)
"""Parts of the usual number of splits."""
ALONE = [(1, *rest) for rest in product((16, 32, 64), (1, 2, 4), (2, 3, 4))]
TOGETHER = [(8, *cut, stages) for cut in ((64, 4), (128, 4), (128, 8)) for stages in (2, 3, 4)]
BY_WARPS = [*((8, *rest) for rest in product((16, 32), (1, 2), (2, 3, 4))), (8, 64, 2, 2), (8, 64, 2, 3)]
"""Instead of them, where ptxas cannot be trusted with wgmma."""
SHAPES = [NOTED[0], NOTED[1], NOTED[3], NOTED[4], NOTED[5]]

Numbers = tuple[int, int, int, int]
"""Those of a Cut, which this module cannot name before triton is there."""


def variants(shape: Shape, toy: bool = False) -> list[Numbers]:
    """The cuts to try: a query alone has a kernel of its own."""
    if toy:
        return [(8, 32, 4, 2)]
    few: list[Numbers] = [cut for cut in ALONE if cut[1] * shape.d <= 4096 * cut[2]]  # others spill their registers
    return few if shape.h == shape.g else list(TOGETHER if has_sound_wgmma() else BY_WARPS)


def run(*, device: str, repeats: int, toy: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the cuts of each shape, fastest first; raises ResultsDifferError if any cut is wrong."""
    yield "assembler", [assembler_row()]
    size = 2**20 if toy else 2**31
    cuts = {shape: variants(shape, toy) for shape in (TOY if toy else SHAPES)}
    if not toy:
        tries = [(shape, cut, device) for shape, each in cuts.items() for cut in each]
        good, bad = compile_ahead(_try, tries)
        yield "variants that cannot run", refused(bad)
        cuts = {shape: [cut for of, cut, *_ in good if of == shape] for shape in cuts}
    for shape, each in cuts.items():
        before = copy_speed(device, size)
        found = _sweep(shape, each, device, repeats)
        rows = sorted(found, key=lambda row: row["milliseconds"]["exact"]["median"])
        copies = {"before": before, "after": copy_speed(device, size)}
        for row in rows:
            share = row["terabytes_a_second"]["exact"] / max(copies.values())
            row |= {"of_copy": {"exact": share}, "copy_terabytes_a_second": copies}
            yield f"{tuple(shape)} {row['cut']} splits {row['splits']}", [row]


def _try(shape: Shape, numbers: Numbers, device: str) -> None:
    """A call of a variant with one split and one with several, for a single sequence."""
    q, t, _, v = random_inputs(shape._replace(b=1), device)
    for splits in (1, 6):
        _launcher(q, t, v)(numbers, splits)
    torch.cuda.synchronize()  # what went wrong shows only now


def _launcher(q: Tensor, t: Tensor, v: Tensor) -> Callable[[Numbers, int], Tensor]:
    from farspan.ops.triton.coca_decode import Cut, DecodeCall, launch

    (b, _, n, d), m = q.shape, t.shape[2]
    step = make_mask(n, m, b, q.device).angles(Rotary(d)).steps
    nothing = (None, None, None, None, None)
    call = DecodeCall(q, t, v, step, *nothing, first=0, form="exact", causal=True, window=None, scale=d**-0.5)
    return lambda numbers, splits: launch(call, Cut(*numbers), splits)


@torch.no_grad()
def _sweep(shape: Shape, cuts: list[Numbers], device: str, repeats: int) -> Iterator[dict[str, Any]]:
    from farspan.ops.triton.coca_decode import Cut, choose_cut, choose_splits
    from farspan.ops.triton.support import processors

    q, t, _, v = random_inputs(shape, device)
    one = (q[:1], t[:1], v[:1])  # of one sequence, the float64 equations fit into memory
    options: dict[str, Any] = {"rotary": Rotary(shape.d)}
    launch, read = _launcher(q, t, v), shape.key_bytes[0]
    truth = coca_attention_reference(*(x.double() for x in one), **options)
    plain = coca_attention(*one, **options, backend="sdpa")
    taken = choose_cut(shape.n * shape.h // shape.g, shape.d // 2, shape.d, q.dtype)
    whole = {cut: taken if cut == taken[: len(cut)] else Cut(*cut) for cut in cuts}  # the library's may have own waves
    usual = {cut: choose_splits(shape.b * shape.g, shape.m, whole[cut], processors(q.device)) for cut in cuts}
    for cut, splits in dict.fromkeys((cut, max(1, int(n * part))) for cut, n in usual.items() for part in SPLITS):
        call = partial(launch, cut, splits)
        check = error_row("tuning", call()[:1], truth, plain)
        if why := complaint(check, one_input=True):
            raise ResultsDifferError(f"cut {cut}, splits {splits}, is wrong on {tuple(shape)}: {why}")
        times = clock(call, device=device, repeats=repeats)
        yield {
            "kind": "tuning",
            **shape._asdict(),
            "cut": cut,
            "splits": splits,
            "error": check["error"],
            "allowed": check["allowed"],
            "milliseconds": {"exact": times.milliseconds},
            "terabytes_a_second": {"exact": read / times.median / 1e12},
        }
