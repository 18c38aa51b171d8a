"""`farspan bench`: speed and memory against peers, in one run."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farspan_cli.app import app, fail, is_out_of_memory, whole_numbers
from farspan_cli.progress import show_progress

if TYPE_CHECKING:
    from rich.console import Console

    from farspan.bench import Steps

bench = typer.Typer(help="Speed and memory against peers, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")
PIPE = 200
"""Columns where no terminal says how many it has."""
LONGEST = 2**24
"""Most tokens of one sequence: more fit into no memory."""

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and inputs.", min=0, max=2**63 - 1)]
Out = Annotated[Path | None, typer.Option(help="Write the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing result.")]
Quick = Annotated[bool, typer.Option("--quick", help="Short sequences where none are given, and fewer candidates.")]
Repeats = Annotated[int, typer.Option(help="Timed rounds; the median counts.", min=1, max=100_000)]
Lengths = Annotated[str | None, typer.Option(help="Tokens, separated by commas.")]
Published = Annotated[int | None, typer.Option(help="Tokens of the published formulation.", min=64, max=LONGEST)]
Window = Annotated[int | None, typer.Option(help="Time windows of so many keys beside full RoPE.", min=1, max=LONGEST)]
GlobalEvery = Annotated[int | None, typer.Option(help="Layers of a hybrid per global one.", min=2)]
Preset = Annotated[str, typer.Option(help="350m, 124m, 33m or tiny.")]


@bench.command("attention")
def bench_attention(
    lengths: Lengths = None,
    published_length: Published = None,
    window: Window = None,
    repeats: Repeats = 3,
    quick: Quick = False,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Attention alone: CoCA, RoPE, ALiBi and CoCA as published on a CPU; the half-width kernel on a GPU.

    With `--window`: windows of this library, FlexAttention's and flash-attn's beside full RoPE, on either device.

    Example: `farspan bench attention --window 256 --lengths 2048,8192 --out results/window.json`
    """
    check_device(device)
    from farspan.bench import attention

    options: dict[str, Any] = {"repeats": repeats, "device": device, "seed": seed}
    if window is None and device == "cuda":
        if lengths is not None or published_length is not None:
            fail("--lengths on cuda needs --window: the half-width kernel has its own shapes; leave the lengths out")
        steps = attention.kernel_steps(attention.NOTED if quick else attention.decoding_shapes(), **options)
    else:
        chosen = numbers(lengths or ("1024,4096" if quick else "8192,32768"))
        if window is not None:
            steps = attention.window_steps(chosen, window, **options)
        else:
            steps = attention.steps(chosen, published_length or (4096 if quick else 8192), **options)
    show(steps, "bench-attention", device, seed, out, force)


@bench.command("layer")
def bench_layer(
    lengths: Lengths = None,
    groups: Annotated[str, typer.Option(help="Query heads per key head: 1, 2, 4 or 8, by commas.")] = "1",
    window: Window = None,
    layouts: Annotated[str | None, typer.Option(help="Time bodies: rope,hybrid-rope,hybrid-pope, …")] = None,
    global_every: GlobalEvery = None,
    preset: Annotated[str | None, typer.Option(help="Model of the layouts.", show_default="350m; cpu: tiny")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, show_default="20; cpu with a window: 3")] = None,
    quick: Quick = False,
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """One compiled attention layer with its projections: CoCA against RoPE on every kernel, FlexAttention and ALiBi.

    On a GPU in bfloat16: 64 × 512, 16 × 2048, 2 × 16384 and 1 × 32768 tokens, up to 4096 wide. On a CPU each length is
    a toy. With `--window`: windows of this library and of others beside full RoPE. With `--layouts`: only the body of a
    model in each layout, forward and backward.

    Example: `farspan bench layer --lengths 2048 --groups 1,4 --device cuda --out results/layer-2048.json`
    """
    check_device(device)
    from farspan.bench import layer, model

    usual = ("2048,32768" if device == "cuda" else "64") if quick else "512,2048,16384,32768"
    chosen = numbers(lengths or usual)
    rounds = repeats or (3 if window is not None and device == "cpu" else 20)
    options: dict[str, Any] = {"repeats": rounds, "device": device, "seed": seed, "window": window}
    if layouts is not None:
        options |= {"global_every": global_every, "compile": device == "cuda" and not eager}
        steps = model.bodies(preset or ("350m" if device == "cuda" else "tiny"), names(layouts), chosen, **options)
        show(steps, "bench-layer", device, seed, out, force)
        return
    todo = layer.shapes(chosen, numbers(groups, "--groups", "1,4"), device, window)
    only = layer.QUICK if quick and window is None else None
    show(layer.steps(todo, only=only, eager=eager, **options), "bench-layer", device, seed, out, force)


@bench.command("decode")
def bench_decode(
    preset: Annotated[str | None, typer.Option(help="Model of the layouts.", show_default="350m; cpu: tiny")] = None,
    contexts: Annotated[
        str | None,
        typer.Option(help="Tokens in the cache, by commas.", show_default="512,8192,32768; cpu: 512,2048"),
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences at once, separated by commas.")] = "1,8",
    prompts: Annotated[
        str | None, typer.Option(help="Tokens of prompts to read, or none.", show_default="32768,131072; cpu: 2048")
    ] = None,
    layouts: Annotated[str, typer.Option(help="What to compare with rope, by commas.")] = "rope,coca-exact",
    window: Annotated[int | None, typer.Option(help="Window of hybrid layouts.", min=1, max=LONGEST)] = None,
    global_every: GlobalEvery = None,
    llama: Annotated[bool, typer.Option("--llama", help="Only a token beside transformers' LLaMA, on a CPU.")] = False,
    repeats: Repeats = 10,
    quick: Annotated[bool, typer.Option("--quick", help="Only the longest context and the shortest prompt.")] = False,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """A complete model: greedy tokens per second after a context, reading a long prompt, and what the cache holds.

    On a GPU the half-width kernel reads CoCA's cache. The context is random numbers, written into the cache. Decoding
    runs with a growing cache (eager), and on a GPU with a static cache and a CUDA graph (graph). Logits are compared
    before times are reported. To quote one ratio, take "best", where each model has its best mode.

    Example: `farspan bench decode --layouts hybrid-rope,hybrid-pope --window 128 --device cuda --out results/d.json`
    """
    check_device(device)
    usual = ("350m", "512,8192,32768", "32768,131072") if device == "cuda" else ("tiny", "512,2048", "2048")
    preset = preset or usual[0]
    given, batches = numbers(contexts or usual[1], "--contexts"), numbers(batch, "--batch", "1,8")
    reads = [] if prompts == "none" else numbers(prompts or usual[2], "--prompts")
    if quick:
        given, reads = [max(given)], sorted(reads)[:1]
    from farspan.bench import decode

    options: dict[str, Any] = {"layouts": names(layouts), "repeats": repeats, "seed": seed}
    if llama:
        steps = decode.llama_steps(preset, **options)
    else:
        options |= {"contexts": given, "batches": batches, "prompts": reads, "device": device}
        steps = decode.steps(preset, window=window, global_every=global_every, **options)
    show(steps, "bench-decode", device, seed, out, force)


@bench.command("cosformer")
def bench_cosformer(
    lengths: Lengths = None,
    published_length: Published = None,
    repeats: Annotated[int | None, typer.Option(help="Timed rounds.", min=1, show_default="5, cuda: 20")] = None,
    quick: Quick = False,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """Causal cosFormer (8 heads, width 64): against softmax attention up to 4,096 tokens, and as it was published.

    On a CUDA device: the kernels (bfloat16, 16 heads, widths 64 and 128, 65,536 tokens at a time), forward and
    backward, against flash-linear-attention with the same features, where it is installed, and flash attention.

    Example: `farspan bench cosformer --published-length 2048 --out results/cosformer-cpu.json`
    """
    check_device(device)
    from farspan.bench import cosformer

    if device == "cuda":
        chosen = numbers(lengths) if lengths else cosformer.QUICK if quick else cosformer.LENGTHS
        steps = cosformer.kernel_steps(cosformer.shapes(chosen), repeats=repeats or 20, device=device, seed=seed)
    else:
        chosen = numbers(lengths or ("256,1024" if quick else "256,512,1024,2048,4096,8192,16384,32768,65536"))
        published = published_length or (512 if quick else 2048)
        steps = cosformer.steps(chosen, published, repeats=repeats or 5, device=device, seed=seed)
    show(steps, "bench-cosformer", device, seed, out, force)


@bench.command("model")
def bench_model(
    preset: Preset = "350m",
    length: Annotated[int, typer.Option(help="Tokens of a training row.", min=2, max=LONGEST)] = 512,
    rows: Annotated[int, typer.Option(help="Rows of a training step.", min=1, max=LONGEST)] = 64,
    layouts: Annotated[str | None, typer.Option(help="What to compare with rope.", show_default="CoCA's forms")] = None,
    repeats: Repeats = 10,
    compile: Annotated[bool, typer.Option(help="torch.compile, block by block.")] = True,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
) -> None:
    """The complete model: training steps of RoPE and of each CoCA form or layout, in turn.

    Example: `farspan bench model --preset 350m --device cuda --out results/model.json`
    """
    check_device(device)
    from farspan.bench import model

    options: dict[str, Any] = {"repeats": repeats, "compile": compile, "device": device, "seed": seed}
    steps = model.training(preset, length=length, rows=rows, variants=names(layouts) or model.VARIANTS, **options)
    show(steps, "bench-model", device, seed, out, force)


def numbers(text: str, option: str = "--lengths", example: str = "2048,8192") -> list[int]:
    """Read counts, none of them absurd."""
    found = whole_numbers(text, option, example)
    if max(found) > LONGEST:
        fail(f"{option} must be at most {LONGEST:,}, got {max(found)}; try {option} {example}")
    return found


def names(text: str | None) -> list[str]:
    """Read names of layouts."""
    from farspan.errors import require_choice
    from farspan.layers import HYBRIDS, NAMES

    found = [name.strip() for name in text.split(",")] if text else []
    for name in found:
        require_choice("--layouts", name, [*NAMES, *HYBRIDS])
    return found


def check_device(device: str) -> None:
    """Fail for a device that is not there."""
    import torch

    if device not in ("cpu", "cuda"):
        fail(f"--device must be cpu or cuda, got {device!r}; name one of them")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda needs a CUDA device, and none is visible; use --device cpu")


def show(
    steps: "Steps",
    kind: str,
    device: str,
    seed: int,
    out: Path | None,
    force: bool,
) -> None:
    """Take the steps with a progress bar, and print their tables; no figures when a candidate is wrong."""
    from rich.console import Console

    from farspan.bench import run, tables, unfinished
    from farspan.bench.checks import ResultsDifferError

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=PIPE)

    def kept() -> str:
        return f"{unfinished(out)} has the rows so far" if out and unfinished(out).exists() else "no rows are kept"

    try:
        with show_progress(console) as report:
            told = lambda done, total, text="", **_: report(done, total, text)  # noqa: E731
            rows = run(steps, kind=kind, device=device, seed=seed, out=out, force=force, progress=told)
    except ResultsDifferError as error:
        fail(f"no figures: {error}")
    except KeyboardInterrupt as stop:
        raise typer.Abort(f"{kept()}; the same command begins anew") from stop
    except (MemoryError, RuntimeError) as error:  # torch raises its own, or RuntimeError on a CPU
        if not is_out_of_memory(error):
            raise
        fail(f"out of memory; {kept()}; try shorter lengths or fewer at a time")
    for part in tables(rows):
        print_table(console, *part) if isinstance(part, tuple) else console.print(part, soft_wrap=True, markup=False)
    if out is not None:
        console.print(f"\nwritten: {out}", soft_wrap=True, markup=False)


def print_table(console: "Console", title: str, headings: list[str], lines: list[list[str]]) -> None:
    """Print a table. Where it is too narrow, lines break where no figure is cut."""
    from rich.table import Table

    cells = [headings, *lines]
    if sum(max(map(len, column)) + 3 for column in zip(*cells, strict=True)) + 1 > console.width:
        cells = [[re.sub(r"(?<=,) | (?=[(/])", "\n", cell) for cell in line] for line in lines]
        cells.insert(0, [heading.replace(" ", "\n") for heading in headings])
    table = Table(*cells[0], title=title)
    for column in table.columns[1:]:
        column.justify, column.overflow = "right", "fold"
    for line in cells[1:]:
        table.add_row(*line)
    console.print(table)
