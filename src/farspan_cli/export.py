"""`farspan export`: a model as a folder for the Hugging Face hub."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan_cli.app import app, fail, making
from farspan_cli.convert import Dtype, torch_dtype
from farspan_cli.progress import show_progress


@app.command()
def export(
    model: Annotated[
        Path,
        typer.Argument(
            help="A farspan folder, or anything `farspan convert` reads, with its tokenizer.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to upload; new or empty.", show_default=False)],
    as_: Annotated[
        str | None,
        typer.Option("--as", help="Write a plain folder of this family, without custom code: smollm3 for hybrid-rope."),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="A file of `farspan eval` ppl, passkey, pairs or bits; may be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="OWNER/NAME on the hub. Default: the folder's name.")] = None,
    license: Annotated[str | None, typer.Option(help="For example apache-2.0.")] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="OWNER/NAME of the original. Default: what MODEL was converted from."),
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Write weights, tokenizer, the model's source for `trust_remote_code`, and a card with what was measured.

    Example: `farspan export runs/mine/model --results ppl.json --results passkey.json --out hub/mine`

    Example: `farspan export models/local --as smollm3 --out hub/plain`

    Then: `hf upload OWNER/NAME hub/mine`
    """
    from farspan.checkpoints import export_as, export_folder

    weights, console, lost = torch_dtype(dtype), Console(), list[str]()
    if as_ is not None and (results or name or license or base_model):
        fail(
            "--results, --name, --license and --base-model are for the card, which --as does not write; leave them out"
        )
    with making(out):
        with show_progress(console) as show:
            if as_ is not None:
                lost = export_as(model, out, as_, dtype=weights, progress=show)
            else:
                card = {"name": name, "license": license, "base_model": base_model}
                export_folder(model, out, results=results or (), dtype=weights, progress=show, **card)
        console.print(f"written: {out}")
    for sentence in lost:
        print(f"farspan: {sentence}", file=sys.stderr)
