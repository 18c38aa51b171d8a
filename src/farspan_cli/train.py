"""`farspan train`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan_cli.app import app, fail
from farspan_cli.progress import progress


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Model, data, optimizer and run.")],
    out: Annotated[Path, typer.Option(help="Folder of the run.", show_default=False)],
) -> None:
    """Pre-train a model; the same command continues where it stopped.

    Several processes: `accelerate launch -m farspan_cli train …`.

    Example: `farspan train config.toml --out runs/mine`, with three lines in config.toml:

    `model = { preset = "33m", attention = "coca-exact" }`

    `data = { sources = { "data/books" = 1.0 } }`

    `optimizer = { steps = 1000 }`
    """
    from farspan.training import Progress, TrainConfig, TrainingStoppedError
    from farspan.training import train as run

    console = Console()
    with progress(console) as show:

        def tell(now: Progress) -> None:
            line = f"step {now.step:,}, loss {now.loss:.3f}, {now.tokens_per_second:,.0f} tokens/s, MFU {now.mfu:.0%}"
            show(now.step, now.steps, line)

        try:
            model = run(TrainConfig.load(config), out, report=tell)
        except TrainingStoppedError as error:
            fail(str(error))
    console.print(f"model: {model}")
