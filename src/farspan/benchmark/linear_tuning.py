"""Which tiles are fastest for cosFormer on this device: the source of the table in ops.cosformer.kernels.attention."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from farspan.benchmark.clock import clock
from farspan.benchmark.linear import OURS, PASSES, Shape, as_call, check, contestants, random_inputs

BLOCKS, COLUMNS, WARPS, STAGES = (32, 64), (32, 64, 128), (4, 8), (1, 2, 3)


def run(
    *, device: str, repeats: int, widths: tuple[int, ...] = (64, 128), toy: bool = False
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a row for each cut and pass, at 16 384 tokens; raises ResultsDifferError where a cut is wrong."""
    for d in (16,) if toy else widths:
        shape = Shape(1, 1, 66, d) if toy else Shape(4, 16, 16_384, d)
        cuts = [(64, 64, 4, 2)] if toy else list(product(BLOCKS, [c for c in COLUMNS if c <= d], WARPS, STAGES))
        for cut in cuts:
            rows = _measure(shape, cut, device, repeats, toy)
            yield f"width {d}, cut {cut}", rows


def _measure(
    shape: Shape, cut: tuple[int, int, int, int], device: str, repeats: int, toy: bool
) -> list[dict[str, Any]]:
    from triton.runtime.errors import OutOfResources

    from farspan.ops.cosformer.kernels.attention import CUTS, Cut

    size = 64 if shape.d <= 64 else 128
    usual = CUTS[size]
    CUTS[size] = Cut(*cut)
    try:
        check(Shape(1, 1, 66, shape.d) if toy else Shape(1, 4, 1000, shape.d), device, None)
        attend, inputs = contestants(shape.n, device, None)[OURS], random_inputs(shape, device)
        return [
            {
                "kind": "tuning",
                **shape._asdict(),
                "cut": cut,
                "passes": passes,
                "milliseconds": clock(
                    as_call(attend, inputs, passes != "forward"), device=device, repeats=repeats, graph=False
                ).milliseconds,
            }
            for passes in PASSES
        ]
    except OutOfResources:  # more shared memory or registers than a processor has
        return []
    finally:
        CUTS[size] = usual
