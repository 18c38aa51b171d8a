"""`farspan convert` and `farspan generate`: checkpoints of other families, in and out, and their text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan_cli.app import app, fail

DTYPES = ("float32", "bfloat16", "float16")


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="Folder with config.json and safetensors, or a .gguf file.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the model; new or empty.", show_default=False)],
    attention: Annotated[
        str | None,
        typer.Option(help="rope (the source's logits), coca-exact, coca-slack or coca-strict. Default: as it is."),
    ] = None,
    to: Annotated[str | None, typer.Option(help="Write for transformers instead: llama, mistral, qwen2 …")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the source's.")] = None,
) -> None:
    """A LLaMA, Mistral, Qwen2, Qwen3 or SmolLM checkpoint → a farspan model, or back.

    Example: `farspan convert SmolLM2-135M-Instruct.Q4_1.gguf --attention coca-exact --out models/smollm2-coca`

    Example: `farspan convert models/smollm2-rope --to llama --out models/smollm2-llama`
    """
    import torch
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn

    from farspan.convert import convert_folder

    if dtype is not None and dtype not in DTYPES:
        fail(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; choose one of these")
    console = Console()
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, "left", TimeRemainingColumn(), console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        convert_folder(source, out, attention, to=to, dtype=getattr(torch, dtype) if dtype else None, progress=show)
    console.print(f"written: {out}")


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A farspan folder, or anything `farspan convert` reads.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
) -> None:
    """Continue a text, printing each word as it comes.

    Example: `farspan generate models/smollm2-coca "The sea was" --max-new-tokens 50`
    """
    from farspan.convert.text import stream

    for piece in stream(model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chat=chat):
        print(piece, end="", flush=True)
    print()
