"""What the benchmarks print: tables and sentences that stay whole on 80 columns, and in a pipe."""

import os
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
PIPE = 200
"""Columns where no terminal says how many it has."""


def make_console() -> Console:
    """For a terminal as wide as it is; for a pipe wide enough for whole lines, unless COLUMNS says otherwise."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=PIPE)


def say(console: Console, text: str) -> None:
    """A sentence; in a pipe it stays on one line."""
    console.print(text, soft_wrap=not console.is_terminal, markup=False)


def show_table(
    console: Console, headings: list[str], lines: list[list[str]], *, title: str = "", left: int = 1
) -> None:
    """A table, its first `left` columns of words and the others of figures; where it is narrow, cells break at spaces.

    Left to itself, rich takes space from the widest columns, and cuts a figure short while others have room to break.
    """
    columns = list(zip(headings, *lines, strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    least = [max(len(word) for cell in cells for word in cell.split() or [""]) for cells in columns]
    while sum(widths) + 3 * len(widths) + 1 > console.width and widths != least:
        slack = [width - needed for width, needed in zip(widths, least, strict=True)]
        widths[slack.index(max(slack))] -= 1
    table = Table(title=title or None)
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        table.add_column(heading, justify="left" if index < left else "right", overflow="fold", width=width)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _of_kind(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _ratio(found: dict[str, float] | None, digits: int = 3) -> str:
    if found is None:
        return "–"
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f}–{found['high']:.{digits}f})"


def show_attention(console: Console, rows: list[Row]) -> None:
    """Ratios to RoPE: of one layer, of reading and of decoding; and how far the published formulation is behind."""
    rope = {row["length"]: float(row["median"]) for row in _of_kind(rows, "layer") if row["attention"] == "rope"}
    lines = [
        [
            row["attention"],
            f"{row['length']:,}",
            f"{row['median'] / rope[row['length']]:.2f}",
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
        ]
        for row in _of_kind(rows, "layer")
    ]
    headings = ["attention", "tokens", "time / RoPE", "peak extra memory"]
    show_table(console, headings, lines, title="one layer, forward")
    lines = [
        [f"{what} {row['length']:,}", row["attention"], _ratio(row["over_rope"], 2)]
        for kind, what in (("prefill", "reading"), ("decode", "one token after"))
        for row in _of_kind(rows, kind)
    ]
    show_table(console, ["two layers", "attention", "time / RoPE"], lines, left=2)
    check, cache, published = (_of_kind(rows, kind)[0] for kind in ("check", "cache", "published"))
    say(console, f"fused = equations: largest difference {check['max_difference']:.1e} in float64")
    timed = [row for row in rows if "error_as_timed" in row]
    say(
        console,
        f"what was timed, against float64: largest difference {max(row['error_as_timed'] for row in timed):.1e} of the "
        f"largest number (allowed: {timed[0]['allowed_as_timed']:.0e})",
    )
    say(console, f"key/value cache, CoCA / RoPE: {cache['ratio']} of the bytes")
    say(
        console,
        f"against CoCA as published, {published['length']:,} tokens: {published['speedup']:.1f}× faster, "
        f"{published['memory_ratio']:.0f}× less memory, largest difference {published['max_difference']:.1e}",
    )


def show_model(console: Console, rows: list[Row], *, absolute: bool) -> None:
    """Ratios; tokens a second only from a GPU, as those of a shared CPU mean little."""
    from farspan.benchmark.model import VARIANTS

    first = VARIANTS[0]
    lines = [
        [
            row["attention"],
            _ratio(row[f"range_over_{first}"] | {"median": row[f"time_over_{first}"]}),
            f"{row['tokens_per_second']:,.0f}" if absolute else "–",
            f"{row['mfu']:.1%}",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
        ]
        for row in _of_kind(rows, "training")
    ]
    headings = ["attention", f"time / {first}", "tokens/s", "share of matrix peak", "peak extra memory"]
    show_table(console, headings, lines)
    for row in _of_kind(rows, "window"):
        say(console, f"{row['attention']}, one window of {row['length']:,} tokens: {row['peak_bytes'] / 1e9:.2f} GB")


def show_cosformer(console: Console, rows: list[Row]) -> None:
    """How time grows with length, and the ratios to softmax attention and to the published formulation."""
    lines = [
        [
            f"{row['length']:,}",
            f"{row['median']:.3f}",
            f"{1e6 * row['median'] / row['length']:.1f}",
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
        ]
        for row in _of_kind(rows, "length")
    ]
    headings = ["tokens", "seconds", "µs a token", "peak extra memory"]
    show_table(console, headings, lines, title="causal cosFormer, forward", left=0)
    for row in _of_kind(rows, "fit"):
        far = 100 * row["largest_deviation"]
        say(console, f"time grows as length^{row['exponent']:.2f} (largest deviation {far:.0f}%)")
    for row in _of_kind(rows, "softmax"):
        say(console, f"against softmax attention, {row['length']:,} tokens: {row['speedup']:.2f}× as fast")
    length = _of_kind(rows, "crossover")[0]["length"]
    say(console, "slower than softmax at the longest text" if length is None else f"faster from {length:,} tokens on")
    difference = _of_kind(rows, "check")[0]["max_difference"]
    say(console, f"chunked = definition: largest difference {difference:.1e} in float64")
    for row in _of_kind(rows, "published"):
        memory = "memory not seen" if row["memory_ratio"] is None else f"{row['memory_ratio']:.0f}× less memory"
        say(
            console,
            f"against cosFormer as published, {row['passes']}, {row['length']:,} tokens: {row['speedup']:.1f}× faster, "
            f"{memory}, largest difference {row['max_difference']:.1e}",
        )


def show_linear(console: Console, rows: list[Row]) -> None:
    """Milliseconds, and how much longer each other contestant takes."""
    found, lines = _of_kind(rows, "linear"), []
    for row in found:
        own = [str(row["d"]), row["passes"], f"{row['b']} × {row['n']:,}"]
        own += [f"{row['milliseconds']['triton']['median']:.3f}", f"{row['memory_over_least']['triton']:.2f}"]
        for name, times in row["speedup"].items():
            lines.append([*own, name, _ratio(times, 2)])
            own = [""] * len(own)
    headings = ["width", "passes", "texts × tokens", "ms", "memory / least", "other", "takes × as long"]
    show_table(console, headings, lines, left=3)
    _say_missing(console, found)
    _say_worst(console, _of_kind(rows, "check"))


def show_layer(console: Console, rows: list[Row]) -> None:
    """Ratios of times to the best RoPE layer's, the share of the matrix peak, and memory."""
    found = _of_kind(rows, "layer")
    headings = ["layer", "ms", "time / best RoPE", "time / same kernel", "of matrix peak", "peak GB"]
    for row in found:
        how = f"{row['passes']}, not compiled" if row["compiler"] == "none" else row["passes"]
        title = f"{how}, {row['b']} × {row['n']:,} tokens, {row['h']} heads of {row['d']} on {row['g']}"
        lines = [
            [
                name + (" (best)" if name == row["best_rope"] else ""),
                f"{times['median']:.3f}",
                _ratio(row["time_over_best_rope"].get(name)),
                _ratio(row["time_over_same_kernel"].get(name)),
                f"{row['of_matmul_peak'][name]:.1%}",
                f"{row['peak_bytes'][name] / 1e9:.2f}",
            ]
            for name, times in row["milliseconds"].items()
        ]
        show_table(console, headings, lines, title=title)
    _say_missing(console, found)
    _say_worst(console, [row for row in _of_kind(rows, "check") if "error" in row])


def show_decode(console: Console, rows: list[Row], *, absolute: bool) -> None:
    """Ratios to RoPE; tokens a second only from a GPU, as those of a shared CPU mean little."""
    found = _of_kind(rows, "decode")
    headings = ["attention", "mode, on what; reads", "speed / RoPE", "cache / RoPE", "peak GB"]
    headings += ["tokens/s", "of copy"] if absolute else []
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in found):
        lines = [
            [
                row["attention"],
                f"{row['mode']}, {row['decodes_on']}; {row['reads']}",
                _ratio(row["speed_over_rope"]),
                f"{row['cache_over_rope']:.2f}",
                f"{row['peak_bytes'] / 1e9:.2f}",
                *([f"{row['tokens_per_second']:,.0f}", f"{row['of_copy']:.0%}"] if absolute else []),
            ]
            for row in found
            if (row["context"], row["batch"]) == (context, batch)
        ]
        show_table(console, headings, lines, title=f"one token after {context:,}, texts at once: {batch}", left=2)
    for row in _of_kind(rows, "best"):
        each = [f"{name} ({x['mode']}) {x['speed_over_rope']:.2f}" for name, x in row["each"].items()]
        say(console, f"best of all modes over RoPE's, {row['batch']} × {row['context']:,} tokens: {', '.join(each)}")
    for row in _of_kind(rows, "prefill"):
        say(
            console,
            f"{row['attention']}, a prompt of {row['length']:,} tokens: {row['speed_over_rope']:.2f}× RoPE's speed, "
            f"peak {row['peak_bytes'] / 1e9:.2f} GB",
        )
    for line in sorted({f"{row['mode']}: {row['why']}" for row in _of_kind(rows, "missing")}):
        say(console, f"missing: {line}")


def _say_missing(console: Console, found: list[Row]) -> None:
    for line in sorted({f"{name}: {why}" for row in found for name, why in row["missing"].items()}):
        say(console, f"missing: {line}")


def _say_worst(console: Console, checks: list[Row]) -> None:
    worst = max(checks, key=lambda row: row["error"] / row["allowed"])
    say(
        console,
        f"checked against float64: the worst of {len(checks)} is {worst['attention']}, {worst['of']}, with an error of "
        f"{worst['error']:.1e} of the largest number (allowed: {worst['allowed']:.1e})",
    )
