"""The command line: each subcommand parses its arguments and makes one call.

It lives beside the package because importing `farspan` registers its model with transformers, which loads torch;
`farspan --help` must not wait for that.
"""

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="farspan",
    help="Transformers that work far beyond the length they were trained on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Speed and memory against peers, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point: bad input ends with exit code 2 and one line, never a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def fail(message: str) -> NoReturn:
    """One line on stderr, exit 2."""
    print(f"farspan: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _version(show: bool) -> None:
    if show:
        print(metadata.version("farspan"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Transformers that work far beyond the length they were trained on."""


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        fail(f"--lengths must be whole numbers ≥ 1 separated by commas, got {text!r}; try --lengths 2048,8192")
    return lengths


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
    from rich.progress import Progress

    from farspan.benchmark.attention import LAYERS, ResultsDifferError, run
    from farspan.results import write_result

    if device not in ("cpu", "cuda"):
        fail(f"--device must be cpu or cuda, got {device!r}; name one of them")
    chosen = [1024, 4096] if quick else _lengths(lengths)
    published = 4096 if quick else published_length
    rows: list[dict[str, object]] = []
    console = Console()
    with Progress(console=console) as progress:
        task = progress.add_task("starting", total=3 + len(chosen) * len(LAYERS))
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
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("check", "cache", "layer", "published")}
    table = Table("attention", "tokens", "time / RoPE", "peak extra memory", title="one layer, forward")
    for column in table.columns[1:]:
        column.justify = "right"
    rope = {row["length"]: float(row["median"]) for row in by_kind["layer"] if row["attention"] == "rope"}  # type: ignore[arg-type]
    for row in by_kind["layer"]:
        ratio, peak = float(row["median"]) / rope[row["length"]], int(row["peak_bytes"])  # type: ignore[arg-type, call-overload]
        table.add_row(str(row["attention"]), f"{row['length']:,}", f"{ratio:.2f}", f"{peak / 1e6:,.0f} MB")
    console.print(table)
    check, cache, published = (by_kind[kind][0] for kind in ("check", "cache", "published"))
    console.print(f"fused = equations: largest difference {check['max_difference']:.1e} in float64")
    console.print(f"key/value cache, CoCA / RoPE: {cache['ratio']} of the bytes")
    console.print(
        f"against CoCA as published, {published['length']:,} tokens: {published['speedup']:.1f}× faster, "
        f"{published['memory_ratio']:.0f}× less memory, largest difference {published['max_difference']:.1e}"
    )


if __name__ == "__main__":
    main()
