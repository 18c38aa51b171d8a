"""`farspan bench layer` and `farspan bench decode`: made for a GPU; on a CPU they take the same steps at toy size."""

from pathlib import Path
from typing import Annotated

import typer

from farspan_cli.app import fail, whole_numbers
from farspan_cli.bench import bench, check_device, collect, tell
from farspan_cli.bench_tables import make_console, show_decode, show_layer


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
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False,
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

    shapes = layer.shapes(chosen, whole_numbers(groups, "--groups", "1,4"), device)
    console = make_console()
    whom = layer.QUICK if quick else None
    steps = layer.run(shapes, repeats=repeats, only=whom, device=device, seed=seed, eager=eager)
    rows = collect(steps, layer.parts(shapes), console, out, device, seed)
    show_layer(console, rows)
    tell(out, console)


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
    group: Annotated[int, typer.Option(help="Query heads a key head.", min=1)] = 1,
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head, and so their number.", min=2, show_default="the preset's")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The longest context and shortest prompt; no compile.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, caches and tokens.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """The whole model, RoPE against CoCA: greedy tokens a second after a context, and reading a long prompt.

    On a GPU the half-width kernel reads CoCA's cache. The context is random numbers, written into the cache. Decoding
    runs plainly with a growing cache (eager), with a static cache and a CUDA graph (graph), and compiled; each mode's
    logits are compared before the times that are reported. Where SDPA runs on a GPU, the faster of its flash and cuDNN
    kernels is taken.

    Of a static cache SDPA, and so RoPE, reads every slot with a mask, while CoCA's kernel stops where the text ends
    (each row says what it "reads"). To quote one ratio, take "best", where each model has its best mode.

    Example: `farspan bench decode --contexts 8192,32768 --batch 1 --device cuda --out results/decode.json`
    """
    if compile not in ("one", "all", "none"):
        fail(f"--compile must be one, all or none, got {compile!r}; name one of them")
    check_device(device)
    lengths, batches = whole_numbers(contexts, "--contexts"), whole_numbers(batch, "--batch", "1,8")
    reads = [] if prompts == "none" else whole_numbers(prompts, "--prompts")
    if quick:
        lengths, reads, compile = [max(lengths)], sorted(reads)[:1], "none"
    from farspan.benchmark import decode

    console = make_console()
    steps = decode.run(
        preset,
        contexts=lengths,
        batches=batches,
        prompts=reads,
        compile=compile,
        repeats=repeats,
        group=group,
        head_dim=head_dim,
        device=device,
        seed=seed,
    )
    rows = collect(steps, decode.parts(lengths, batches, reads, compile), console, out, device, seed)
    show_decode(console, rows, absolute=device == "cuda")
    tell(out, console)
