"""`farspan bench`: speed and memory against peers, in one run."""

import json as json_module
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farspan_cli.app import Force, Json, Result, Seed, app, fail, is_out_of_memory, numbers, sharing, show_table
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


def _names(option: str, known: Callable[[], Iterable[str]], help: str) -> Any:
    """Make an option that reads names, separated by commas, of those `known` returns."""

    def read(text: str) -> list[str]:
        from farspan.errors import unknown

        found = [name.strip() for name in text.split(",")]
        for name in found:
            if name not in known():
                fail(str(unknown(option, name, [*known()])))
        return found

    return typer.Option(parser=read, metavar="NAME,NAME", help=help)


def _layouts() -> list[str]:
    from farspan.layers import HYBRIDS, NAMES

    return [*NAMES, *HYBRIDS]


def _modes() -> tuple[str, ...]:
    from farspan.bench.decode import MODES

    return MODES


Lengths = Annotated[Any, numbers("--lengths", "2048,8192", "Tokens, separated by commas.", LONGEST)]
Published = Annotated[int | None, typer.Option(help="Tokens of the published formulation.", min=64, max=LONGEST)]
Window = Annotated[int | None, typer.Option(help="Keys of a window, beside full RoPE.", min=1, max=LONGEST)]
GlobalEvery = Annotated[int | None, typer.Option(help="Layers of a hybrid per global one.", min=2)]
Preset = Annotated[str | None, typer.Option(help="350m, 135m, 124m, 33m or tiny. Default: 350m, on a CPU tiny.")]
Layouts = Annotated[Any, _names("--layouts", _layouts, "What to compare: rope,hybrid-rope,hybrid-pope, …")]
Models = Annotated[
    Any, _names("--layouts", lambda: [*_layouts(), "llama"], "As elsewhere; llama is transformers' own.")
]
Modes = Annotated[Any, _names("--modes", _modes, "On a GPU, beside eager: graph, compiled.")]


@dataclass(frozen=True)
class Case:
    """What every benchmark is told."""

    device: str
    repeats: int | None
    quick: bool
    seed: int

    @property
    def gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"

    def options(self, repeats: int) -> dict[str, Any]:
        """Return the options of a function that makes steps."""
        return {"repeats": self.repeats or repeats, "device": self.device, "seed": self.seed}


def timed(
    command: "partial[Steps]",
    out: Result = None,
    device: Literal["cpu", "cuda"] = "cpu",
    repeats: Annotated[
        int | None, typer.Option(help="Timed rounds; the median counts. Default: 3 to 20.", min=1, max=100_000)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter sequences, and fewer candidates.")] = False,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
) -> None:
    """Take the steps with a progress bar, and print their tables; no figures when a candidate is wrong."""
    import torch
    from rich.console import Console

    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda needs a CUDA device, and none is visible; use --device cpu")
    from farspan.bench import run, unfinished
    from farspan.bench.checks import ResultsDifferError

    steps = command(Case(device, repeats, quick, seed))
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=PIPE)

    def kept() -> str:
        return f"{unfinished(out)} has the rows so far" if out and unfinished(out).exists() else "no rows are kept"

    try:
        with show_progress(console) as report:
            kind = f"bench-{command.func.__name__}"
            rows = run(steps, kind=kind, device=device, seed=seed, out=out, force=force, progress=report)
    except ResultsDifferError as error:
        fail(f"no figures: {error}")
    except KeyboardInterrupt as stop:
        raise typer.Abort(f"{kept()}; the same command begins anew") from stop
    except (MemoryError, RuntimeError) as error:  # torch raises its own, or RuntimeError on a CPU
        if not is_out_of_memory(error):
            raise
        fail(f"out of memory; {kept()}; try shorter lengths or fewer at a time")
    if json:
        print(json_module.dumps(rows))
        return
    print_rows(console, rows)
    if out is not None:
        console.print(f"\nwritten: {out}", soft_wrap=True, markup=False)


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
    groups: Annotated[Any, numbers("--groups", "1,4", "Query heads per key head: 1, 2, 4 or 8.", LONGEST)] = "1",
    window: Window = None,
    layouts: Layouts = None,
    global_every: GlobalEvery = None,
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
        options |= {"global_every": global_every, "compile": case.gpu and not eager}
        return model.bodies(preset or ("350m" if case.gpu else "tiny"), layouts, chosen, **options)
    shapes, only = layer.shapes(chosen, groups, case.device, window), layer.QUICK if case.quick and not window else None
    return layer.steps(shapes, only=only, eager=eager, **options)


@bench.command("decode")
@sharing(timed)
def decode(
    case: Case,
    contexts: Annotated[Any, numbers("--contexts", "2048,8192", "Tokens in the cache, by commas.", LONGEST)] = None,
    layouts: Models = "rope,coca-exact",
    batch: Annotated[Any, numbers("--batch", "1,8", "Sequences at once, separated by commas.", LONGEST)] = "1,8",
    preset: Preset = None,
    prompts: Annotated[Any, numbers("--prompts", "32768", "Prompts to read, or none.", LONGEST, none=True)] = None,
    window: Window = None,
    global_every: GlobalEvery = None,
    modes: Modes = "graph,compiled",
) -> "Steps":
    """A complete model: greedy tokens per second after a context, reading a long prompt, and what the cache holds.

    On a GPU the half-width kernel reads CoCA's cache. The context is random numbers, written into the cache. Decoding
    runs with a growing cache (eager), and on a GPU with a static cache and a CUDA graph (graph). Logits are compared
    before times are reported. To quote one ratio, take "best", where each model has its best mode. With `--quick`: only
    the longest context and the shortest prompt.

    Example: `farspan bench decode --layouts hybrid-rope,hybrid-pope --window 128 --device cuda --out results/d.json`
    """
    from farspan.bench import decode

    options, preset = case.options(10), preset or ("350m" if case.gpu else "tiny")
    given = contexts or ([512, 8192, 32768] if case.gpu else [512, 2048])
    reads = ([32768, 131072] if case.gpu else [2048]) if prompts is None else prompts
    if case.quick:
        given, reads = [max(given)], sorted(reads)[:1]
    options |= {"window": window, "global_every": global_every, "layouts": layouts, "modes": modes}
    return decode.steps(preset, contexts=given, batches=batch, prompts=reads, **options)


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
    layouts: Layouts = None,
    length: Annotated[int, typer.Option(help="Tokens of a training row.", min=2, max=LONGEST)] = 512,
    rows: Annotated[int, typer.Option(help="Rows of a training step.", min=1, max=LONGEST)] = 64,
    compile: Annotated[bool, typer.Option(help="torch.compile, block by block.")] = True,
) -> "Steps":
    """The complete model: training steps of RoPE and of each CoCA form or layout, in turn.

    Example: `farspan bench model --preset 350m --device cuda --out results/model.json`
    """
    from farspan.bench import model

    options = case.options(10) | {"compile": compile, "variants": layouts or model.VARIANTS}
    preset = preset or ("350m" if case.gpu else "tiny")
    return model.training(preset, length=length, rows=rows, **options)


# Tables

HIDDEN = (
    *("kind", "error", "allowed", "gradient_error", "gradient_allowed", "weight_bytes", "flops_a_token", "matmul_peak"),
    *("sdpa_first", "chunk", "missing"),
)
"""What is in the file alone."""
NOTHING = "–"


def print_rows(console: "Console", rows: list[dict[str, Any]]) -> None:
    """Print a table of each kind of row under the names that the file has; what all of its lines share is its title.

    A quantity with a number for each candidate makes a line for each. Below are the reasons why candidates have no
    figures, and the check nearest to its limit.
    """
    kinds: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["kind"] != "check":
            kinds.setdefault(row["kind"], []).extend(_lines(row))
    for kind, lines in kinds.items():
        columns = {name: [line.get(name, NOTHING) for line in lines] for line in lines for name in line}
        same = {name: texts[0] for name, texts in columns.items() if len(set(texts)) == 1 and len(texts) > 1}
        title = ", ".join([kind, *(f"{name} {text}" for name, text in same.items() if text != NOTHING)])
        if shown := {name.replace("_", " "): texts for name, texts in columns.items() if name not in same}:
            _print_table(console, title, shown)
    missing = (x for row in rows if isinstance(row.get("missing"), dict) for x in row["missing"].items())
    notes = [f"missing: {name}: {why}" for name, why in sorted(set(missing))]
    if checks := [row for row in rows if "error" in row]:
        row = max(checks, key=lambda row: row["error"] / row["allowed"])
        what = row.get("attention", row["kind"])
        errors = f"relative error {row['error']:.1e} (allowed: {row['allowed']:.1e})"
        notes.append(f"{len(checks)} checks passed; nearest to its limit: {what}, {errors}")
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)


def _lines(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the texts of a row, or of each of its candidates."""
    plain, each = dict[str, str](), dict[str, dict[str, str]]()
    for name, value in row.items():
        if name in HIDDEN or isinstance(value, list):
            continue
        if not isinstance(value, dict) or "low" in value:
            plain[name] = _text(name, value)
            continue
        for candidate, found in value.items():
            parts = found if isinstance(found, dict) and "low" not in found else {name: found}
            each.setdefault(candidate, {}).update((part, _text(part, x)) for part, x in parts.items())
    return [{**plain, "candidate": name, **texts} for name, texts in each.items()] or [plain]


def _text(name: str, value: Any) -> str:
    """Format a value.

    >>> _text("peak_bytes", 1_500_000), _text("", 1.5), _text("", {"low": 0.9, "high": 1.25}), _text("", None)
    ('1.5 MB', '1.500', '0.900–1.250', '–')
    """
    if isinstance(value, dict):
        ends = f"{value['low']:,.3f}–{value['high']:,.3f}"
        return f"{value['median']:,.3f} ({ends})" if "median" in value else ends
    if name.endswith("bytes"):
        return f"{value / 1e9:,.2f} GB" if value >= 1e9 else f"{value / 1e6:,.1f} MB"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10_000 else f"{value:,.0f}"
    return NOTHING if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _print_table(console: "Console", title: str, columns: dict[str, list[str]]) -> None:
    """Print a table. Where it is too narrow, lines break where no figure is cut."""
    from rich.table import Column

    if sum(max(map(len, [name, *texts])) + 3 for name, texts in columns.items()) + 1 > console.width:
        breaks = partial(re.sub, r"(?<=,) | (?=[(/])", "\n")
        columns = {name.replace(" ", "\n"): [breaks(text) for text in texts] for name, texts in columns.items()}
    first, *others = columns
    right = (Column(name, justify="right", overflow="fold") for name in others)
    show_table(console, [first, *right], zip(*columns.values(), strict=True), title=title)
