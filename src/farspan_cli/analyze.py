"""`farspan analyze`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farspan_cli.app import Force, Model, Seed, Texts, app, fail, show_table
from farspan_cli.progress import show_progress


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"--layers must be whole numbers separated by commas, got {text!r}; try --layers 0,1")


@app.command()
def analyze(
    model: Model,
    text: Annotated[list[str], typer.Option(help="Long texts; documents of two windows or more are used.")],
    out: Annotated[Path, typer.Option(help="Folder for numbers, figures and the page; several models may share it.")],
    layers: Annotated[Any, typer.Option(parser=_layers, metavar="N,N", help="Only these layers, e.g. 0,5,11.")] = None,
    queries: Annotated[int, typer.Option(help="Sampled queries per text, half inside the window.", min=2)] = 64,
    label: Annotated[str | None, typer.Option(help="Name of the model in results; by default its attention.")] = None,
    scalings: Annotated[str, typer.Option(help="Methods to compare.")] = "none,linear,ntk,dynamic_ntk,yarn",
    factor: Annotated[float, typer.Option(help="Factor of the scalings.", min=1)] = 4.0,
    text_tokens: Annotated[
        int | None, typer.Option(help="Cut each document; by default 32 windows or 32,768.", min=2)
    ] = None,
    texts: Texts = 4,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Measure what rotary attention does: initial angles, decay, borders, and attention past the window.

    Example: `farspan analyze runs/demo/runs/rope-s0/model --text book.txt --out runs/look`

    Example: `farspan analyze SmolLM2.gguf --text book.txt --layers 0,10,20 --queries 32 --out runs/smollm2`
    """
    from farspan.analysis import Settings, analyze_checkpoint
    from farspan.checkpoints.sources import quiet

    settings = Settings(tuple(dict.fromkeys(scalings.split(","))), factor, queries, layers=layers, seed=seed)
    options: dict[str, Any] = {"label": label, "texts": texts, "text_tokens": text_tokens}
    console = Console()
    with show_progress(console) as show, quiet():  # transformers warns of every scaling that is tried
        rows, path = analyze_checkpoint(model, text, out, settings, force=force, progress=show, **options)
    _show_summary(console, rows)
    for file in (path, *_page(out)):
        console.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)


def _show_summary(console: Console, rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        if row["kind"] == "census" and row["region"] == "inside":
            shares = [f"{100 * row['past_pi'][weight]:.1f}%" for weight in ("plain", "energy", "attention")]
            lines.append([row["layer"], *shares, f"{row['damped']['none']:.1f}"])
    print("initial angles, inside the training length")
    show_table(console, ("layer", "Θ past π", "by |q||k|", "by attention", "damped tokens"), lines)


def _page(out: Path) -> list[Path]:
    """Draw the page of the folder, unless matplotlib or jinja2 is not installed."""
    try:
        from farspan.report import write_report

        return [write_report(out)]
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("farspan"):
            raise
        return []
