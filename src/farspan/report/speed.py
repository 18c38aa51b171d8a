"""Rows of benchmarks → tables of speeds: attention against length, decoding, and CoCA's kernels alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from farspan.errors import require
from farspan.experiments import Experiment
from farspan.report.results import Record, Run
from farspan.report.tables import Entry, Table, Value, file_of, grid, noted, pivot, variant_name

MADE_READY = "rotated for SDPA"
"""Ends the names of candidates that prepare keys of the cached t for a chunk of queries."""
REMOVED = "8-bit t"
"""Marks a removed variant in earlier results."""
BEST = "each in its fastest mode"


class Spread(NamedTuple):
    """A ratio: the median, and the range of the middle three fifths; without one, the median thrice."""

    median: float
    low: float
    high: float

    def cell(self, digits: int, *notes: str) -> str:
        """Show the median, and in small print the range if there is one."""
        ends = f"{self.low:.{digits}f}–{self.high:.{digits}f}"
        return noted(f"{self.median:.{digits}f}", *([ends] if self.low < self.high else notes))


def spread(raw: Any) -> Spread:
    """Read a ratio, or its median and range."""
    each: dict[str, Any] = raw if isinstance(raw, dict) else {"median": raw}
    found = Spread(*(each.get(name, each["median"]) for name in Spread._fields))
    require(0 < found.low <= found.high, f"a ratio must be positive, got {raw}")
    return found


def read(run: Run, kind: str) -> Iterator[Any]:
    """Read the rows of a benchmark. Raise one line for a row that is not one of its own."""
    for row in run.of(kind):
        try:
            yield from READERS[kind](row)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            said = f"lacks {error}" if isinstance(error, KeyError) else f"is no row of a benchmark ({error})"
            raise ValueError(f"{row.where} {said}; write it again with `farspan bench`") from error


# Against length


@dataclass(frozen=True)
class Timing:
    """How long each candidate took at one length, over a reference."""

    group: str
    length: int
    heading: str
    times: Mapping[str, Spread]
    unit: str = ""
    """What the times are multiples of, in milliseconds, and whose they are."""
    memory: float | None = None

    def fastest(self, names: Iterable[str]) -> Spread | None:
        """Return the time of the fastest of these candidates."""
        return min((self.times[name] for name in names if name in self.times), default=None)


def timings(run: Run, kind: str) -> dict[str, list[Timing]]:
    """Return the timings of a benchmark by what was timed, ordered by length."""
    groups: dict[str, dict[str, Timing]] = {}
    for new in read(run, kind):
        group = groups.setdefault(new.group, {})
        old = group.get(new.heading, new)  # in earlier results of a CPU time and memory are rows of their own
        memory = old.memory if new.memory is None else new.memory
        group[new.heading] = replace(new, times={**old.times, **new.times}, unit=old.unit or new.unit, memory=memory)
    return {name: sorted(group.values(), key=lambda timing: timing.length) for name, group in groups.items()}


def _layers(row: Record) -> Iterator[Timing]:
    """Read CoCA's layers over the best of RoPE's; on a CPU, in float32, they are toys."""
    if row["kind"] == "layer":
        best, peaks, queries = row["best_rope"], row["peak_bytes"], row["h"] // row["g"]
        toy = row["dtype"] == "torch.float32"
        names = [row["passes"], "not compiled" * (row["compiler"] == "none")]
        names.append(f"{queries} query heads per key head" * (queries > 1))
        yield Timing(
            group=", ".join(filter(None, names)),
            length=row["n"],
            heading=f"{row['b']} × {row['n']:,}, {row['h']} of {row['d']}",
            times={name: spread(time) for name, time in row["time_over_best_rope"].items()},
            unit="" if toy else f"{row['milliseconds'][best]['median']:.2f} ms\n{best}",
            memory=None if toy else peaks["coca-exact"] / peaks[best],
        )


def _cosformer(row: Record) -> Iterator[Timing]:
    """Read cosFormer's kernels ("linear"), or on a CPU its time ("softmax") and memory ("length")."""
    if row["kind"] not in ("linear", "softmax", "length"):
        return
    linear, width = row["kind"] == "linear", row.get("d") or row.get("head_dim", 64)
    length = row["n" if linear else "length"]
    made = Timing(f"{row.get('passes', 'forward')}, width {width}", length, f"{length:,}", {})
    if linear:
        times = {name: spread(time["median"]) for name, time in row["speedup"].items()}
        unit, memory = f"{row['milliseconds']['triton']['median']:.2f} ms", row["memory_over_least"]["triton"]
        yield replace(made, times=times, unit=unit, memory=memory)
    elif row["kind"] == "softmax":
        yield replace(made, times={"flash softmax": spread(row["speedup"])})
    else:
        each = 4 * row["heads"] * width * length  # q, k and v are held anyway; peak_bytes has the output
        yield replace(made, memory=(3 * each + row["peak_bytes"]) / (4 * each))


def speed_tables(run: Run, experiment: Experiment) -> list[Table]:
    """Make a table for each thing timed: candidates down, lengths across."""
    made = []
    for group, found in timings(run, experiment.bench).items():
        lines: list[tuple[str, str, list[Value]]] = [(experiment.reference, "", [noted("1", x.unit) for x in found])]
        for row in experiment.rows:
            times = [x.fastest(row.candidates or [row.variant]) for x in found]
            paper = "–".join(f"{value:.2f}" for value in row.paper)
            lines.append((row.label, "", [paper or (time and time.cell(experiment.digits)) for time in times]))
        lines.append((experiment.memory, "", [None if x.memory is None else f"{x.memory:.2f}" for x in found]))
        name, heads = file_of(experiment.name, group.replace(", ", "-")), [x.heading for x in found]
        title = f"{experiment.subject}, {group}: time over {experiment.owner}, and memory"
        made.append(grid(name, title, heads, lines, caption=experiment.caption, heading=experiment.heading))
    return [table for table in made if table]


# Decoding and kernels


def _decoding(row: Record) -> Iterator[tuple[str, Entry]]:
    kind, gpu = row["kind"], not row.source.device.startswith("CPU")  # a CPU's absolute times mean nothing elsewhere

    def cell(found: Mapping[str, Any], name: str, *notes: str) -> str:
        rate = f"{found['tokens_per_second']:,.0f} tokens/s" if gpu and "tokens_per_second" in found else ""
        made = spread(found["speed_over_rope"]).cell(2, *notes, rate)
        return "\n".join(["1", *made.split("\n")[1:]]) if name == "rope" else made

    name = row.get("attention", "All models")
    label = variant_name(name)
    if kind == "prefill":
        at: tuple[tuple[int, ...], str] = (row["length"],), f"{row['length']:,}"
        yield "prompt", (label, "speed over RoPE's", at, cell(row, name))
        if gpu:
            yield "prompt", (label, "peak, GB", at, f"{row['peak_bytes'] / 1e9:.2f}")
    if kind not in ("decode", "best", "missing") or (kind == "missing" and "context" not in row):
        return
    at = (row["context"], row["batch"]), f"{row['batch']} × {row['context']:,}"
    if kind == "decode" and name != "rope":
        yield "decode", (label, row["mode"], at, cell(row, ""))
    elif kind == "missing":
        yield "decode", (label, row["mode"], at, noted("not timed", row["why"].partition(". ")[0]))
    elif kind == "best":
        for name, found in row["each"].items():
            yield "decode", (variant_name(name), BEST, at, cell(found, name, found["mode"]))


def decoding_tables(run: Run) -> list[Table]:
    """Compare decoding and reading a prompt with RoPE's."""
    found = list(read(run, "bench-decode"))
    steps, prompts = ([entry for of, entry in found if of == what] for what in ("decode", "prompt"))
    steps.sort(key=lambda entry: (entry[1] != BEST, entry[0] != "RoPE"))
    paper = next((entry for entry in prompts if entry[2][1] == "32,768"), None)
    if paper is not None:
        prompts.append(("The paper's CoCA (its Fig. 6)", "paper: peak, GB", paper[2], "about 60"))
    title = "The model decoding: tokens per second over RoPE's"
    made = [pivot("coca-decode", title, steps, heading="Sequences × tokens before")]
    title = "The model reading a prompt: tokens per second over RoPE's, and memory with weights and cache"
    made.append(pivot("coca-prompt", title, prompts, heading="Tokens of the prompt"))
    return [table for table in made if table]


def _kernels(row: Record) -> Iterator[tuple[Record, dict[str, tuple[str, str]]]]:
    """Read speed and time of CoCA's candidates, and of RoPE's fastest kernel, with which they are compared."""
    best = row["best_peer"] if row["kind"] in ("decode", "prefill") else None
    if best is None or best.endswith(MADE_READY):  # nothing of RoPE's to compare with
        return
    times = {name: each["median"] for name, each in row["milliseconds"].items() if each}
    made = {name: times[best] / times[name] for name in times if name.endswith(MADE_READY)}
    cells = {"RoPE": ("1", f"{times[best]:.3f} ms\n{variant_name(best)}")}
    for name, speed in {**row["speedup"], **made}.items():
        if REMOVED not in name:
            cells[variant_name(f"coca-{name}")] = f"{spread(speed).median:.2f}", f"{times[name]:.3f} ms"
    yield row, cells


READERS = {"bench-layer": _layers, "bench-cosformer": _cosformer, "bench-decode": _decoding, "bench-kernels": _kernels}


def kernel_tables(run: Run) -> list[Table]:
    """Compare attention alone with RoPE's: decoding by length, and chunks of queries."""
    steps, chunks, others = list[Entry](), list[Entry](), dict[str, None]()
    found = list(read(run, "bench-kernels"))
    for row, cells in sorted(found, key=lambda x: (-x[0].d, x[0].h // x[0].g, -x[0].h, x[0].n, x[0].b, x[0].m)):
        heads = f"{row.h} heads of width {row.d}" + (f", {row.g} for keys" if row.g < row.h else "")
        if row.n > 1:
            size = f"{row.b} × {row.m:,}, {row.n:,} queries"
            chunks += [(heads, size, ((i,), name), noted(*cell)) for i, (name, cell) in enumerate(cells.items())]
            continue
        (speed, time), *rest = [cell for name, cell in cells.items() if name != "RoPE"]
        names = [name for name in cells if name != "RoPE"][1:]
        others |= dict.fromkeys(f"; the speed of {name}" for name in names)
        small = [f"{name} {text}" for name, (text, _) in zip(names, rest, strict=True)]
        size = f"{row.b:,} sequence{'s' if row.b > 1 else ''}"
        steps.append((heads, size, ((row.m,), f"{row.m:,} tokens"), noted(speed, time, *small)))
    title = f"Decoding by tokens before: speed of CoCA exact over RoPE's (small print: its time{''.join(others)})"
    made = [pivot("coca-kernels-lengths", title, steps, heading="Heads", beside="Sequences")]
    title = "A chunk of queries after a long context: speed over RoPE's"
    made.append(pivot("coca-kernels-chunks", title, chunks, heading="Heads", beside="Sequences × tokens before"))
    return [table for table in made if table]
