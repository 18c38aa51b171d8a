"""The command line: each subcommand parses its arguments and makes one call.

It lives beside the package because importing `farspan` registers its model with transformers, which loads torch;
`farspan --help` must not wait for that.
"""

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

UsageError: Any = typer.BadParameter.__base__  # typer carries its own click, and does not export the name

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
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        if not error.format_message():  # a command without arguments: its help was shown
            sys.exit(2)
        fail(f"{error.format_message()} See 'farspan --help'.")
    except (ValueError, OSError) as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
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


@app.command()
def data(
    text: Annotated[
        list[str], typer.Argument(help="Files, directories, `stdlib`, `hf:NAME[:CONFIG][:SPLIT]`.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the token shards.", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, a tokenizer.json, a folder, or a hub name.")] = "bytes",
    train_tokenizer: Annotated[int | None, typer.Option(help="Train a BPE of this size instead.", min=257)] = None,
    valid_share: Annotated[float, typer.Option(help="Share of documents held out.", min=0, max=1)] = 0.01,
    field: Annotated[str, typer.Option(help="JSON key or parquet column with the text.")] = "text",
    workers: Annotated[int | None, typer.Option(help="Processes; one per core if left out.", min=1)] = None,
) -> None:
    """Text, JSONL (.gz .xz .zst) or parquet → token shards. Interrupted, the same command continues.

    Example: `farspan data books.jsonl.xz --train-tokenizer 8192 --out data/books`

    Example: `farspan data stdlib --tokenizer data/books --out data/code`
    """
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn

    if train_tokenizer is not None and tokenizer != "bytes":
        fail(f"--tokenizer must be left out with --train-tokenizer, got {tokenizer!r}; choose one of them")
    from farspan.data import prepare

    console = Console()
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, "left", TimeRemainingColumn(), console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total or None)
            progress.update(tasks[what], completed=done)

        chosen = tokenizer if train_tokenizer is None else train_tokenizer
        manifest = prepare(
            text, out, tokenizer=chosen, field=field, valid_share=valid_share, workers=workers, progress=show
        )
    for split, found in manifest["splits"].items():
        console.print(f"{split}: {found['tokens']:,} tokens, {found['documents']:,} documents")
    console.print(f"written: {out}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `farspan reproduce` wrote: results/*.json.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; DIR/report by default.")] = None,
) -> None:
    """One offline page with tables (ours beside the paper's) and figures, and both as files for a paper.

    Example: `farspan report runs/demo --out runs/demo/report`
    """
    from farspan.report import write_report

    try:
        page = write_report(folder, out)
    except ModuleNotFoundError as error:
        fail(f"farspan report needs {error.name}, which is not installed; run pip install 'farspan[report]'")
    print(f"written: {page}")


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
    chosen = [1024, 4096] if quick else _lengths(lengths)
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


if __name__ == "__main__":
    main()
