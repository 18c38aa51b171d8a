"""`farspan bench layer` and `farspan bench decode`: made for a GPU; on a CPU they take the same steps at toy size."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from farspan_cli.app import fail, whole_numbers
from farspan_cli.bench import Row, bench, check_device, collect, write


@bench.command("layer")
def bench_layer(
    lengths: Annotated[
        str | None, typer.Option(help="Tokens, separated by commas; 512,2048,16384,32768 if not given.")
    ] = None,
    groups: Annotated[str, typer.Option(help="Query heads a key head: 1, 2, 4 or 8, by commas.")] = "1",
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.", min=1)] = 20,
    quick: Annotated[
        bool, typer.Option("--quick", help="The main contestants, at 2048 and 32768 tokens if no lengths are given.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """One compiled attention layer with its projections: CoCA against RoPE on every kernel, FlexAttention and ALiBi.

    On a GPU in bfloat16: 64 × 512, 16 × 2048, 2 × 16384 and 1 × 32768 tokens, up to 4096 wide. On a CPU each length is
    a toy. Contestants take turns, and nothing is timed before each was checked.

    Example: `farspan bench layer --lengths 2048 --groups 1,4 --device cuda --out results/layer-2048.json`
    """
    check_device(device)
    usual = ("2048,32768" if device == "cuda" else "64") if quick else "512,2048,16384,32768"
    chosen = whole_numbers(usual if lengths is None else lengths)
    from farspan.benchmark import layer

    shapes = layer.shapes(chosen, whole_numbers(groups, "--groups"), device)
    console, widths = Console(), len({(shape.d, shape.h // shape.g) for shape in shapes})
    steps = layer.run(shapes, repeats=repeats, only=layer.QUICK if quick else None, device=device, seed=seed)
    rows = collect(steps, 1 + widths + len(shapes) * len(layer.PASSES), console)
    show_layer(console, rows)
    write(out, rows, device, seed, console)


@bench.command("decode")
def bench_decode(
    preset: Annotated[str, typer.Option(help="350m, 33m or tiny.")] = "350m",
    contexts: Annotated[str, typer.Option(help="Tokens in the cache, separated by commas.")] = "512,8192,32768",
    batch: Annotated[str, typer.Option(help="Texts at once, separated by commas.")] = "1,8",
    prompts: Annotated[str, typer.Option(help="Tokens of prompts to read, or none.")] = "32768,131072",
    compile: Annotated[
        str, typer.Option(help="torch.compile: all, none, or one: at the longest context and the first batch.")
    ] = "one",
    repeats: Annotated[int, typer.Option(help="Timings, of 8 tokens each; the median counts.", min=1)] = 10,
    quick: Annotated[
        bool, typer.Option("--quick", help="The longest context and shortest prompt; no compile.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, caches and tokens.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """The whole model, RoPE against CoCA: greedy tokens a second after a context, and reading a long prompt.

    CoCA with its half-width cache, on a GPU read by the kernel, and with a cache of ready keys. The context is random
    numbers, written into the cache. Decoding runs plainly with a growing cache (eager), with a static cache and a CUDA
    graph (graph), and compiled; each mode's logits are compared before the times that are reported. Where SDPA runs on
    a GPU, the faster of its flash and cuDNN kernels is taken.

    Of a static cache SDPA, and so RoPE, reads every slot with a mask, while CoCA's kernel stops where the text ends
    (each row says what it "reads"). To quote one ratio, take "best", where each model has its best mode.

    Example: `farspan bench decode --contexts 8192,32768 --batch 1 --device cuda --out results/decode.json`
    """
    if compile not in ("one", "all", "none"):
        fail(f"--compile must be one, all or none, got {compile!r}; name one of them")
    check_device(device)
    lengths, batches = whole_numbers(contexts, "--contexts"), whole_numbers(batch, "--batch")
    reads = [] if prompts == "none" else whole_numbers(prompts, "--prompts")
    if quick:
        lengths, reads, compile = [max(lengths)], sorted(reads)[:1], "none"
    from farspan.benchmark import decode

    console = Console()
    steps = decode.run(
        preset,
        contexts=lengths,
        batches=batches,
        prompts=reads,
        compile=compile,
        repeats=repeats,
        device=device,
        seed=seed,
    )
    pairs = len(lengths) * len(batches)
    compiled = {"none": 0, "one": 1, "all": pairs}[compile]
    rows = collect(steps, 3 * pairs + compiled + len(reads) + (device != "cuda"), console)
    show_decode(console, rows, absolute=device == "cuda")
    write(out, rows, device, seed, console)


def show_layer(console: Console, rows: list[Row]) -> None:
    """Ratios of times to the best RoPE layer's, the share of the matrix peak, and memory."""
    found = [row for row in rows if row["kind"] == "layer"]
    for row in found:
        title = f"{row['passes']}, {row['b']} × {row['n']:,} tokens, {row['h']} heads of {row['d']} on {row['g']}"
        table = Table("layer", "ms", "time / best RoPE", "time / same kernel", "of matrix peak", "peak", title=title)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, times in row["milliseconds"].items():
            table.add_row(
                name + (" (best)" if name == row["best_rope"] else ""),
                f"{times['median']:.3f}",
                _ratio(row["time_over_best_rope"].get(name)),
                _ratio(row["time_over_same_kernel"].get(name)),
                f"{row['of_matmul_peak'][name]:.1%}",
                f"{row['peak_bytes'][name] / 1e9:.2f} GB",
            )
        console.print(table)
    for line in sorted({f"{name}: {why}" for row in found for name, why in row["missing"].items()}):
        console.print(f"missing: {line}")
    checks = [row for row in rows if row["kind"] == "check" and "error" in row]
    worst = max(checks, key=lambda row: row["error"] / row["allowed"])
    console.print(
        f"checked against float64: the worst of {len(checks)} is {worst['attention']}, {worst['of']}, with an error of "
        f"{worst['error']:.1e} of the largest number (allowed: {worst['allowed']:.1e})"
    )


def show_decode(console: Console, rows: list[Row], *, absolute: bool) -> None:
    """Ratios to RoPE; tokens a second only from a GPU, as those of a shared CPU mean little."""
    table = Table(
        "after", "texts", "mode", "attention", "on", "reads", "tokens/s", "speed / RoPE", "cache / RoPE", "peak"
    )
    for column in table.columns[6:]:
        column.justify = "right"
    for row in (row for row in rows if row["kind"] == "decode"):
        table.add_row(
            f"{row['context']:,}",
            str(row["batch"]),
            row["mode"],
            row["attention"],
            row["decodes_on"],
            row["reads"],
            f"{row['tokens_per_second']:,.0f}" if absolute else "–",
            _ratio(row["speed_over_rope"]),
            f"{row['cache_over_rope']:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
        )
    console.print(table)
    for row in (row for row in rows if row["kind"] == "best"):
        each = [f"{name} ({x['mode']}) {x['speed_over_rope']:.2f}" for name, x in row["each"].items()]
        console.print(f"best of all modes over RoPE's, {row['batch']} × {row['context']:,} tokens: {', '.join(each)}")
    for row in (row for row in rows if row["kind"] == "prefill"):
        console.print(
            f"{row['attention']}, a prompt of {row['length']:,} tokens: {row['speed_over_rope']:.2f}× RoPE's speed, "
            f"peak {row['peak_bytes'] / 1e9:.2f} GB"
        )
    for line in sorted({f"{row['mode']}: {row['why']}" for row in rows if row["kind"] == "missing"}):
        console.print(f"missing: {line}")


def _ratio(found: dict[str, float] | None) -> str:
    return "–" if found is None else f"{found['median']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
