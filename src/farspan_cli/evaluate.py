"""`farspan eval`: perplexity, loss by position and retrieval of a trained model, minimal pairs and bits per byte."""

import os
import sys
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from farspan_cli.app import app, fail, whole_numbers
from farspan_cli.progress import show_progress

evaluate = typer.Typer(help="Measure a trained model past its training length.", no_args_is_help=True)
app.add_typer(evaluate, name="eval")

MODEL = "A farspan folder, or anything `farspan convert` reads, with its tokenizer."
Model = Annotated[str, typer.Argument(help=MODEL, show_default=False)]
Scaling = Annotated[
    list[str] | None,
    typer.Option(
        help="own (as configured, the default), none, dynamic_ntk-F, ntk-F (static), yarn-F or linear-F with a factor "
        "F, each also with +log; several by commas, or repeat."
    ),
]
Ntk = Annotated[float | None, typer.Option(help="Old name of --scaling dynamic_ntk-F.", min=1)]
Yarn = Annotated[float | None, typer.Option(help="Old name of --scaling yarn-F.", min=1, hidden=True)]
LogLength = Annotated[bool, typer.Option("--log-length", help="Old name of +log behind a scaling.", hidden=True)]
Out = Annotated[Path | None, typer.Option(help="Write the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing result.")]
Text = Annotated[list[str], typer.Option(help="Long documents, as `farspan data` takes them; short ones are skipped.")]
TextTokens = Annotated[int, typer.Option(help="Cut each document to so many tokens.", min=2)]
Texts = Annotated[int, typer.Option(help="At most so many documents.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of the prompts.", min=0)]
Cases = Annotated[int, typer.Option(help="Prompts per length.", min=1)]
Lengths = Annotated[str, typer.Option(help="Lengths in tokens, separated by commas.")]


@evaluate.command("ppl")
def ppl(
    model: Model,
    text: Text,
    lengths: Lengths = "512,1024,2048",
    stride: Annotated[int, typer.Option(help="Tokens between windows.", min=1)] = 512,
    text_tokens: TextTokens = 32_768,
    texts: Texts = 100,
    scaling: Scaling = None,
    ntk: Ntk = None,
    yarn: Yarn = None,
    log_length: LogLength = False,
    out: Out = None,
    force: Force = False,
) -> None:
    """Perplexity by window length, with the truncation control (same tokens, context cut to the training length).

    Example: `farspan eval ppl runs/mine/model --text test.jsonl.xz --lengths 512,1024 --scaling none,dynamic_ntk-4`
    """
    from farspan.evaluation import evaluate_perplexity as measure

    options: dict[str, Any] = {"stride": stride, "texts": texts, "text_tokens": text_tokens, "force": force}
    options |= {"lengths": whole_numbers(lengths), "scalings": _scalings(scaling, model, ntk, yarn, log_length)}
    rows = _run(measure, model, text, out, **options)
    _show(rows, ("scaling", "length", "stride", "mode", "tokens", "ppl"), out)
    if _is_main() and not any(row["mode"] == "truncated" for row in rows):
        print("without the truncation control, whose texts need the training length")


@evaluate.command("passkey")
def passkey(
    model: Model,
    lengths: Lengths = "512,1024,2048",
    cases: Cases = 100,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate; the key must be among them.", min=1)] = 64,
    seed: Seed = 0,
    scaling: Scaling = None,
    ntk: Ntk = None,
    yarn: Yarn = None,
    log_length: LogLength = False,
    out: Out = None,
    force: Force = False,
) -> None:
    """Passkey retrieval by length, with Wilson intervals and the near/far split at the training length.

    Example: `farspan eval passkey runs/mine/model --lengths 512,1024 --cases 100 --out passkey.json`
    """
    from farspan.evaluation import evaluate_passkey as measure

    options: dict[str, Any] = {"cases": cases, "new_tokens": new_tokens, "seed": seed, "force": force}
    options |= {"lengths": whole_numbers(lengths), "scalings": _scalings(scaling, model, ntk, yarn, log_length)}
    rows = _run(measure, model, out, **options)
    _show(rows, ("scaling", "length", "cases", "correct", "accuracy", "ci95"), out)


@evaluate.command("positions")
def positions(
    model: Model,
    text: Text,
    text_tokens: TextTokens = 131_072,
    texts: Texts = 100,
    scaling: Scaling = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Loss by position, and what the far context gains over one cut to the training length, on the same tokens.

    Example: `farspan eval positions runs/mine/model --text test.jsonl.xz --out positions.json`
    """
    from farspan.evaluation import evaluate_positions as measure

    options: dict[str, Any] = {"texts": texts, "text_tokens": text_tokens, "force": force}
    rows = _run(measure, model, text, out, scalings=_scalings(scaling), **options)
    shown = [{**row, "ppl": exp(min(row["nll"] / row["tokens"], 700.0))} for row in rows]
    _show(shown, ("scaling", "start", "stop", "tokens", "ppl", "gain", "gain_ci95"), out)


@evaluate.command("retrieval")
def retrieval(
    model: Model,
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = "abcdigits,phonebook,niah_multikey_2",
    lengths: Lengths = "512,1024,2048",
    cases: Cases = 100,
    seed: Seed = 0,
    scaling: Scaling = None,
    out: Out = None,
    force: Force = False,
) -> None:
    """Retrieval tasks by length and depth, with Wilson intervals: abcdigits, phonebook, passkey and RULER's
    niah_single_1, niah_multikey_2, niah_multikey_3, vt, fwe, cwe.

    Example: `farspan eval retrieval runs/mine/model --tasks abcdigits,vt --lengths 512,4096 --out retrieval.json`
    """
    from farspan.evaluation import evaluate_retrieval as measure

    options: dict[str, Any] = {"lengths": whole_numbers(lengths), "cases": cases, "seed": seed, "force": force}
    rows = _run(measure, model, out, tasks=tasks.split(","), scalings=_scalings(scaling), **options)
    everywhere = [row for row in rows if row["depth"] is None]
    _show(everywhere, ("scaling", "task", "length", "cases", "accuracy", "ci95", "recall"), out)


@evaluate.command("pairs")
def pairs_command(
    model: Model,
    pairs: Annotated[list[Path], typer.Option(help="JSONL (.gz .xz .zst) with good, bad, set and field.")],
    out: Out = None,
    force: Force = False,
) -> None:
    """Minimal pairs: how often the good sentence is the likelier, by phenomenon, with Wilson intervals.

    Example: `farspan eval pairs models/smollm2-coca --pairs blimp.jsonl.xz --out pairs.json`
    """
    from farspan.evaluation import evaluate_pairs as measure

    rows = _run(measure, model, pairs, out, force=force)
    shown = [row for row in rows if row["kind"] != "set"]
    _show(shown, ("kind", "field", "cases", "correct", "accuracy", "ci95"), out)


@evaluate.command("bits")
def bits(
    model: Model,
    text: Annotated[list[str], typer.Option(help="Texts, as `farspan data` takes them.")],
    length: Annotated[int | None, typer.Option(help="Window; by default the training length, ≤ 2048.", min=2)] = None,
    text_bytes: Annotated[int, typer.Option(help="Cut each document to so many bytes.", min=1)] = 100_000,
    texts: Texts = 100,
    out: Out = None,
    force: Force = False,
) -> None:
    """Bits per byte of raw text, in half-overlapping windows: comparable between models with different tokens.

    Example: `farspan eval bits models/smollm2-coca --text test.jsonl.xz --length 2048 --out bits.json`
    """
    from farspan.evaluation import evaluate_bits as measure

    rows = _run(measure, model, text, out, length=length, text_bytes=text_bytes, texts=texts, force=force)
    _show(rows, ("length", "texts", "bytes", "tokens", "bits_per_byte"), out)


def _is_main() -> bool:
    """Return whether this process shows progress and prints, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _run(function: Callable[..., list[dict[str, Any]]], *arguments: Any, **options: Any) -> list[dict[str, Any]]:
    if not _is_main():
        return function(*arguments, **options)
    with show_progress(Console(stderr=True)) as progress:
        return function(*arguments, progress=progress, **options)


def _scalings(
    given: list[str] | None,
    model: str = "",
    ntk: float | None = None,
    yarn: float | None = None,
    log_length: bool = False,
) -> list[str]:
    """Return the names of scalings; options of version 0.1 become the name of what they meant, with a note."""
    names = [name.strip() for part in given or [] for name in part.split(",")]
    factors = {"dynamic_ntk": ntk, "yarn": yarn}
    old = [f"{name}-{factor:g}" for name, factor in factors.items() if factor is not None]
    if not old and not log_length:
        return names or ["own"]
    from farspan.evaluation import scaling_name
    from farspan.evaluation.evaluate import configuration

    if len(names) + len(old) > 1 or (names and log_length):
        fail(f"--ntk, --yarn, --log-length and --scaling {','.join(names)} exclude each other; give --scaling alone")
    config = configuration(model)
    name = (old or [scaling_name(config.rotary().scaling)])[0] + "+log" * bool(log_length or config.log_length)
    if _is_main():
        print(f"note: this is --scaling {name} from version 0.2 on", file=sys.stderr)
    return [name]


def _show(rows: list[dict[str, Any]], columns: tuple[str, ...], out: Path | None) -> None:
    if not _is_main():
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    Console().print(table)
    if out is not None:
        print(f"written: {out}")


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " … ".join(_cell(one) for one in value)
    return f"{value:.3f}" if isinstance(value, float) else "–" if value is None else str(value)
