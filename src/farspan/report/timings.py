"""What `farspan bench cosformer` and `farspan bench layer` write, as typed values: time and memory against length."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from farspan.errors import require

T = TypeVar("T")
COSFORMER, COCA = "cosformer-length", "coca-speed"
"""The shipped tables."""
OURS = "triton"
"""What a GPU's times of cosFormer are multiples of."""
FIRST_FORM = "coca-exact"
"""Whose memory is compared with RoPE's."""


@dataclass(frozen=True)
class Spread:
    """A ratio of times: the median, and the range that holds three fifths; without one, the median thrice."""

    median: float
    low: float
    high: float

    @classmethod
    def alone(cls, value: float) -> "Spread":
        return cls(value, value, value)

    @classmethod
    def of(cls, raw: Mapping[str, float]) -> "Spread":
        return cls(raw["median"], raw["low"], raw["high"])

    def text(self, digits: int = 3) -> str:
        """The range, where there is one.

        >>> Spread(0.931, 0.925, 0.941).text(), Spread.alone(0.931).text()
        ('0.925–0.941', '')
        """
        return f"{self.low:.{digits}f}–{self.high:.{digits}f}" if self.low < self.high else ""


@dataclass(frozen=True)
class Timing:
    """One length: how long each contestant took, in multiples of one of them."""

    subject: str
    """The shipped table it belongs to."""
    passes: str
    setting: str
    """What else sets it apart from others of this length: "width 64"; empty where nothing does."""
    length: int
    heading: str
    """Of its column."""
    times: Mapping[str, Spread]
    unit: str
    """What the times are multiples of, in milliseconds; empty on a CPU, whose absolute times mean little elsewhere."""
    memory: float | None
    """Ours over the least that the pass could hold, or over RoPE's; None where it was not measured."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.subject, self.passes, self.setting, self.length

    def joined(self, other: "Timing") -> "Timing":
        """Both of one length: the times of both, and whichever knows the memory."""
        memory = self.memory if self.memory is not None else other.memory
        return replace(self, times={**other.times, **self.times}, memory=memory)


def parse_timings(raw: Sequence[Any], where: Path) -> list[Timing]:
    """The rows about length: of CoCA's layers ("layer"), of cosFormer's kernels ("linear"), or of cosFormer on a CPU
    ("softmax" for time, "length" for memory)."""
    found: dict[tuple[str, str, str, int], Timing] = {}
    for timing in read_rows(raw, where, lambda row: [READERS[row["kind"]](row)] if row["kind"] in READERS else []):
        found[timing.key] = timing.joined(found[timing.key]) if timing.key in found else timing
    return list(found.values())


def read_rows(raw: Sequence[Any], where: Path, read: Callable[[Mapping[str, Any]], Iterable[T]]) -> list[T]:
    """What `read` makes of each row of a benchmark; a row that is none of its own is refused by name."""
    found: list[T] = []
    for i, row in enumerate(raw):
        require(
            isinstance(row, Mapping) and "kind" in row, f"{where} row {i} must have a kind; write it with `farspan`"
        )
        try:
            found += read(row)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            said = f"lacks {error}" if isinstance(error, KeyError) else f"is no benchmark's ({error})"
            raise ValueError(f"{where} row {i} {said}; write it again with `farspan bench`") from error
    return found


def _cosformer(
    row: Mapping[str, Any], length: int, width: int, times: Mapping[str, float], unit: str, memory: float | None
) -> Timing:
    spreads = {name: Spread.alone(value) for name, value in times.items()}
    passes = row.get("passes", "forward")
    return Timing(COSFORMER, passes, f"width {width}", length, f"{length:,}", spreads, unit, memory)


def _of_kernels(row: Mapping[str, Any]) -> Timing:
    times = {name: spread["median"] for name, spread in row["speedup"].items()}
    ours, memory = row["milliseconds"][OURS]["median"], row["memory_over_least"][OURS]
    return _cosformer(row, row["n"], row["d"], times, f"{ours:.2f} ms", memory)


def _against_softmax(row: Mapping[str, Any]) -> Timing:
    return _cosformer(row, row["length"], row.get("head_dim", 64), {"flash softmax": row["speedup"]}, "", None)


def _alone(row: Mapping[str, Any]) -> Timing:
    """Beside q, k and v, which are held anyway, `peak_bytes` has the output."""
    each = 4 * row["heads"] * row["head_dim"] * row["length"]
    return _cosformer(row, row["length"], row["head_dim"], {}, "", (3 * each + row["peak_bytes"]) / (4 * each))


def _of_layers(row: Mapping[str, Any]) -> Timing:
    """Layers of CoCA and ALiBi over the best of RoPE's; on a CPU, in float32, they are toys."""
    times = {name: Spread.of(spread) for name, spread in row["time_over_best_rope"].items()}
    best, peaks, group, toy = row["best_rope"], row["peak_bytes"], row["h"] // row["g"], row["dtype"] == "torch.float32"
    settings = ["not compiled"] * (row["compiler"] == "none") + [f"{group} query heads a key head"] * (group > 1)
    heading = f"{row['b']} × {row['n']:,}, {row['h']} of {row['d']}"
    unit = "" if toy else f"{row['milliseconds'][best]['median']:.2f} ms; {best}"
    memory = None if toy else peaks[FIRST_FORM] / peaks[best]
    return Timing(COCA, row["passes"], ", ".join(settings), row["n"], heading, times, unit, memory)


READERS = {"layer": _of_layers, "linear": _of_kernels, "softmax": _against_softmax, "length": _alone}


def groups(timings: Sequence[Timing], subject: str) -> list[tuple[str, list[Timing]]]:
    """What is timed, as "forward, width 64", and its timings by length."""
    found: dict[str, list[Timing]] = {}
    for timing in (x for x in timings if x.subject == subject):
        found.setdefault(", ".join(filter(None, (timing.passes, timing.setting))), []).append(timing)
    return [(name, sorted(group, key=lambda x: x.length)) for name, group in found.items()]
