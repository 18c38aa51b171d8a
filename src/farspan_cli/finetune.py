"""`farspan finetune`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan_cli.app import RunFolder, Seed, app, fail, show_table, weighted
from farspan_cli.progress import show_progress


@app.command()
def finetune(
    model: Annotated[
        Path, typer.Argument(help="What `farspan convert` wrote, or anything it reads.", show_default=False)
    ],
    data: Annotated[
        list[str], typer.Option(help="Token folder of `farspan data --tokenizer MODEL`, or DIR=WEIGHT; repeat to mix.")
    ],
    out: RunFolder,
    recipe: Annotated[str, typer.Option(help="One of those above, or a TOML file.")] = "distill",
    teacher: Annotated[str | None, typer.Option(help="Default: what MODEL was converted from.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Budget of all stages. Default: the recipe's.", min=1)] = None,
    length: Annotated[int | None, typer.Option(help="Rows of at most so many tokens.", min=2)] = None,
    seed: Seed = 0,
    compile: Annotated[bool, typer.Option(help="torch.compile, block by block.")] = False,
    precision: Annotated[str, typer.Option(help="auto (bf16 on a GPU), bf16 or fp32.")] = "auto",
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory, more time.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 500,
) -> None:
    """Fine-tune a converted model, stage by stage; the same command continues where it stopped.

    Recipes: hybrid, hybrid-control, distill, distill-skip, long-skip, paper, pi-4k, pi-4k-control, pi-8k,
    pi-8k-control (docs/finetuning.md says what they do).

    Several processes: `accelerate launch -m farspan_cli finetune …`.

    Example: `farspan finetune models/smollm2-coca --data data/books --recipe distill --out runs/distill`

    Example: `farspan finetune models/smollm2-coca --data data/books=3 --data data/code=1 --recipe paper
    --tokens 100_000_000 --compile --out runs/paper`
    """
    from farspan.finetune import Recipe
    from farspan.finetune import finetune as run
    from farspan.training import TrainingStoppedError
    from farspan.training.config import RunSection
    from farspan.training.loop import format_loss, main_process

    chosen = Recipe.load(recipe)
    chosen = chosen if length is None else chosen.capped(length)
    chosen = chosen if tokens is None else chosen.scaled(tokens)
    section = RunSection(seed, precision, compile, gradient_checkpointing, checkpoint_every)  # type: ignore[arg-type]
    sources = dict(weighted(one, "--data", "DIR", "--data books=3 --data code=1") for one in data)
    console = Console(quiet=not main_process())

    def show_plan() -> None:
        for stage in chosen.stages:
            steps = f"{stage.optimizer.steps:,} steps of {stage.batch_size:,} × {stage.length:,} tokens"
            console.print(f"stage {stage.name}: {steps}", highlight=False)

    try:
        with show_progress() as show:
            written = run(model, sources, chosen, out, teacher=teacher, run=section, begin=show_plan, progress=show)
    except TrainingStoppedError as error:
        fail(str(error))
    rows = json.loads((out / "recipe.json").read_text())["rows"]
    lines = []
    for row in rows:
        lines.append([row["name"], f"{row['tokens']:,}", *(format_loss(row[x]) for x in ("first_loss", "last_loss"))])
    show_table(console, ("stage", "tokens", "first loss", "last loss"), lines)
    console.print(f"model: {written}")
