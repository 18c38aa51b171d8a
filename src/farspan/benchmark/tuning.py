"""Which tiles are fastest for decoding on this device: the source of the table in ops.coca.kernels.attention."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.clock import clock, copy_speed
from farspan.benchmark.kernel_checks import error_row
from farspan.benchmark.kernels import NOTED, TOY, Shape, random_inputs
from farspan.ops import Rotary, coca_attention, coca_attention_reference
from farspan.ops.phases import rotary_steps

KEYS, WARPS, STAGES, SPLITS = (32, 64, 128), (4, 8), (2, 3, 4), (1.0, 0.25)
SHAPES = [NOTED[0], NOTED[1], NOTED[3]]


def run(*, device: str, repeats: int, toy: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the six fastest cuts of each shape, fastest first; raises ResultsDifferError if any cut is wrong."""
    speed = copy_speed(device, 2**20 if toy else 2**31)
    for shape in TOY if toy else SHAPES:
        rows = sorted(
            _sweep(shape, device, repeats, speed, toy), key=lambda row: row["milliseconds"]["exact"]["median"]
        )
        for row in rows[:6]:
            yield f"{tuple(shape)} {row['cut']} splits {row['splits']}", [row]


@torch.no_grad()
def _sweep(shape: Shape, device: str, repeats: int, copy: float, toy: bool) -> Iterator[dict[str, Any]]:
    from triton.runtime.errors import OutOfResources

    from farspan.ops.coca.kernels.attention import Cut, choose_splits, launch, processors

    q, t, _, v = random_inputs(shape, device)
    step, scale = rotary_steps(Rotary(shape.d), None, q.device), shape.d**-0.5
    one = [x[:1] for x in (q, t, v)]  # of one sequence, the float64 equations fit into memory
    truth = coca_attention_reference(*(x.double() for x in one), rotary=Rotary(shape.d))
    plain = coca_attention(*one, rotary=Rotary(shape.d), backend="sdpa")
    places = (None, None, None, None, None, None, 0, 0)
    for keys, warps, stages, part in [(32, 4, 2, 1.0)] if toy else product(KEYS, WARPS, STAGES, SPLITS):
        cut = Cut(16, keys, warps, stages)
        splits = max(1, int(choose_splits(shape.b * shape.g, shape.m, cut, processors(q.device)) * part))

        def call(cut: Cut = cut, splits: int = splits) -> torch.Tensor:
            return launch(q, t, v, step, *places, "exact", False, True, None, scale, splits, cut)

        try:
            check = error_row("tuning", call()[:1], truth, plain)
        except OutOfResources:  # more shared memory than a processor has
            continue
        if not check["error"] <= check["allowed"]:
            raise ResultsDifferError(
                f"cut {tuple(cut)}, splits {splits}, is wrong on {tuple(shape)}: {check['error']:.1e} "
                f"(allowed: {check['allowed']:.1e})"
            )
        times = clock(call, device=device, repeats=repeats)
        rate = shape.key_bytes[0] / times.median / 1e12
        yield {
            "kind": "tuning",
            **shape._asdict(),
            "cut": tuple(cut),
            "splits": splits,
            "error": check["error"],
            "allowed": check["allowed"],
            "milliseconds": {"exact": times.milliseconds},
            "terabytes_a_second": {"exact": rate},
            "of_copy": {"exact": rate / copy},
        }
