"""`farspan convert`, `farspan export` and `farspan generate`: checkpoints in, out, and their text."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan_cli.app import Dtype, Folder, Model, app, fail, show_table, torch_dtype
from farspan_cli.progress import show_progress


def _layers(text: str) -> str | list[int]:
    """Read "auto", or "3,7,11" as [3, 7, 11]."""
    parts = text.split(",")
    if text != "auto" and not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        fail(f"--global-layers must be auto or layer numbers separated by commas, got {text!r}; try 3,7,11")
    return text if text == "auto" else [int(part) for part in parts]


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="Folder with config.json and safetensors, or a .gguf file.", show_default=False)
    ],
    out: Folder,
    attention: Annotated[
        str | None,
        typer.Option(
            help="rope (the source's logits), hybrid-rope, hybrid-pope, hybrid-coca-exact, coca-exact … "
            "Default: rope, or what a farspan folder has."
        ),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(help="Text to fit new layers on, as `farspan data` takes it. Without it they need training."),
    ] = None,
    window: Annotated[int | None, typer.Option(help="Keys in a window layer of a hybrid. Default: 512.", min=1)] = None,
    global_every: Annotated[int | None, typer.Option(help="Layers per global layer. Default: 4.", min=1)] = None,
    global_layers: Annotated[
        object,
        typer.Option(
            parser=_layers, metavar="N,N|auto", help="Of a hybrid; auto: those whose attention reaches furthest."
        ),
    ] = None,
    calibrate_tokens: Annotated[int, typer.Option(help="Tokens of it, kept in memory.", min=1024)] = 262_144,
    calibrate_length: Annotated[int, typer.Option(help="Tokens per sequence of it.", min=2)] = 512,
    calibrate_steps: Annotated[int, typer.Option(help="Adam steps per layer; 0 = the closed form.", min=0)] = 100,
    dtype: Dtype = None,
) -> None:
    """Convert a LLaMA, Mistral, Qwen2, Qwen3 or SmolLM checkpoint to a farspan model.

    Example: `farspan convert SmolLM2-135M-Instruct.Q4_1.gguf --attention rope --out models/smollm2-rope`

    Example: `farspan convert SmolLM2.gguf --attention hybrid-rope --window 512 --global-layers auto --out models/local`

    Example: `farspan convert SmolLM2.gguf --attention coca-exact --calibrate books.jsonl.xz --out models/smollm2-coca`
    """
    import torch

    from farspan.checkpoints import CalibrationConfig, convert_folder

    with show_progress() as show:
        done = convert_folder(
            source,
            out,
            attention,
            text=calibrate or (),
            tokens=calibrate_tokens,
            length=calibrate_length,
            calibration_config=CalibrationConfig(steps=calibrate_steps),
            window=window,
            global_every=global_every,
            global_layers=global_layers,  # type: ignore[arg-type]
            dtype=torch_dtype(dtype),
            device="cuda" if calibrate and torch.cuda.is_available() else "cpu",
            progress=show,
        )
    if done.report is not None:
        heads = "layer", "attention", "KL copied", "KL fitted", "output error"
        lines = []
        for row in done.report.layers:
            kl = [row[when]["attention_kl"] for when in ("copied", "fitted")]
            lines.append([row["layer"], row["attention"], *kl, row["fitted"]["output_error"]])
        show_table(Console(), heads, lines)
        print(f"calibrated on {done.report.tokens:,} tokens in {done.report.seconds:.0f} s")
    if done.global_layers:
        reach = {layer: f" (reach {done.reach[layer]:.0f})" if done.reach else "" for layer in done.global_layers}
        print("global layers: " + ", ".join(f"{layer}{more}" for layer, more in reach.items()))
    print(f"written: {out}")
    if done.copied:
        said = f"{len(done.copied)} layers start from copied weights and do not yet compute what the original did"
        print(f"farspan: {said}: convert with --calibrate TEXT, or train them with farspan finetune", file=sys.stderr)


@app.command()
def export(
    model: Model,
    out: Folder,
    as_: Annotated[
        str | None,
        typer.Option("--as", help="Write a plain folder of this family: llama … for rope, smollm3 for hybrid-rope."),
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="A result of `farspan eval ppl|passkey|retrieval`; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="OWNER/NAME on the hub. Default: the folder's name.")] = None,
    license: Annotated[str | None, typer.Option(help="For example apache-2.0.")] = None,
    base_model: Annotated[str | None, typer.Option(help="OWNER/NAME of the original. Default: as recorded.")] = None,
    dtype: Dtype = None,
) -> None:
    """Write weights, tokenizer, the model's source for `trust_remote_code`, and a card with what was measured.

    Example: `farspan export runs/mine/model --results ppl.json --results passkey.json --out hub/mine`

    Example: `farspan export models/local --as smollm3 --out hub/plain`

    Then: `hf upload OWNER/NAME hub/mine`
    """
    from farspan.checkpoints import export_as, export_folder

    card, lost = {"name": name, "license": license, "base_model": base_model}, list[str]()
    if as_ is not None and (results or any(card.values())):
        options = "--results, --name, --license and --base-model"
        fail(f"{options} are for the card, which --as does not write; leave them out")
    with show_progress() as show:
        if as_ is not None:
            lost = export_as(model, out, as_, dtype=torch_dtype(dtype), progress=show)
        else:
            export_folder(model, out, results=results or (), dtype=torch_dtype(dtype), progress=show, **card)
    print(f"written: {out}")
    for sentence in lost:
        print(f"farspan: {sentence}", file=sys.stderr)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue.", show_default=False)],
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a text, printing each word as it comes.

    Example: `farspan generate models/smollm2-coca "The sea was" --max-new-tokens 50`

    Example: `farspan generate SmolLM2-135M-Instruct.Q4_1.gguf --chat "Why is the sky blue?"`
    """
    from farspan.checkpoints import generate

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    generate(model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chat=chat, show=show)
    print()
