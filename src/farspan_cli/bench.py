"""`farspan bench`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from farspan_cli.app import app, fail, whole_numbers
from farspan_cli.progress import progress

Row = dict[str, Any]

bench = typer.Typer(help="Speed and memory against peers, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("attention")
def bench_attention(
    lengths: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "8192,32768",
    published_length: Annotated[int, typer.Option(help="Tokens for the published N×N formulation.", min=64)] = 8192,
    repeats: Annotated[int, typer.Option(help="Timed repetitions; the median counts.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts: under a minute and 2 GB.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """One attention layer (8 heads, width 64): CoCA, RoPE, ALiBi, and CoCA as it was published.

    Example: `farspan bench attention --lengths 2048,8192 --out results/attention.json`
    """
    from farspan.benchmark.attention import DECODE_LENGTHS, LAYERS, PREFILL_LENGTHS, run

    check_device(device)
    chosen = [1024, 4096] if quick else whole_numbers(lengths)
    published = 4096 if quick else published_length
    console = Console()
    steps = run(chosen, published, repeats=repeats, device=device, seed=seed)
    rows = collect(steps, 3 + len(PREFILL_LENGTHS) + len(DECODE_LENGTHS) + len(chosen) * len(LAYERS), console)
    _show_attention(console, rows)
    write(out, rows, device, seed, console)


@bench.command("cosformer")
def bench_cosformer(
    lengths: Annotated[
        str | None, typer.Option(help="Tokens to grow through, by commas.", show_default="4096 … 65536, cuda: 1024 …")
    ] = None,
    softmax_lengths: Annotated[str, typer.Option(help="Tokens against softmax attention.")] = "256,512,1024,2048,4096",
    published_length: Annotated[int, typer.Option(help="Tokens for the published N×2d×d formulation.", min=64)] = 2048,
    repeats: Annotated[
        int | None, typer.Option(help="Timed repetitions; the median counts.", min=1, show_default="5, cuda: 20")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts: under a minute and 2 GB on a CPU.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="On cuda: try tile sizes, each checked first.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Causal cosFormer (8 heads, width 64): its growth, against softmax attention, and as it was published.

    On a CUDA device: the kernels (bfloat16, 16 heads, widths 64 and 128, 65 536 tokens at a time), forward and
    backward, against flash-linear-attention with the same features, where it is installed, and flash attention.

    Example: `farspan bench cosformer --published-length 2048 --out results/cosformer-cpu.json`
    """
    if device == "cuda":
        check_device(device)
        if tune:
            _tune_linear(repeats or 10, seed, out)
            return
        _bench_linear(None if lengths is None else whole_numbers(lengths), repeats or 20, quick, seed, out)
        return
    if tune:
        fail("--tune needs --device cuda: tile sizes mean nothing elsewhere; leave it out")
    repeats = repeats or 5
    chosen = [1024, 4096] if quick else whole_numbers(lengths or "4096,8192,16384,32768,65536")
    peers = [256, 1024] if quick else whole_numbers(softmax_lengths, "--softmax-lengths")
    published = 512 if quick else published_length
    check_device(device)
    from farspan.benchmark.cosformer import PASSES, run

    console = Console()
    steps = run(chosen, peers, published, repeats=repeats, device=device, seed=seed)
    rows = collect(steps, 3 + len(chosen) + len(peers) + len(PASSES), console)
    _show_cosformer(console, rows)
    write(out, rows, device, seed, console)


def _bench_linear(lengths: list[int] | None, repeats: int, quick: bool, seed: int, out: Path | None) -> None:
    from farspan.benchmark import linear

    chosen = lengths or (linear.QUICK if quick else linear.LENGTHS)
    console, widths = Console(), 2
    steps = linear.run(chosen, repeats=repeats, device="cuda", seed=seed, quick=quick)
    rows = collect(steps, widths * (1 + len(chosen) * len(linear.PASSES)), console)
    show_linear(console, rows)
    write(out, rows, "cuda", seed, console)


def _tune_linear(repeats: int, seed: int, out: Path | None) -> None:
    from farspan.benchmark import linear_tuning

    console, widths = Console(), (64, 128)
    total = 1 + sum(len(linear_tuning.variants(d)) for d in widths)
    rows = collect(linear_tuning.run(device="cuda", repeats=repeats, widths=widths), total, console)
    found = [row for row in rows if row["kind"] == "tuning"]
    for row in sorted(found, key=lambda row: (row["d"], row["passes"], row["milliseconds"]["median"])):
        console.print(f"{row['d']}  {row['passes']}  {row['change']}  {row['milliseconds']['median']:.3f} ms")
    write(out, rows, "cuda", seed, console)


@bench.command("model")
def bench_model(
    preset: Annotated[str, typer.Option(help="350m, 33m or tiny.")] = "350m",
    length: Annotated[int, typer.Option(help="Tokens of a training row.", min=2)] = 512,
    rows: Annotated[int, typer.Option(help="Rows of a training step.", min=1)] = 64,
    window: Annotated[int, typer.Option(help="Tokens of the long window; 0 leaves it out.", min=0)] = 32_768,
    repeats: Annotated[int, typer.Option(help="Timed steps of each; the median counts.", min=1)] = 10,
    compile: Annotated[bool, typer.Option(help="torch.compile, block by block.")] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """The whole model: training steps of RoPE and each CoCA form in turn, and the memory of one long window.

    Example: `farspan bench model --preset 350m --device cuda --out results/model.json`
    """
    from farspan.benchmark import model

    check_device(device)
    settings: dict[str, Any] = {"device": device, "seed": seed}
    steps = model.training(preset, length=length, rows=rows, repeats=repeats, compile=compile, **settings)
    console = Console()
    found = collect(steps, 1 + 2 * len(model.VARIANTS), console)
    if window:
        found += collect(model.window(preset, length=window, **settings), len(model.VARIANTS), console)
    _show_model(console, found, absolute=device == "cuda")
    write(out, found, device, seed, console)


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    import torch

    if device not in ("cpu", "cuda"):
        fail(f"--device must be cpu or cuda, got {device!r}; name one of them")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda needs a CUDA device, and none is visible; use --device cpu")


def collect(steps: Iterator[tuple[str, list[Row]]], total: int, console: Console) -> list[Row]:
    """The rows of all steps, with a progress bar; no rows at all when the contestants differ."""
    from farspan.benchmark.agree import ResultsDifferError

    rows: list[Row] = []
    with progress(console) as show:
        try:
            for number, (done, new) in enumerate(steps, 1):
                rows += new
                show(number, total, done)
        except ResultsDifferError as error:
            fail(f"no figures: {error}")
    return rows


def write(out: Path | None, rows: list[Row], device: str, seed: int, console: Console) -> None:
    """Write a result file, if one is wanted."""
    from farspan.results import write_result

    if out is not None:
        write_result(out, rows, device=device, seed=seed)
        console.print(f"\nwritten: {out}")


def _show_model(console: Console, rows: list[Row], *, absolute: bool) -> None:
    """Ratios; tokens a second only from a GPU, as those of a shared CPU mean little."""
    from farspan.benchmark.model import VARIANTS

    table = Table("attention", f"time / {VARIANTS[0]}", "tokens/s", "share of matrix peak", "peak extra memory")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in (row for row in rows if row["kind"] == "training"):
        table.add_row(
            row["attention"],
            f"{row[f'time_over_{VARIANTS[0]}']:.3f}",
            f"{row['tokens_per_second']:,.0f}" if absolute else "–",
            f"{row['mfu']:.1%}",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
        )
    console.print(table)
    for row in (row for row in rows if row["kind"] == "window"):
        console.print(f"{row['attention']}, one window of {row['length']:,} tokens: {row['peak_bytes'] / 1e9:.2f} GB")


def _show_cosformer(console: Console, rows: list[Row]) -> None:
    kinds = ("check", "length", "fit", "softmax", "crossover", "published")
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    table = Table("tokens", "seconds", "µs a token", "peak extra memory", title="causal cosFormer, forward")
    for column in table.columns:
        column.justify = "right"
    for row in by_kind["length"]:
        each = f"{1e6 * row['median'] / row['length']:.1f}"
        table.add_row(f"{row['length']:,}", f"{row['median']:.3f}", each, f"{row['peak_bytes'] / 1e6:,.0f} MB")
    console.print(table)
    for row in by_kind["fit"]:
        console.print(
            f"time grows as length^{row['exponent']:.2f} (largest deviation {100 * row['largest_deviation']:.0f}%)"
        )
    for row in by_kind["softmax"]:
        console.print(f"against softmax attention, {row['length']:,} tokens: {row['speedup']:.2f}× as fast")
    length = by_kind["crossover"][0]["length"]
    console.print("slower than softmax at the longest text" if length is None else f"faster from {length:,} tokens on")
    console.print(f"chunked = definition: largest difference {by_kind['check'][0]['max_difference']:.1e} in float64")
    for row in by_kind["published"]:
        memory = "memory not seen" if row["memory_ratio"] is None else f"{row['memory_ratio']:.0f}× less memory"
        console.print(
            f"against cosFormer as published, {row['passes']}, {row['length']:,} tokens: {row['speedup']:.1f}× faster, "
            f"{memory}, largest difference {row['max_difference']:.1e}"
        )


def show_linear(console: Console, rows: list[Row]) -> None:
    """Milliseconds, and how much longer each other contestant takes."""
    found = [row for row in rows if row["kind"] == "linear"]
    others = list(dict.fromkeys(name for row in found for name in row["speedup"]))
    table = Table("width", "passes", "texts × tokens", "ms", "memory / least", *(f"× {name}" for name in others))
    for row in found:
        times = [row["speedup"].get(name) for name in others]
        table.add_row(
            str(row["d"]),
            row["passes"],
            f"{row['b']} × {row['n']:,}",
            f"{row['milliseconds']['triton']['median']:.3f}",
            f"{row['memory_over_least']['triton']:.2f}",
            *("–" if t is None else f"{t['median']:.2f} ({t['low']:.2f}–{t['high']:.2f})" for t in times),
        )
    console.print(table)
    missing = {f"{name}: {why}" for row in found for name, why in row["missing"].items()}
    for line in sorted(missing):
        console.print(f"missing: {line}")
    worst = max((row for row in rows if row["kind"] == "check"), key=lambda row: row["error"] / row["allowed"])
    console.print(
        f"checked against float64: the worst of {sum(row['kind'] == 'check' for row in rows)} is {worst['attention']}, "
        f"{worst['of']}, with an error of {worst['error']:.1e} of the largest number (allowed: {worst['allowed']:.1e})"
    )


def _show_attention(console: Console, rows: list[Row]) -> None:
    by_kind = {
        kind: [row for row in rows if row["kind"] == kind]
        for kind in ("check", "cache", "layer", "prefill", "decode", "published")
    }
    table = Table("attention", "tokens", "time / RoPE", "peak extra memory", title="one layer, forward")
    for column in table.columns[1:]:
        column.justify = "right"
    rope = {row["length"]: float(row["median"]) for row in by_kind["layer"] if row["attention"] == "rope"}
    for row in by_kind["layer"]:
        ratio, peak = float(row["median"]) / rope[row["length"]], int(row["peak_bytes"])
        table.add_row(str(row["attention"]), f"{row['length']:,}", f"{ratio:.2f}", f"{peak / 1e6:,.0f} MB")
    console.print(table)
    for row in (*by_kind["prefill"], *by_kind["decode"]):
        what = "reading" if row["kind"] == "prefill" else "one token after"
        over: dict[str, float] = row["over_rope"]
        console.print(f"{what} {row['length']:,}, {row['attention']}: {over['median']:.2f} of RoPE's time")
    check, cache, published = (by_kind[kind][0] for kind in ("check", "cache", "published"))
    console.print(f"fused = equations: largest difference {check['max_difference']:.1e} in float64")
    console.print(f"key/value cache, CoCA / RoPE: {cache['ratio']} of the bytes")
    console.print(
        f"against CoCA as published, {published['length']:,} tokens: {published['speedup']:.1f}× faster, "
        f"{published['memory_ratio']:.0f}× less memory, largest difference {published['max_difference']:.1e}"
    )
