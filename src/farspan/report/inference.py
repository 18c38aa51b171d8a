"""What `farspan bench decode` and `benchmarks/coca_kernels.py` write, as typed values: CoCA's speed over RoPE's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from farspan.report.timings import Spread, read_rows

DECODE, KERNELS = "decode", "coca-kernels"
"""How the names of the two kinds of files begin."""
MADE_READY = "rotated for SDPA"
"""How the name of a contestant ends that makes ready keys of the cached t for a chunk of queries."""
BEST = "best"
"""In place of a mode: each model in its own fastest."""


class Shape(NamedTuple):
    """What attention alone answers: b texts of m tokens, h heads of width d on g for keys, n queries a head."""

    b: int
    h: int
    g: int
    n: int
    m: int
    d: int


@dataclass(frozen=True)
class Inferred:
    """How fast one contestant does one thing, in multiples of RoPE's speed."""

    what: str
    """ "decode": greedy tokens after a context; "prompt": reading one; "kernel": attention alone; "missing": a mode of
    decoding that could not be timed."""
    attention: str
    mode: str
    """Of decoding: how the model is run; of attention alone with RoPE: which of SDPA's kernels; else empty."""
    size: tuple[int, ...]
    """To sort columns by."""
    heading: str
    """Of its column."""
    speed: Spread | None
    """None of what is missing, of which `note` says why."""
    note: str
    peak_bytes: int | None = None
    shape: Shape | None = None
    """Of attention alone."""
    milliseconds: float | None = None
    """Of attention alone."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.what, self.attention, self.mode, self.heading


def parse_inference(raw: Sequence[Any], where: Path, kind: str, *, absolute: bool) -> list[Inferred]:
    """The rows with speeds; `absolute`: whether tokens a second mean anything, as those of a shared CPU do not."""
    return read_rows(raw, where, lambda row: _of_kernels(row) if kind == KERNELS else _of_models(row, absolute))


def _of_models(row: Mapping[str, Any], absolute: bool) -> Iterator[Inferred]:
    def rate(found: Mapping[str, Any]) -> list[str]:
        return [f"{found['tokens_per_second']:,.0f} tokens/s"] if absolute else []

    if row["kind"] == "prefill":
        speed, peak, length = (
            Spread.alone(row["speed_over_rope"]),
            row["peak_bytes"] if absolute else None,
            row["length"],
        )
        note = "; ".join(rate(row))
        yield Inferred("prompt", row["attention"], "", (length,), f"{length:,}", speed, note, peak)
    elif row["kind"] == "missing" and "context" in row:  # else it is about all, and each row says what it decodes on
        size, heading, why = (row["context"], row["batch"]), f"{row['batch']} × {row['context']:,}", row["why"]
        yield Inferred("missing", "", row["mode"], size, heading, None, why.partition(". ")[0])
    elif row["kind"] in ("decode", BEST):
        size, heading = (row["context"], row["batch"]), f"{row['batch']} × {row['context']:,}"
        if row["kind"] == "decode":
            speed = Spread.of(row["speed_over_rope"])
            yield Inferred("decode", row["attention"], row["mode"], size, heading, speed, speed.text(2))
            return
        for attention, found in row["each"].items():
            note = "; ".join([found["mode"], *rate(found)])
            speed = Spread.alone(found["speed_over_rope"])
            yield Inferred("decode", attention, BEST, size, heading, speed, note)


def _of_kernels(row: Mapping[str, Any]) -> Iterator[Inferred]:
    """CoCA's contestants, and the fastest of RoPE's kernels, which they are compared with."""
    if row["kind"] not in ("decode", "prefill"):
        return
    shape, best = Shape(*(row[name] for name in Shape._fields)), row["best_peer"]
    if best is None or best.endswith(MADE_READY):  # nothing of RoPE's to compare with
        return
    heading = f"{shape.b} × {shape.m:,}, {shape.h} of {shape.d} on {shape.g}, {shape.n:,} at once"
    times = {name: spread["median"] for name, spread in row["milliseconds"].items() if spread}

    def inferred(name: str, contestant: str, mode: str, speed: float, note: str) -> Inferred:
        over, time = Spread.alone(speed), times[contestant]
        return Inferred("kernel", name, mode, shape, heading, over, note, shape=shape, milliseconds=time)

    yield inferred("rope", best, best, 1.0, "")
    made = {name: times[best] / times[name] for name in times if name.endswith(MADE_READY)}
    for form, speed in {**row["speedup"], **made}.items():
        copy = row.get("of_copy", {}).get(form)
        yield inferred(f"coca-{form}", form, "", speed, f"{copy:.0%} of a copy's speed" if copy else "")
