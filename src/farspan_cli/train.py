"""`farspan train`."""

from pathlib import Path
from typing import Annotated

import typer

from farspan_cli.app import RunFolder, app, fail
from farspan_cli.progress import show_progress


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Model, data, optimizer and run.")],
    out: RunFolder,
) -> None:
    """Pre-train a model; the same command continues where it stopped.

    Several processes: `accelerate launch -m farspan_cli train …` (docs/training.md).

    Example: `farspan train config.toml --out runs/mine`, with three lines in config.toml:

    `model = { preset = "33m", attention = "coca-exact" }`

    `data = { sources = { "data/books" = 1.0 } }`

    `optimizer = { steps = 1000 }`
    """
    from farspan.training import TrainConfig, TrainingStoppedError
    from farspan.training import train as run
    from farspan.training.loop import main_process

    try:
        with show_progress() as show:
            model = run(TrainConfig.load(config), out, progress=show)
    except TrainingStoppedError as error:
        fail(str(error))
    if main_process():
        print(f"model: {model}")
