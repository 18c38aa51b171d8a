"""`farspan analyze`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from farspan_cli.app import app, fail
from farspan_cli.progress import progress


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(help="Folder of a farspan or LLaMA-family model, or a GGUF file.")],
    text: Annotated[list[str], typer.Option(help="Long texts; documents of two windows or more are used.")],
    out: Annotated[Path, typer.Option(help="Folder for numbers, figures and the page; several models may share it.")],
    label: Annotated[str | None, typer.Option(help="What to call the model; by default its attention.")] = None,
    layers: Annotated[str | None, typer.Option(help="Only these layers, e.g. 0,5,11.")] = None,
    laws: Annotated[str, typer.Option(help="Scaling laws to compare.")] = "none,pi,ntk,dynamic,yarn",
    factor: Annotated[float, typer.Option(help="Factor of the scaling laws.", min=1)] = 4.0,
    queries: Annotated[int, typer.Option(help="Sampled queries a text, half inside the window.", min=2)] = 64,
    text_tokens: Annotated[
        int | None, typer.Option(help="Cut each document; by default 32 windows or 32,768.", min=2)
    ] = None,
    texts: Annotated[int, typer.Option(help="At most so many documents.", min=1)] = 4,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json or folder; by default the model's.")] = None,
    passkey: Annotated[int, typer.Option(help="Passkey cases a length, for the effective window.", min=0)] = 0,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also measure the loss without each head, on every text: slow.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampled queries.")] = 0,
) -> None:
    """What rotary attention does in a model: initial angles, decay, borders, and attention past the window.

    Example: `farspan analyze runs/demo/runs/rope-s0/model --text book.txt --out runs/look`

    Example: `farspan analyze SmolLM2.gguf --text book.txt --layers 0,10,20 --queries 32 --out runs/smollm2`
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of every law that is tried
    logging.disable_progress_bar()
    from farspan.analysis.files import Request, look
    from farspan.analysis.run import Settings

    chosen = None
    if layers is not None:
        try:
            chosen = tuple(int(part) for part in layers.split(","))
        except ValueError:
            fail(f"--layers must be whole numbers separated by commas, got {layers!r}; try --layers 0,1")
    settings = Settings(tuple(laws.split(",")), factor, queries, layers=chosen, seed=seed)
    request = Request(model, tuple(text), out, label, tokenizer, texts, text_tokens, passkey, ablate)
    console = Console()
    with progress(console) as show:

        def tell(stage: str, done: int, total: int, what: str) -> None:
            show(done, total, what, phase=stage)

        written = look(request, settings, tell)
    console.print(_summary(written.rows))
    for line in written.said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for path in written.files:
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _summary(rows: list[dict[str, object]]) -> Table:
    names = "layer", "Θ past π", "by |q||k|", "by attention", "damped tokens", "bound failed"
    table = Table(*names, title="initial angles, inside the training length")
    for column in table.columns:
        column.justify = "right"
    from farspan.report.looks import theorems

    checks = theorems(next(str(row["attention"]) for row in rows if row["kind"] == "model"))
    broken = {row["layer"]: row["broken"] for row in rows if row["kind"] == "curve"}
    for row in rows:
        if row["kind"] == "census" and row["region"] == "inside":
            past: dict[str, float] = row["past_pi"]  # type: ignore[assignment]
            damped: dict[str, float] = row["damped"]  # type: ignore[assignment]
            failed: dict[str, int] = broken[row["layer"]]  # type: ignore[assignment]
            shares = [f"{100 * past[w]:.1f}%" for w in ("plain", "energy", "attention")]
            table.add_row(
                str(row["layer"]), *shares, f"{damped['none']:.1f}", str(sum(failed[check] for check in checks))
            )
    return table
