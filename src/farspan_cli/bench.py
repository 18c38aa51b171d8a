"""`farspan bench`: speed and memory against peers, in one run."""

import json as json_module
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from farspan_cli.app import LONGEST, Force, Json, Result, app, fail, numbers, sharing, show_table
from farspan_cli.progress import show_progress

if TYPE_CHECKING:
    from farspan.bench import Steps

HELP = "Speed and memory against peers, in one run. One that is interrupted leaves its rows beside --out."
bench = typer.Typer(help=HELP, no_args_is_help=True)
app.add_typer(bench, name="bench")

Lengths = Annotated[Any, numbers("--lengths", "2048,8192", "Tokens, separated by commas.")]
Published = Annotated[int | None, typer.Option(help="Tokens of the published formulation.", min=64, max=LONGEST)]
Window = Annotated[int | None, typer.Option(help="Keys of a window, beside full RoPE.", min=1, max=LONGEST)]
Preset = Annotated[str | None, typer.Option(help="350m, 135m, 124m, 33m or tiny. Default: 350m, on a CPU tiny.")]
LAYOUTS = typer.Option(help="What to compare: rope,hybrid-rope,hybrid-pope, …")


@dataclass(frozen=True)
class Case:
    """What every benchmark is told."""

    device: str
    repeats: int | None
    quick: bool

    @property
    def gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"

    def options(self, repeats: int) -> dict[str, Any]:
        """Return the options of a function that makes steps."""
        return {"repeats": self.repeats or repeats, "device": self.device}


def timed(
    command: "partial[Steps]",
    out: Result = None,
    device: Literal["cpu", "cuda"] = "cpu",
    repeats: Annotated[
        int | None, typer.Option(help="Timed rounds; the median counts. Default: 3 to 20.", min=1, max=100_000)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter sequences, and fewer candidates.")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Take the steps with a progress bar, and print their tables; no figures when a candidate is wrong."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda needs a CUDA device, and none is visible; use --device cpu")
    from farspan.bench import run, unfinished
    from farspan.bench.checks import ResultsDifferError

    steps = command(Case(device, repeats, quick))
    try:
        with show_progress() as progress:
            kind = f"bench-{command.func.__name__}"
            rows = run(steps, kind=kind, device=device, out=out, force=force, progress=progress)
    except ResultsDifferError as error:
        fail(f"no figures: {error}")
    except KeyboardInterrupt as stop:
        kept = f"{unfinished(out)} has the rows so far" if out and unfinished(out).exists() else "no rows are kept"
        raise KeyboardInterrupt(f"{kept}; the same command begins anew") from stop
    if json:
        print(json_module.dumps(rows))
        return
    print_rows(Console(width=None if sys.stdout.isatty() else 160), rows)
    if out is not None:
        print(f"written: {out}")


@bench.command("attention")
@sharing(timed)
def attention(
    case: Case, lengths: Lengths = None, window: Window = None, published_length: Published = None
) -> "Steps":
    """Attention alone, forward: CoCA, RoPE, ALiBi and CoCA as published.

    With `--window`: windows of this library, FlexAttention's and flash-attn's beside full RoPE, also with gradients.

    Example: `farspan bench attention --window 256 --lengths 2048,8192 --out results/window.json`
    """
    from farspan.bench import layer

    chosen = lengths or ([1024, 4096] if case.quick else [8192, 32768])
    if window is not None:
        shapes = layer.shapes(chosen, [1], case.device, window, alone=True)
        return layer.steps(shapes, window=window, alone=True, **case.options(3))
    return layer.op_steps(chosen, published_length or (4096 if case.quick else 8192), **case.options(3))


@bench.command("layer")
@sharing(timed)
def layer(
    case: Case,
    lengths: Lengths = None,
    groups: Annotated[Any, numbers("--groups", "1,4", "Query heads per key head: 1, 2, 4 or 8.")] = "1",
    window: Window = None,
    layouts: Annotated[str | None, LAYOUTS] = None,
    preset: Preset = None,
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False,
) -> "Steps":
    """One compiled attention layer with its projections: CoCA against RoPE on every kernel, FlexAttention and ALiBi.

    On a GPU in bfloat16: 64 × 512, 16 × 2048, 2 × 16384 and 1 × 32768 tokens, up to 4096 wide. On a CPU each length is
    a toy. With `--window`: windows of this library and of others beside full RoPE. With `--layouts`: only the body of a
    model in each layout, forward and backward.

    Example: `farspan bench layer --lengths 2048 --groups 1,4 --device cuda --out results/layer-2048.json`
    """
    from farspan.bench import layer, model

    chosen = lengths or (([2048, 32768] if case.gpu else [64]) if case.quick else [512, 2048, 16384, 32768])
    options = {**case.options(20 if window is None or case.gpu else 3), "window": window}
    if layouts is not None:
        options |= {"compile": case.gpu and not eager}
        return model.bodies(preset or ("350m" if case.gpu else "tiny"), layouts.split(","), chosen, **options)
    shapes, only = layer.shapes(chosen, groups, case.device, window), layer.QUICK if case.quick and not window else None
    return layer.steps(shapes, only=only, eager=eager, **options)


@bench.command("decode")
@sharing(timed)
def decode(
    case: Case,
    contexts: Annotated[Any, numbers("--contexts", "2048,8192", "Tokens in the cache, by commas.")] = None,
    layouts: Annotated[str, typer.Option(help="As elsewhere; llama is transformers' own.")] = "rope,coca-exact",
    batch: Annotated[Any, numbers("--batch", "1,8", "Sequences at once, separated by commas.")] = "1,8",
    preset: Preset = None,
    prompts: Annotated[Any, numbers("--prompts", "32768", "Prompts to read, in tokens. By default no prompts.")] = None,
    window: Window = None,
) -> "Steps":
    """A complete model: greedy tokens per second after a context, reading a long prompt, and what the cache holds.

    On a GPU the half-width kernel reads CoCA's cache. The context is random numbers, written into the cache. Decoding
    runs with a growing cache (eager), and on a GPU with a static cache and a CUDA graph (graph), also of the compiled
    step (compiled). Logits are compared before times are reported. To quote one ratio, take "best", where each model
    has its best mode. With `--quick`: only the longest context.

    Example: `farspan bench decode --layouts hybrid-rope,hybrid-pope --window 128 --device cuda --out results/d.json`
    """
    from farspan.bench import decode

    given = contexts or ([512, 8192, 32768] if case.gpu else [512, 2048])
    options = case.options(10) | {"contexts": [max(given)] if case.quick else given, "batches": batch}
    options |= {"prompts": prompts or [], "layouts": layouts.split(","), "window": window}
    return decode.steps(preset or ("350m" if case.gpu else "tiny"), **options)


@bench.command("cosformer")
@sharing(timed)
def cosformer(case: Case, lengths: Lengths = None, published_length: Published = None) -> "Steps":
    """Causal cosFormer (8 heads, width 64): against softmax attention up to 4,096 tokens, and as it was published.

    On a CUDA device: the kernels (bfloat16, 16 heads, widths 64 and 128, 65,536 tokens at a time), forward and
    backward, against flash-linear-attention with the same features, where it is installed, and flash attention.

    Example: `farspan bench cosformer --published-length 2048 --out results/cosformer-cpu.json`
    """
    from farspan.bench import cosformer

    if case.gpu:
        shapes = cosformer.shapes(lengths or (cosformer.QUICK if case.quick else cosformer.LENGTHS))
        return cosformer.kernel_steps(shapes, **case.options(20))
    chosen = lengths or ([256, 1024] if case.quick else [2**k for k in range(8, 17)])
    published = published_length or (512 if case.quick else 2048)
    return cosformer.steps(chosen, published, **case.options(5))


@bench.command("model")
@sharing(timed)
def model(
    case: Case,
    preset: Preset = None,
    layouts: Annotated[str, LAYOUTS] = "rope,coca-exact,coca-slack,coca-strict",
    length: Annotated[int, typer.Option(help="Tokens of a training row.", min=2, max=LONGEST)] = 512,
    rows: Annotated[int, typer.Option(help="Rows of a training step.", min=1, max=LONGEST)] = 64,
    compile: Annotated[bool, typer.Option(help="torch.compile, block by block.")] = True,
) -> "Steps":
    """The complete model: training steps of each attention or layout, in turn.

    Example: `farspan bench model --preset 350m --device cuda --out results/model.json`
    """
    from farspan.bench import model

    options = case.options(10) | {"compile": compile, "variants": layouts.split(",")}
    return model.training(preset or ("350m" if case.gpu else "tiny"), length=length, rows=rows, **options)


# Tables

LAYER = "passes b n d g candidate milliseconds time_over_best_rope time_over_best_peer peak_bytes"
STEP = "rows length attention parameters tokens_per_second time_over_rope mfu peak_bytes"
COLUMNS = {
    **dict.fromkeys(("op", "layer", "window layer"), LAYER),
    "decode": "context batch mode attention tokens_per_second speed_over_rope cache_over_rope peak_bytes",
    "best": "context batch attention mode tokens_per_second speed_over_rope cache_bytes",
    "prefill": "length attention tokens_per_second time_over_rope cache_over_rope peak_bytes",
    **dict.fromkeys(("training", "body"), STEP),
    "linear": "passes b n d candidate milliseconds speedup memory_over_least state_bytes",
}
"""What is shown of each kind of row; the file has all."""


def print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print a table of each kind of row, the candidates without figures, and the check nearest to its limit."""
    for kind, columns in COLUMNS.items():
        names = columns.split()
        lines = [line for row in rows if row["kind"] == kind for line in _lines(row)]
        if lines:
            cells = ([_cell(name, line.get(name)) for name in names] for line in lines)
            show_table(console, [name.replace("_", " ") for name in names], cells, title=kind)
    missing = [(row["attention"], row["why"]) for row in rows if "why" in row]
    missing += [found for row in rows for found in row.get("missing", {}).items()]
    notes = [f"missing: {name}: {why}" for name, why in dict.fromkeys(missing)]
    if checks := [row for row in rows if "error" in row]:
        row = max(checks, key=lambda row: row["error"] / row["allowed"])
        found = f"{row['attention']}, relative error {row['error']:.1e} (allowed: {row['allowed']:.1e})"
        notes.append(f"{len(checks)} checks passed; nearest to its limit: {found}")
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)


def _lines(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row, or one for each of its candidates."""
    if "milliseconds" not in row:
        return [row]
    each = {name: value for name, value in row.items() if isinstance(value, dict)}
    return [
        {**row, "candidate": candidate, **{name: value.get(candidate) for name, value in each.items()}}
        for candidate in row["milliseconds"]
    ]


def _cell(name: str, value: Any) -> Any:
    """Format a ratio with its range, the median of times, and bytes."""
    if isinstance(value, dict):
        median = f"{value['median']:,.3f}"
        return median if name == "milliseconds" else f"{median}\n{value['low']:.3f}–{value['high']:.3f}"
    return f"{value / 1e6:,.1f} MB" if name.endswith("bytes") and value is not None else value
