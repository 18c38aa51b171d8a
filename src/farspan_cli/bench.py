"""`farspan bench`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from farspan_cli.app import app, fail, whole_numbers

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
    import torch
    from rich.progress import Progress

    from farspan.benchmark.attention import DECODERS, LAYERS, ResultsDifferError, run
    from farspan.results import write_result

    if device not in ("cpu", "cuda"):
        fail(f"--device must be cpu or cuda, got {device!r}; name one of them")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda needs a CUDA device, and none is visible; use --device cpu")
    chosen = [1024, 4096] if quick else whole_numbers(lengths)
    published = 4096 if quick else published_length
    rows: list[dict[str, object]] = []
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("starting", total=3 + len(DECODERS) + len(chosen) * len(LAYERS))
        try:
            for done, new in run(chosen, published, repeats=repeats, device=device, seed=seed):
                rows += new
                progress.update(task, advance=1, description=done)
        except ResultsDifferError as error:
            fail(f"no figures: {error}")
    _show_attention(console, rows)
    if out is not None:
        write_result(out, rows, device=device, seed=seed)
        console.print(f"\nwritten: {out}")


def _show_attention(console: Console, rows: list[dict[str, object]]) -> None:
    by_kind = {
        kind: [row for row in rows if row["kind"] == kind]
        for kind in ("check", "cache", "layer", "decode", "published")
    }
    table = Table("attention", "tokens", "time / RoPE", "peak extra memory", title="one layer, forward")
    for column in table.columns[1:]:
        column.justify = "right"
    rope = {row["length"]: float(row["median"]) for row in by_kind["layer"] if row["attention"] == "rope"}  # type: ignore[arg-type]
    for row in by_kind["layer"]:
        ratio, peak = float(row["median"]) / rope[row["length"]], int(row["peak_bytes"])  # type: ignore[arg-type, call-overload]
        table.add_row(str(row["attention"]), f"{row['length']:,}", f"{ratio:.2f}", f"{peak / 1e6:,.0f} MB")
    console.print(table)
    first = float(by_kind["decode"][0]["median"])  # type: ignore[arg-type]
    for row in by_kind["decode"]:
        ratio = float(row["median"]) / first  # type: ignore[arg-type]
        console.print(f"one token after {row['length']:,}, {row['attention']}: {ratio:.2f} of RoPE's time")
    check, cache, published = (by_kind[kind][0] for kind in ("check", "cache", "published"))
    console.print(f"fused = equations: largest difference {check['max_difference']:.1e} in float64")
    console.print(f"key/value cache, CoCA / RoPE: {cache['ratio']} of the bytes")
    console.print(
        f"against CoCA as published, {published['length']:,} tokens: {published['speedup']:.1f}× faster, "
        f"{published['memory_ratio']:.0f}× less memory, largest difference {published['max_difference']:.1e}"
    )
