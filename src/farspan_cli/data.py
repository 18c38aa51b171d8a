"""`farspan data`."""

from pathlib import Path
from typing import Annotated

import typer

from farspan_cli.app import app, fail
from farspan_cli.progress import show_progress


@app.command()
def data(
    text: Annotated[
        list[str], typer.Argument(help="Files, directories, `stdlib`, `hf:NAME[:CONFIG][:SPLIT]`.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the token shards.", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, a tokenizer.json, a folder, or OWNER/NAME.")] = "bytes",
    train_tokenizer: Annotated[
        int | None, typer.Option(help="Train a BPE of this size instead.", min=257, max=2**20)
    ] = None,
    valid_share: Annotated[float, typer.Option(help="Share of documents held out.", min=0, max=1)] = 0.01,
    field: Annotated[str, typer.Option(help="JSON key or parquet column with the text.")] = "text",
) -> None:
    """Tokenize text, JSONL (.gz .xz .zst) or parquet into shards. Interrupted, the same command continues.

    Example: `farspan data books.jsonl.xz --train-tokenizer 8192 --out data/books`

    Example: `farspan data stdlib --tokenizer data/books --out data/code`
    """
    if train_tokenizer is not None and tokenizer != "bytes":
        fail(f"--tokenizer must be left out with --train-tokenizer, got {tokenizer!r}; choose one of them")
    from farspan.data import prepare

    chosen = tokenizer if train_tokenizer is None else train_tokenizer
    with show_progress() as show:
        manifest = prepare(text, out, tokenizer=chosen, field=field, valid_share=valid_share, progress=show)
    for split, found in manifest["splits"].items():
        print(f"{split}: {found['tokens']:,} tokens, {found['documents']:,} documents")
    print(f"written: {out}")
