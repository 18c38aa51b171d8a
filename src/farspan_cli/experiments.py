"""`farspan reproduce` and `farspan report`: the papers' experiments, and their page."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farspan_cli.app import RunFolder, app, fail, show_table, weighted
from farspan_cli.progress import show_progress

PRESETS = (
    "`cpu` (minutes, offline), `gpu` (half an hour), `hybrid`, `hybrid-cpu`, `hybrid-ablations`, `hybrid-124m`, "
    "`cosformer-gpu`, `cosformer-cpu`, `cosformer-lm`, `pi`, `dropin`, `dropin-cpu`, or a TOML file."
)
ONLY = "Tables, figures, kinds of step, models or tasks, e.g. table1 or ppl,hybrid-pope or listops. Default: all."
Sources = Annotated[list[str] | None, typer.Option(help="Training text, or SOURCE=WEIGHT; repeat for a mixture.")]
HeldOut = Annotated[list[str] | None, typer.Option(help="Text for perplexity; documents long enough are used.")]
Labelled = Annotated[list[str] | None, typer.Option(help="Three files of labelled texts: training, choices and test.")]


@app.command()
def reproduce(
    out: RunFolder,
    preset: Annotated[str, typer.Option(help=PRESETS)] = "cpu",
    only: Annotated[str | None, typer.Option(help=ONLY)] = None,
    text: Sources = None,
    held_out: HeldOut = None,
    tokenizer: Annotated[str | None, typer.Option(help="A name or folder, or the size of a BPE to train.")] = None,
    labelled: Labelled = None,
    checkpoint: Annotated[str | None, typer.Option(help="`dropin`: what is converted, a folder or GGUF file.")] = None,
    pairs: Annotated[list[str] | None, typer.Option(help="`dropin`: JSONL of minimal pairs; repeat.")] = None,
) -> None:
    """The papers' experiments, from nothing to a page, at the budget of the preset.

    CoCA's Tables 1 to 3 and Figures 1, 4 and 5 (`cpu`, `gpu`), interpolation as in its Table 4, whose own numbers the
    page does not show (`pi`), layouts of local and global layers (`hybrid…`), cosFormer's tasks (`cosformer-…`), or
    CoCA dropped into a checkpoint (`dropin…`). Several processes may share one folder and its steps.

    Example: `farspan reproduce --preset cpu --out runs/demo`

    Example: `farspan reproduce --preset gpu --text books.jsonl=0.75 --text stdlib=0.25 --held-out test.jsonl --out run`

    Example: `farspan reproduce --preset hybrid --only rope,hybrid-pope --text b.jsonl --held-out test.jsonl --out run`

    Example: `farspan reproduce --preset dropin --checkpoint SmolLM2.gguf --text books.jsonl.xz --held-out test.jsonl.xz
    --pairs blimp.jsonl.xz --out runs/dropin`
    """
    from farspan.reproduce import Preset, main_table
    from farspan.reproduce import reproduce as run

    chosen = Preset.load(preset)
    given: dict[str, Any] = {"held_out": held_out, "tokenizer": tokenizer, "labelled": labelled}
    given |= {"checkpoint": checkpoint, "pairs": pairs}
    given["train"] = dict(weighted(one, "--text", "SOURCE", "--text books.jsonl.xz=0.75") for one in text or [])
    corpus = replace(chosen.corpus, **{name: value for name, value in given.items() if value})
    with show_progress() as progress:
        names = only.split(",") if only else None
        page, failed = run(replace(chosen, corpus=corpus), out, only=names, progress=progress)
    if rows := main_table(out):
        show_table(Console(), rows[0], rows[1:])
    for line in failed:
        print(f"failed: {line}")
    print(f"page: {page}")
    if failed:
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `farspan reproduce` wrote: results/*.json.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; DIR/report by default.")] = None,
) -> None:
    """One offline page with tables (ours beside the paper's) and figures, and both as files.

    Example: `farspan report runs/demo --out runs/demo/report`
    """
    from farspan.report import write_report

    try:
        page = write_report(folder, out)
    except ModuleNotFoundError as error:
        fail(f"farspan report needs {error.name}, which is not installed; run pip install 'farspan[report]'")
    print(f"written: {page}")
