"""`results/speed-*.json`, what `farspan bench cosformer` writes, as typed values: time and memory against length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farspan.errors import require

OURS = "triton"
"""What a GPU's times are multiples of."""


@dataclass(frozen=True)
class Timing:
    """One length: how long each contestant took, in multiples of ours."""

    passes: str
    width: int
    length: int
    times: Mapping[str, float]
    milliseconds: float | None
    """Ours; None on a CPU, whose absolute times mean little elsewhere."""
    memory: float | None
    """Ours over the least that the pass could hold; None where it was not measured."""

    def joined(self, other: "Timing") -> "Timing":
        """Both of one length: the times of both, and whichever knows the memory."""
        memory = self.memory if self.memory is not None else other.memory
        return replace(self, times={**other.times, **self.times}, memory=memory)


def parse_timings(raw: Sequence[Any], where: Path) -> list[Timing]:
    """The rows about length: of a GPU's kernels ("linear"), or of a CPU ("softmax" for time, "length" for memory)."""
    found: dict[tuple[str, int, int], Timing] = {}
    for i, row in enumerate(raw):
        require(
            isinstance(row, Mapping) and "kind" in row, f"{where} row {i} must have a kind; write it with `farspan`"
        )
        try:
            timing = READERS[row["kind"]](row) if row["kind"] in READERS else None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where} row {i} lacks {error}; write it again with `farspan bench cosformer`") from error
        if timing is not None:
            key = (timing.passes, timing.width, timing.length)
            found[key] = timing.joined(found[key]) if key in found else timing
    return list(found.values())


def _of_kernels(row: Mapping[str, Any]) -> Timing:
    times = {name: spread["median"] for name, spread in row["speedup"].items()}
    ours, memory = row["milliseconds"][OURS]["median"], row["memory_over_least"][OURS]
    return Timing(row["passes"], row["d"], row["n"], times, ours, memory)


def _against_softmax(row: Mapping[str, Any]) -> Timing:
    return Timing("forward", row.get("head_dim", 64), row["length"], {"flash softmax": row["speedup"]}, None, None)


def _alone(row: Mapping[str, Any]) -> Timing:
    """Beside q, k and v, which are held anyway, `peak_bytes` has the output."""
    each = 4 * row["heads"] * row["head_dim"] * row["length"]
    return Timing("forward", row["head_dim"], row["length"], {}, None, (3 * each + row["peak_bytes"]) / (4 * each))


READERS = {"linear": _of_kernels, "softmax": _against_softmax, "length": _alone}


def groups(timings: Sequence[Timing]) -> list[tuple[str, int, list[Timing]]]:
    """Passes, width, and their timings by length."""
    keys = dict.fromkeys((timing.width, timing.passes) for timing in timings)
    return [
        (passes, width, sorted((x for x in timings if (x.width, x.passes) == (width, passes)), key=lambda x: x.length))
        for width, passes in keys
    ]
