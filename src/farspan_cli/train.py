"""`farspan train`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan_cli.app import app, fail


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Model, data, optimizer and run.")],
    out: Annotated[Path, typer.Option(help="Folder of the run.", show_default=False)],
) -> None:
    """Pre-train a model; the same command continues where it stopped.

    Several processes: `accelerate launch -m farspan_cli train …`.

    Example: `farspan train config.toml --out runs/mine`, with in config.toml

    `model = { preset = "33m", attention = "coca-exact" }`, `data = { sources = { "data/books" = 1.0 } }`,
    `optimizer = { steps = 1000 }`
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from farspan.training import Progress, TrainConfig, TrainingStoppedError
    from farspan.training import train as run

    console = Console()
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn()
    with Bars(*columns, "{task.description}", console=console) as bars:
        task = bars.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            line = f"loss {progress.loss:.3f}, {progress.tokens_per_second:,.0f} tokens/s, MFU {progress.mfu:.0%}"
            bars.update(task, completed=progress.step, total=progress.steps, description=line)

        try:
            model = run(TrainConfig.load(config), out, report=show)
        except TrainingStoppedError as error:
            fail(str(error))
    console.print(f"model: {model}")
