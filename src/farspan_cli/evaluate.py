"""`farspan eval`: perplexity, loss by position and retrieval of a trained model, minimal pairs and bits per byte."""

import json as json_module
import sys
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farspan_cli.app import Force, Json, Model, Result, Seed, Texts, app, fail, numbers, sharing, show_table
from farspan_cli.progress import show_progress

evaluate = typer.Typer(help="Measure a trained model past its training length.", no_args_is_help=True)
app.add_typer(evaluate, name="eval")

Rows = list[dict[str, Any]]
Run = Callable[..., Rows]
Lengths = Annotated[Any, numbers("--lengths", "2048,8192", "Lengths in tokens, separated by commas.")]
Scaling = Annotated[
    list[str] | None,
    typer.Option(
        help="own (as configured, the default), none, dynamic_ntk-F, ntk-F (static), yarn-F or linear-F with a factor "
        "F, each also with +log; several by commas, or repeat."
    ),
]
Ntk = Annotated[float | None, typer.Option(help="Old name of --scaling dynamic_ntk-F.", min=1)]
Text = Annotated[list[str], typer.Option(help="Long documents, as `farspan data` takes them; short ones are skipped.")]
TextTokens = Annotated[int, typer.Option(help="Cut each document to so many tokens.", min=2)]
Cases = Annotated[int, typer.Option(help="Prompts per length.", min=1)]


def measured(
    command: Callable[[Run], tuple[Rows, str]],
    model: Model,
    out: Result = None,
    scaling: Scaling = None,
    ntk: Ntk = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure, and print rows: a command returns those to show, and their columns."""
    from farspan.evaluation.conditions import is_main

    options: dict[str, Any] = {"out": out, "force": force, "scalings": _scalings(scaling, ntk, model)}
    rows: Rows = []

    def run(function: Run, *given: Any, **more: Any) -> Rows:
        if is_main():  # of the processes that torchrun started, one shows progress and prints
            with show_progress() as progress:
                rows.extend(function(model, *given, progress=progress, **more, **options))
        else:
            function(model, *given, **more, **options)
        return rows

    shown, columns = command(run)
    if not is_main():
        return
    if json:
        print(json_module.dumps(rows))
        return
    names = columns.split()
    show_table(Console(), names, ([row[name] for name in names] for row in shown))
    if out is not None:
        print(f"written: {out}")


@evaluate.command("ppl")
@sharing(measured)
def ppl(
    run: Run,
    text: Text,
    lengths: Lengths = "512,1024,2048",
    stride: Annotated[int, typer.Option(help="Tokens between windows.", min=1)] = 512,
    text_tokens: TextTokens = 32_768,
    texts: Texts = 100,
) -> tuple[Rows, str]:
    """Perplexity by window length, with the truncation control (same tokens, context cut to the training length).

    Example: `farspan eval ppl runs/mine/model --text test.jsonl.xz --lengths 512,1024 --scaling none,dynamic_ntk-4`
    """
    from farspan.evaluation import evaluate_perplexity

    rows = run(evaluate_perplexity, text, lengths=lengths, stride=stride, texts=texts, text_tokens=text_tokens)
    if rows and not any(row["mode"] == "truncated" for row in rows):
        print("without the truncation control, whose texts need the training length", file=sys.stderr)
    return rows, "scaling length stride mode tokens ppl"


@evaluate.command("passkey")
@sharing(measured)
def passkey(
    run: Run,
    lengths: Lengths = "512,1024,2048",
    cases: Cases = 100,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate; the key must be among them.", min=1)] = 64,
    seed: Seed = 0,
) -> tuple[Rows, str]:
    """Passkey retrieval by length, with Wilson intervals and the near/far split at the training length.

    Example: `farspan eval passkey runs/mine/model --lengths 512,1024 --cases 100 --out passkey.json`
    """
    from farspan.evaluation import evaluate_passkey

    rows = run(evaluate_passkey, lengths=lengths, cases=cases, new_tokens=new_tokens, seed=seed)
    return rows, "scaling length cases correct accuracy ci95"


@evaluate.command("positions")
@sharing(measured)
def positions(run: Run, text: Text, text_tokens: TextTokens = 131_072, texts: Texts = 100) -> tuple[Rows, str]:
    """Loss by position, and what the far context gains over one cut to the training length, on the same tokens.

    Example: `farspan eval positions runs/mine/model --text test.jsonl.xz --out positions.json`
    """
    from farspan.evaluation import evaluate_positions

    rows = run(evaluate_positions, text, texts=texts, text_tokens=text_tokens)
    shown = [{**row, "ppl": exp(min(row["nll"] / row["tokens"], 700.0))} for row in rows]
    return shown, "scaling start stop tokens ppl gain gain_ci95"


@evaluate.command("retrieval")
@sharing(measured)
def retrieval(
    run: Run,
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = "abcdigits,phonebook,niah_multikey_2",
    lengths: Lengths = "512,1024,2048",
    cases: Cases = 100,
    seed: Seed = 0,
) -> tuple[Rows, str]:
    """Retrieval tasks by length and depth, with Wilson intervals: abcdigits, phonebook, passkey and RULER's
    niah_single_1, niah_multikey_2, niah_multikey_3, vt, fwe, cwe.

    Example: `farspan eval retrieval runs/mine/model --tasks abcdigits,vt --lengths 512,4096 --out retrieval.json`
    """
    from farspan.evaluation import evaluate_retrieval

    rows = run(evaluate_retrieval, tasks=tasks.split(","), lengths=lengths, cases=cases, seed=seed)
    return [row for row in rows if row["depth"] is None], "scaling task length cases accuracy ci95 recall"


@evaluate.command("pairs")
@sharing(measured)
def pairs(
    run: Run, pairs: Annotated[list[Path], typer.Option(help="JSONL (.gz .xz .zst) with good, bad, set and field.")]
) -> tuple[Rows, str]:
    """Minimal pairs: how often the good sentence is the likelier, by phenomenon, with Wilson intervals.

    Example: `farspan eval pairs models/smollm2-coca --pairs blimp.jsonl.xz --out pairs.json`
    """
    from farspan.evaluation import evaluate_pairs

    rows = run(evaluate_pairs, pairs)
    return [row for row in rows if row["kind"] != "set"], "kind field cases correct accuracy ci95"


@evaluate.command("bits")
@sharing(measured)
def bits(
    run: Run,
    text: Annotated[list[str], typer.Option(help="Texts, as `farspan data` takes them.")],
    length: Annotated[int | None, typer.Option(help="Window; by default the training length, ≤ 2048.", min=2)] = None,
    text_bytes: Annotated[int, typer.Option(help="Cut each document to so many bytes.", min=1)] = 100_000,
    texts: Texts = 100,
) -> tuple[Rows, str]:
    """Bits per byte of raw text, in half-overlapping windows: comparable between models with different tokens.

    Example: `farspan eval bits models/smollm2-coca --text test.jsonl.xz --length 2048 --out bits.json`
    """
    from farspan.evaluation import evaluate_bits

    return run(evaluate_bits, text, length=length, text_bytes=text_bytes, texts=texts), (
        "length texts bytes tokens bits_per_byte"
    )


def _scalings(given: list[str] | None, ntk: float | None, model: Path) -> list[str]:
    """Return the names of scalings; --ntk leaves the model's log length as it is."""
    names = [name.strip() for part in given or [] for name in part.split(",")]
    if ntk is None:
        return names or ["own"]
    if names:
        fail("--ntk and --scaling exclude each other; give --scaling alone")
    from farspan.evaluation.evaluate import configuration

    return [f"dynamic_ntk-{ntk:g}" + "+log" * bool(configuration(model).log_length)]
