"""`farspan bench`."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farspan_cli.app import app, fail, whole_numbers
from farspan_cli.bench_tables import Row, make_console, say, show_attention, show_cosformer, show_linear, show_model
from farspan_cli.progress import progress

bench = typer.Typer(help="Speed and memory against peers, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("attention")
def bench_attention(
    lengths: Annotated[
        str | None, typer.Option(help="Tokens, separated by commas.", show_default="8192,32768; quick: 1024,4096")
    ] = None,
    published_length: Annotated[
        int | None,
        typer.Option(help="Tokens for the published N×N formulation.", min=64, show_default="8192; quick: 4096"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed repetitions; the median counts.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts where none are given, and 2 GB.")] = False,
    device: Annotated[str, typer.Option(help="cpu: on cuda, time bench layer instead.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """One attention layer (8 heads, width 64): CoCA, RoPE, ALiBi, and CoCA as it was published.

    Example: `farspan bench attention --lengths 2048,8192 --out results/attention.json`
    """
    from farspan.benchmark.attention import parts, run

    if device == "cuda":
        fail(
            "bench attention --device cuda would time float32, which nobody runs on a GPU; use farspan bench layer and "
            "bench decode --device cuda, in bfloat16 with every peer, or --device cpu"
        )
    check_device(device)
    chosen = whole_numbers(("1024,4096" if quick else "8192,32768") if lengths is None else lengths)
    published = published_length or (4096 if quick else 8192)
    console = make_console()
    steps = run(chosen, published, repeats=repeats, device=device, seed=seed)
    rows = collect(steps, parts(chosen), console, out, device, seed)
    show_attention(console, rows)
    tell(out, console)


@bench.command("cosformer")
def bench_cosformer(
    lengths: Annotated[
        str | None, typer.Option(help="Tokens to grow through, by commas.", show_default="4096 … 65536, cuda: 1024 …")
    ] = None,
    softmax_lengths: Annotated[
        str | None,
        typer.Option(help="Tokens against softmax attention.", show_default="256 … 4096; quick: 256,1024"),
    ] = None,
    published_length: Annotated[
        int | None,
        typer.Option(help="Tokens for the published N×2d×d formulation.", min=64, show_default="2048; quick: 512"),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Timed repetitions; the median counts.", min=1, show_default="5, cuda: 20")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short texts where none are given.")] = False,
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
            _tune_cosformer(repeats or 10, seed, out)
            return
        _bench_cosformer_gpu(None if lengths is None else whole_numbers(lengths), repeats or 20, quick, seed, out)
        return
    if tune:
        fail("--tune needs --device cuda: tile sizes mean nothing elsewhere; leave it out")
    repeats = repeats or 5
    usual = ("1024,4096", "256,1024") if quick else ("4096,8192,16384,32768,65536", "256,512,1024,2048,4096")
    chosen = whole_numbers(usual[0] if lengths is None else lengths)
    peers = whole_numbers(usual[1] if softmax_lengths is None else softmax_lengths, "--softmax-lengths")
    published = published_length or (512 if quick else 2048)
    check_device(device)
    from farspan.benchmark.cosformer import parts, run

    console = make_console()
    steps = run(chosen, peers, published, repeats=repeats, device=device, seed=seed)
    rows = collect(steps, parts(chosen, peers), console, out, device, seed)
    show_cosformer(console, rows)
    tell(out, console)


def _bench_cosformer_gpu(lengths: list[int] | None, repeats: int, quick: bool, seed: int, out: Path | None) -> None:
    from farspan.benchmark import cosformer_gpu

    chosen = lengths or (cosformer_gpu.QUICK if quick else cosformer_gpu.LENGTHS)
    console = make_console()
    steps = cosformer_gpu.run(chosen, repeats=repeats, device="cuda", seed=seed, quick=quick)
    rows = collect(steps, cosformer_gpu.parts(chosen), console, out, "cuda", seed)
    show_linear(console, rows)
    tell(out, console)


def _tune_cosformer(repeats: int, seed: int, out: Path | None) -> None:
    from farspan.benchmark import cosformer_tuning

    console = make_console()
    steps = cosformer_tuning.run(device="cuda", repeats=repeats)
    rows = collect(steps, cosformer_tuning.parts(), console, out, "cuda", seed)
    found = [row for row in rows if row["kind"] == "tuning"]
    for row in sorted(found, key=lambda row: (row["d"], row["passes"], row["milliseconds"]["median"])):
        console.print(f"{row['d']}  {row['passes']}  {row['change']}  {row['milliseconds']['median']:.3f} ms")
    tell(out, console)


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
    console = make_console()
    if window:
        steps = chain(steps, model.window(preset, length=window, **settings))
    found = collect(steps, model.parts(read=window > 0), console, out, device, seed)
    show_model(console, found, absolute=device == "cuda")
    tell(out, console)


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    import torch

    if device not in ("cpu", "cuda"):
        fail(f"--device must be cpu or cuda, got {device!r}; name one of them")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda needs a CUDA device, and none is visible; use --device cpu")


def collect(
    steps: Iterator[tuple[str, list[Row]]], total: int, console: Console, out: Path | None, device: str, seed: int
) -> list[Row]:
    """The rows of all steps, with a progress bar; no rows at all when the contestants differ.

    Those so far lie beside `out` after each step, so that a run that is stopped, or killed for its memory, leaves them.
    """
    import torch

    from farspan.benchmark.agree import ResultsDifferError
    from farspan.benchmark.record import recorded, unfinished

    rows: list[Row] = []
    with progress(console) as show:
        try:
            for number, (done, new) in enumerate(recorded(steps, out, device=device, seed=seed), 1):
                rows += new
                show(number, total, done)
        except ResultsDifferError as error:
            fail(f"no figures: {error}")
        except (KeyboardInterrupt, torch.OutOfMemoryError) as stop:
            kept = f"{unfinished(out)} has the rows so far" if out is not None and rows else "no rows are kept"
            if isinstance(stop, torch.OutOfMemoryError):
                fail(f"out of memory after {len(rows)} rows; {kept}; try shorter lengths or fewer rows at a time")
            raise typer.Abort(f"{kept}; the same command begins anew") from stop
    return rows


def tell(out: Path | None, console: Console) -> None:
    """Where the result file is, if one was wanted."""
    if out is not None:
        say(console, f"\nwritten: {out}")
