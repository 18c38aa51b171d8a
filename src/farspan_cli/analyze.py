"""`farspan analyze`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from farspan_cli.app import Force, Model, Texts, app
from farspan_cli.progress import show_progress


@app.command()
def analyze(
    model: Model,
    text: Annotated[list[str], typer.Option(help="Long texts; documents of two windows or more are used.")],
    out: Annotated[Path, typer.Option(help="Folder for numbers, figures and the page; several models may share it.")],
    queries: Annotated[int, typer.Option(help="Sampled queries per text, half inside the window.", min=2)] = 64,
    label: Annotated[str | None, typer.Option(help="Name of the model in results; by default its attention.")] = None,
    scalings: Annotated[str, typer.Option(help="Methods to compare.")] = "none,linear,ntk,dynamic_ntk,yarn",
    text_tokens: Annotated[
        int | None, typer.Option(help="Cut each text; default: 32 windows or 32,768.", min=2)
    ] = None,
    texts: Texts = 4,
    force: Force = False,
) -> None:
    """Measure what rotary attention does: initial angles, decay, borders, and attention past the window.

    Example: `farspan analyze runs/demo/runs/rope-s0/model --text book.txt --out runs/look`

    Example: `farspan analyze SmolLM2.gguf --text book.txt --queries 32 --out runs/smollm2`
    """
    from farspan.analysis import Settings, analyze_checkpoint
    from farspan.checkpoints.sources import quiet

    settings = Settings(tuple(dict.fromkeys(scalings.split(","))), queries=queries)
    options: dict[str, Any] = {"label": label, "texts": texts, "text_tokens": text_tokens, "force": force}
    with show_progress() as show, quiet():  # transformers warns of every scaling that is tried
        _, path = analyze_checkpoint(model, text, out, settings, progress=show, **options)
    for file in (path, *_page(out)):
        print(f"written: {file}")


def _page(out: Path) -> list[Path]:
    """Draw the page of the folder, unless matplotlib or jinja2 is not installed."""
    if not (find_spec("matplotlib") and find_spec("jinja2")):
        return []
    from farspan.report import write_report

    return [write_report(out)]
