"""`farspan reproduce` and `farspan report`: the paper's experiments, and their page."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan_cli.app import app, fail, weighted
from farspan_cli.progress import duration, progress


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command continues there.", show_default=False)],
    preset: Annotated[
        str,
        typer.Option(
            help="`cpu` (minutes, offline), `gpu` (half an hour), `cpu-log-length`, `cosformer-cpu`, `cosformer-gpu`, "
            "`dropin`, `dropin-cpu`, or a TOML file."
        ),
    ] = "cpu",
    only: Annotated[
        str | None,
        typer.Option(help="Tables, figures, tasks or runs, e.g. table1,figure1 or listops or distill. Default: all."),
    ] = None,
    ends: Annotated[
        bool,
        typer.Option("--ends", help="`dropin`: measure conversions and what runs end with, not the stages before."),
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Training text, or SOURCE=WEIGHT; repeat for a mixture.", show_default=False),
    ] = None,
    held_out: Annotated[
        list[str] | None, typer.Option(help="Text for perplexity; documents long enough are used.", show_default=False)
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A name or folder, or the size of a BPE to train.")] = None,
    labelled: Annotated[
        list[str] | None,
        typer.Option(help="Three files of labelled texts: for training, choices and test.", show_default=False),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="`dropin`: what is converted, a folder or GGUF file.", show_default=False)
    ] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option(help="`dropin`: JSONL of minimal pairs, with good and bad; repeat.", show_default=False),
    ] = None,
) -> None:
    """The papers' experiments, from nothing to a page, at the budget of the preset.

    CoCA's Tables 1 to 3 and Figures 1, 4 and 5 (`cpu`, `gpu`; its speed, Figure 6, with `--only speed`), or cosFormer's
    tasks (`cosformer-cpu`, `cosformer-gpu`), or CoCA dropped into a checkpoint (`dropin-cpu`, `dropin`). Several
    processes may share one folder and its steps. The time left is by steps of the same kind that were done before; "+"
    stands for others that are to come.

    Example: `farspan reproduce --preset cpu --out runs/demo`

    Example: `farspan reproduce --preset gpu --text books.jsonl=0.75 --text stdlib=0.25 --held-out test.jsonl --out run`

    Example: `farspan reproduce --preset cosformer-cpu --only listops --out runs/listops`

    Example: `farspan reproduce --preset dropin --checkpoint SmolLM2.gguf --text books.jsonl.xz --held-out test.jsonl.xz
    --pairs blimp.jsonl.xz --out runs/dropin`
    """
    from farspan.reproduce import Preset, Standing
    from farspan.reproduce import reproduce as run

    chosen = Preset.load(preset)
    corpus = chosen.corpus
    if text:
        sources = dict(weighted(one, "--text", "SOURCE", "--text books.jsonl.xz=0.75") for one in text)
        corpus = replace(corpus, train=sources)
    corpus = replace(corpus, held_out=held_out or corpus.held_out, tokenizer=tokenizer or corpus.tokenizer)
    corpus = replace(corpus, labelled=labelled or corpus.labelled)
    corpus = replace(corpus, checkpoint=checkpoint or corpus.checkpoint, pairs=pairs or corpus.pairs)
    console, failed = Console(), list[str]()
    with progress(console) as show:

        def tell(standing: Standing) -> None:
            failed[:] = standing.failed
            text = f"{standing.step}: {standing.detail}" if standing.detail else standing.step
            left = standing.left
            known = f"{duration(left.seconds)}{'' if left.whole else '+'}" if left else ""
            show(standing.share, 1.0, text, left=known)

        names = only.split(",") if only else None
        page = run(replace(chosen, corpus=corpus), out, only=names, ends=ends, report=tell)
    tables = page.parent / "tables"
    for table in sorted([*tables.glob("table*.md"), *tables.glob("cosformer-*.md"), *tables.glob("dropin*.md")]):
        console.print(table.read_text(), markup=False, highlight=False)
    for line in failed:
        console.print(f"failed: {line}", style="red", markup=False)
    console.print(f"page: {page}")
    if failed:
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `farspan reproduce` wrote: results/*.json.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; DIR/report by default.")] = None,
) -> None:
    """One offline page with tables (ours beside the paper's) and figures, and both as files for a paper.

    Example: `farspan report runs/demo --out runs/demo/report`
    """
    from farspan.report import write_report

    try:
        page = write_report(folder, out)
    except ModuleNotFoundError as error:
        fail(f"farspan report needs {error.name}, which is not installed; run pip install 'farspan[report]'")
    print(f"written: {page}")
