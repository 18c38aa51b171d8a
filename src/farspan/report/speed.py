"""Rows of benchmarks → tables of speeds: attention against length, decoding, and CoCA's kernels alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from farspan.errors import require
from farspan.experiments import Experiment
from farspan.report.results import Run
from farspan.report.tables import Cell, Line, Table, contestant_name, file_of, pivot

CPU = "CPU"
"""How the name of a CPU begins, on which absolute times mean little elsewhere."""
MADE_READY = "rotated for SDPA"
"""Ends the names of contestants that prepare keys of the cached t for a chunk of queries."""
REMOVED = "8-bit t"
"""Marks a removed variant in earlier results."""
BEST = "each in its fastest mode"
MEASURED = ("kind", "attention", "mode", "context", "batch", "passes", "compiler", "length",
            "b", "n", "m", "h", "g", "d", "head_dim")  # fmt: skip
"""Fields that tell the rows of one benchmark from each other."""


class Spread(NamedTuple):
    """A ratio: the median, and the range of the middle three fifths; without one, the median thrice."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """Format the range if there is one."""
        return f"{self.low:.{digits}f}–{self.high:.{digits}f}" if self.low < self.high else ""


def spread(raw: Any) -> Spread:
    """Read a ratio, or its median and range."""
    each: dict[str, Any] = raw if isinstance(raw, dict) else {"median": raw}
    found = Spread(*(each.get(name, each["median"]) for name in ("median", "low", "high")))
    require(0 < found.low <= found.high, f"a ratio must be positive, got {raw}")
    return found


@dataclass(frozen=True)
class Timing:
    """How long each contestant took at one length, over a reference."""

    group: str
    length: int
    heading: str
    times: Mapping[str, Spread]
    unit: str = ""
    """What the times are multiples of, in milliseconds."""
    memory: float | None = None

    def fastest(self, names: Iterable[str]) -> Spread | None:
        """Return the time of the fastest of these contestants."""
        return min((self.times[name] for name in names if name in self.times), default=None)


@dataclass(frozen=True)
class Look:
    """How the tables and figures of one benchmark look."""

    kind: str
    reference: str
    owner: str
    memory: str
    heading: str
    digits: int
    of: str = ""
    ceiling: float = 0.0
    """Upper end of a linear axis; 0: a logarithmic axis."""


LOOKS = {
    "coca-speed": Look("bench-layer", "Best RoPE layer", "the best RoPE layer's",
                       "peak memory, exact CoCA's over the best RoPE layer's", "Sequences × tokens, heads of width", 3,
                       "One attention layer", 1.75),
    "cosformer-length": Look("bench-cosformer", "cosFormer, farspan", "cosFormer's",
                             "memory, cosFormer's over the least", "Tokens per sequence", 2),
}  # fmt: skip


def timings(run: Run, kind: str) -> dict[str, list[Timing]]:
    """Return the timings of a benchmark by what was timed, ordered by length."""
    found: dict[tuple[str, str], Timing] = {}
    for new in _read(run, kind):
        old = found.get(key := (new.group, new.heading))
        if old is not None:  # on a CPU time and memory are rows of their own
            memory = old.memory if new.memory is None else new.memory
            new = Timing(new.group, new.length, new.heading, {**old.times, **new.times}, old.unit or new.unit, memory)
        found[key] = new
    groups = dict.fromkeys(timing.group for timing in found.values())
    return {g: sorted((x for x in found.values() if x.group == g), key=lambda x: x.length) for g in groups}


def _read(run: Run, kind: str) -> Iterator[Any]:
    """Read the rows of a benchmark. Raise one line for a row that is not one of its own, or is there twice."""
    seen: dict[str, str] = {}
    for where, source, row in run.benches.get(kind, []):
        require(isinstance(row, dict) and "kind" in row, f"{where} must have a kind; write it with `farspan`")
        try:
            found = list(READERS[kind](row, not source.device.startswith(CPU)))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            said = f"lacks {error}" if isinstance(error, KeyError) else f"is no row of a benchmark ({error})"
            raise ValueError(f"{where} {said}; write it again with `farspan bench`") from error
        measured = ", ".join(f"{name} {row[name]}" for name in MEASURED if row.get(name) is not None)
        first = seen.setdefault(measured, where) if found else where
        require(first == where, f"{where} must not repeat {first} ({measured}); report each run from its own folder")
        yield from found


def _layers(row: Mapping[str, Any], _: bool) -> Iterator[Timing]:
    """Read CoCA's layers over the best of RoPE's; on a CPU, in float32, they are toys."""
    if row["kind"] == "layer":
        best, peaks, queries = row["best_rope"], row["peak_bytes"], row["h"] // row["g"]
        toy = row["dtype"] == "torch.float32"
        names = [
            row["passes"],
            "not compiled" * (row["compiler"] == "none"),
            f"{queries} query heads per key head" * (queries > 1),
        ]
        yield Timing(
            ", ".join(filter(None, names)),
            row["n"],
            f"{row['b']} × {row['n']:,}, {row['h']} of {row['d']}",
            {name: spread(time) for name, time in row["time_over_best_rope"].items()},
            "" if toy else f"{row['milliseconds'][best]['median']:.2f} ms; {best}",
            None if toy else peaks["coca-exact"] / peaks[best],
        )


def _cosformer(row: Mapping[str, Any], _: bool) -> Iterator[Timing]:
    """Read cosFormer's kernels ("linear"), or on a CPU its time ("softmax") and memory ("length")."""
    if row["kind"] not in ("linear", "softmax", "length"):
        return
    linear, width = row["kind"] == "linear", row.get("d") or row.get("head_dim", 64)
    length, group = row["n" if linear else "length"], f"{row.get('passes', 'forward')}, width {width}"
    if linear:
        times = {name: spread(time["median"]) for name, time in row["speedup"].items()}
        unit, memory = f"{row['milliseconds']['triton']['median']:.2f} ms", row["memory_over_least"]["triton"]
        yield Timing(group, length, f"{length:,}", times, unit, memory)
    elif row["kind"] == "softmax":
        yield Timing(group, length, f"{length:,}", {"flash softmax": spread(row["speedup"])})
    else:
        each = 4 * row["heads"] * width * length  # q, k and v are held anyway; peak_bytes has the output
        yield Timing(group, length, f"{length:,}", {}, memory=(3 * each + row["peak_bytes"]) / (4 * each))


def group_title(look: Look, group: str) -> str:
    """Return what was timed."""
    return f"{look.of}, {group}" if look.of else group.capitalize()


def speed_tables(run: Run, experiment: Experiment) -> list[Table]:
    """Make a table for each thing timed: contestants down, lengths across."""
    made, look = [], LOOKS[experiment.name]
    for group, found in timings(run, look.kind).items():
        lines = [Line(look.reference, "", tuple(Cell("1", x.unit) for x in found))]
        for row in experiment.rows:
            times = [x.fastest(row.contestants or [row.variant]) for x in found]
            cells = [Cell(f"{t.median:.{look.digits}f}", t.text(look.digits)) if t else Cell() for t in times]
            cells = [Cell("–".join(f"{value:.2f}" for value in row.paper))] * len(found) if row.paper else cells
            lines += [Line(row.label, "", tuple(cells))] if any(times) or row.paper else []
        if any(x.memory is not None for x in found):
            cells = [Cell() if x.memory is None else Cell(f"{x.memory:.2f}") for x in found]
            lines.append(Line(look.memory, "", tuple(cells)))
        name, heads = file_of(experiment.name, group.replace(", ", "-")), tuple(x.heading for x in found)
        title = f"{group_title(look, group)}: time over {look.owner}, and memory"
        made.append(Table(name, title, experiment.caption, heads, tuple(lines), look.heading))
    return made


# Decoding and kernels


class Shape(NamedTuple):
    """Attention alone: b sequences of m tokens, h query heads of width d on g key heads, n queries per head."""

    b: int
    h: int
    g: int
    n: int
    m: int
    d: int

    @property
    def heads(self) -> str:
        """
        >>> Shape(8, 32, 8, 1, 512, 128).heads
        '32 heads of width 128, 8 for keys'
        """
        return f"{self.h} heads of width {self.d}" + (f", {self.g} for keys" if self.g < self.h else "")


Entry = tuple[str, str, tuple[int, ...], str, Cell]
"""Label, source, order of the column, its heading, cell (:func:`pivot`)."""


def _decoding(row: Mapping[str, Any], absolute: bool) -> Iterator[tuple[str, Entry]]:
    def cell(found: Mapping[str, Any], *notes: str, name: str = "") -> Cell:
        rate = [f"{found['tokens_per_second']:,.0f} tokens/s"] if absolute and "tokens_per_second" in found else []
        speed = spread(found["speed_over_rope"])
        text = "1" if name == "rope" else f"{speed.median:.2f}"
        return Cell(text, speed.text(2) or "; ".join([*notes, *rate]))

    if row["kind"] == "prefill":
        label, length = contestant_name(row["attention"]), row["length"]
        yield "prompt", (label, "speed over RoPE's", (length,), f"{length:,}", cell(row, name=row["attention"]))
        if absolute:
            yield "prompt", (label, "peak, GB", (length,), f"{length:,}", Cell(f"{row['peak_bytes'] / 1e9:.2f}"))
    if row["kind"] not in ("decode", "best", "missing") or (row["kind"] == "missing" and "context" not in row):
        return
    order, column = (row["context"], row["batch"]), f"{row['batch']} × {row['context']:,}"
    if row["kind"] == "decode" and row["attention"] != "rope":
        yield "decode", (contestant_name(row["attention"]), row["mode"], order, column, cell(row))
    elif row["kind"] == "missing":
        why, label = row["why"].partition(". ")[0], contestant_name(row.get("attention", "All models"))
        yield "decode", (label, row["mode"], order, column, Cell("not timed", why))
    elif row["kind"] == "best":
        for name, found in row["each"].items():
            yield "decode", (contestant_name(name), BEST, order, column, cell(found, found["mode"], name=name))


def _kernels(row: Mapping[str, Any], _: bool) -> Iterator[tuple[Shape, dict[str, Cell]]]:
    """Read CoCA's contestants, and the fastest of RoPE's kernels, with which they are compared."""
    if row["kind"] not in ("decode", "prefill"):
        return
    shape, best = Shape(*(row[name] for name in Shape._fields)), row["best_peer"]
    if best is None or best.endswith(MADE_READY):  # nothing of RoPE's to compare with
        return
    times = {name: each["median"] for name, each in row["milliseconds"].items() if each}
    made = {name: times[best] / times[name] for name in times if name.endswith(MADE_READY)}
    cells = {"rope": Cell("1", f"{times[best]:.3f} ms; {contestant_name(best)}")}
    for name, speed in {**row["speedup"], **made}.items():
        if REMOVED not in name:
            cells[f"coca-{name}"] = Cell(f"{spread(speed).median:.2f}", f"{times[name]:.3f} ms")
    yield shape, cells


READERS = {"bench-layer": _layers, "bench-cosformer": _cosformer, "bench-decode": _decoding, "bench-kernels": _kernels}


def decoding_tables(run: Run) -> list[Table]:
    """Compare decoding and reading a prompt with RoPE's."""
    found = list(_read(run, "bench-decode"))
    steps, prompts = ([entry for of, entry in found if of == what] for what in ("decode", "prompt"))
    steps.sort(key=lambda entry: (entry[1] != BEST, entry[0] != "RoPE"))
    paper = next((entry for entry in prompts if entry[3] == "32,768"), None)
    if paper is not None:
        prompts.append(("The paper's CoCA (its Fig. 6)", "paper: peak, GB", *paper[2:4], Cell("about 60")))
    title = "The model decoding: tokens per second over RoPE's"
    made = [pivot("coca-decode", title, steps, "Sequences × tokens before")]
    title = "The model reading a prompt: tokens per second over RoPE's, and memory with weights and cache"
    made.append(pivot("coca-prompt", title, prompts, "Tokens of the prompt"))
    return [table for table in made if table]


def kernel_tables(run: Run) -> list[Table]:
    """Compare attention alone with RoPE's: decoding by length, and chunks of queries."""
    answers = dict(_read(run, "bench-kernels"))
    steps, chunks, others = list[Entry](), list[Entry](), dict[str, None]()
    for shape in sorted(answers, key=lambda s: (-s.d, s.h // s.g, -s.h, s.n, s.b, s.m)):
        if shape.n > 1:
            amount = f"{shape.b} × {shape.m:,}, {shape.n:,} queries"
            for i, (name, cell) in enumerate(answers[shape].items()):
                chunks.append((shape.heads, amount, (i,), contestant_name(name), cell))
            continue
        (_, first), *rest = [(n, cell) for n, cell in answers[shape].items() if n != "rope"]
        others |= dict.fromkeys(f"; the speed of {contestant_name(n)}" for n, _ in rest)
        note = "; ".join([first.note, *(f"{contestant_name(n)} {cell.text}" for n, cell in rest)])
        size = f"{shape.b:,} sequence{'s' if shape.b > 1 else ''}"
        steps.append((shape.heads, size, (shape.m,), f"{shape.m:,} tokens", Cell(first.text, note)))
    title = f"Decoding by tokens before: speed of CoCA exact over RoPE's (small print: its time{''.join(others)})"
    made = [pivot("coca-kernels-lengths", title, steps, "Heads", "Sequences")]
    title = "A chunk of queries after a long context: speed over RoPE's"
    made.append(pivot("coca-kernels-chunks", title, chunks, "Heads", "Sequences × tokens before"))
    return [table for table in made if table]
