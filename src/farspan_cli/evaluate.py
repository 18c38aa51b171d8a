"""`farspan eval`: perplexity, loss by position and retrieval of a trained model, minimal pairs and bits per byte."""

from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from farspan_cli.app import app, fail, whole_numbers
from farspan_cli.progress import Show, progress

if TYPE_CHECKING:
    import torch

    from farspan.data import TextTokenizer
    from farspan.modeling_farspan import FarspanForCausalLM

evaluate = typer.Typer(help="Measure a trained model past its training length.", no_args_is_help=True)
app.add_typer(evaluate, name="eval")

Model = Annotated[
    str,
    typer.Argument(
        help="A farspan folder, or anything `farspan convert` reads, with its tokenizer.", show_default=False
    ),
]
Ntk = Annotated[float | None, typer.Option(help="Dynamic NTK with this factor.", min=1)]
NtkMode = Annotated[str, typer.Option(help="per_query or per_request.")]
Yarn = Annotated[float | None, typer.Option(help="YaRN with this factor, untrained.", min=1)]
Scaling = Annotated[
    str, typer.Option(help="own: the law in the model's configuration, if it has one; none: without it.")
]
LogLength = Annotated[
    bool | None,
    typer.Option(
        help="Past the training length, let scores grow with the logarithm of the place; by default as the model does."
    ),
]


def _checked(out: Path | None) -> Path | None:
    """Where a result may and can be written: asked while options are read, so that nothing is measured in vain."""
    if out is not None:
        from farspan.results import check_out

        check_out(out)
    return out


Out = Annotated[
    Path | None,
    typer.Option(help="Write the result as JSON; replaces an earlier result of the same command.", callback=_checked),
]


@evaluate.command("ppl")
def ppl(
    model: Model,
    text: Annotated[list[str], typer.Option(help="Long texts; shorter documents than the longest window are skipped.")],
    lengths: Annotated[str, typer.Option(help="Window lengths, separated by commas.")] = "512,1024,2048",
    stride: Annotated[int, typer.Option(help="Tokens between windows.", min=1)] = 512,
    mode: Annotated[str, typer.Option(help="sliding, yarn, whole or disjoint.")] = "sliding",
    text_tokens: Annotated[int, typer.Option(help="Cut each document to so many tokens.", min=2)] = 32_768,
    texts: Annotated[int, typer.Option(help="At most so many documents.", min=1)] = 100,
    ntk: Ntk = None,
    ntk_mode: NtkMode = "per_query",
    yarn: Yarn = None,
    scaling: Scaling = "own",
    log_length: LogLength = None,
    out: Out = None,
) -> None:
    """Perplexity by window length, with the truncation control (same tokens, context cut to the training length).

    Documents of at least the training length are used, with the control; where there are none, those of at least the
    longest window, without it.

    Example: `farspan eval ppl runs/mine/model --text test.jsonl.xz --lengths 512,1024 --ntk 4 --out ppl.json`
    """
    from farspan.convert.text import text_tokenizer
    from farspan.errors import require_choice
    from farspan.evaluation import as_trained, perplexity, tokens_read
    from farspan.evaluation.windows import truncation_control

    wanted = whole_numbers(lengths)
    require_choice("--mode", mode, ("sliding", "yarn", "whole", "disjoint"))
    if max(wanted) > text_tokens:
        fail(f"--text-tokens must be at least the longest window {max(wanted)}, got {text_tokens}; raise it")
    loaded, law, of = _load(model, out, ntk, ntk_mode, yarn, scaling, log_length)
    needed, trained = max(*wanted, 2), loaded.config.train_length
    found = _long_texts(text, text_tokenizer(model), text_tokens, texts, needed, trained)
    if not found:
        fail(
            f"--text must hold documents of at least {needed} tokens, the longest of --lengths, got none that long in "
            f"{', '.join(text)}; use longer texts or shorter --lengths"
        )
    controlled = len(found[0]) >= trained
    tasks = [(length, stride, mode) for length in wanted]
    tasks += [truncation_control(trained)] if controlled else []
    rows: list[dict[str, Any]] = []
    with as_trained(loaded.device.type), progress(Console(stderr=True)) as show:
        for length, step, name in tasks:
            tell = _counter(show, tokens_read(found, length, step, name), f"{name} windows of {length:,} tokens")
            row = perplexity(loaded, found, length=length, stride=step, mode=name, progress=tell)
            rows.append({**row, "scaling": law})
    _show(rows, ("length", "stride", "mode", "tokens", "ppl"), law)
    if not controlled:
        cut = f": --text-tokens cuts them to {text_tokens:,}" if text_tokens < trained else ""
        print(f"without the truncation control, whose texts need the training length of {trained:,} tokens{cut}")
    _write(out, rows, of)


@evaluate.command("passkey")
def passkey_command(
    model: Model,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "512,1024,2048",
    cases: Annotated[int, typer.Option(help="Prompts a length.", min=1)] = 100,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate; the key must be among them.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of keys and depths.", min=0)] = 0,
    ntk: Ntk = None,
    ntk_mode: NtkMode = "per_query",
    yarn: Yarn = None,
    scaling: Scaling = "own",
    log_length: LogLength = None,
    out: Out = None,
) -> None:
    """Passkey retrieval by length, with Wilson intervals and the near/far split at the training length.

    Example: `farspan eval passkey runs/mine/model --lengths 512,1024 --cases 100 --ntk 4 --out passkey.json`
    """
    from farspan.convert.text import text_tokenizer
    from farspan.data.passkey import check_prompt
    from farspan.evaluation import as_trained, passkey

    wanted, tokenizer = whole_numbers(lengths), text_tokenizer(model)
    check_prompt(tokenizer, min(wanted), "--lengths")
    loaded, law, of = _load(model, out, ntk, ntk_mode, yarn, scaling, log_length)
    rows: list[dict[str, Any]] = []
    with as_trained(loaded.device.type), progress(Console(stderr=True)) as show:
        for length in wanted:
            tell = _counter(show, cases, f"passkey in {length:,} tokens")
            row = passkey(
                loaded, tokenizer, length=length, cases=cases, new_tokens=new_tokens, seed=seed, progress=tell
            )
            rows.append({**row, "scaling": law})
    _show(rows, ("length", "cases", "correct", "accuracy", "ci95"), law)
    _write(out, rows, of, seed)


@evaluate.command("positions")
def positions_command(
    model: Model,
    text: Annotated[
        list[str], typer.Option(help="Long documents; those no longer than the training length are skipped.")
    ],
    text_tokens: Annotated[int, typer.Option(help="Cut each document to so many tokens.", min=2)] = 131_072,
    texts: Annotated[int, typer.Option(help="At most so many documents.", min=1)] = 100,
    ntk: Ntk = None,
    ntk_mode: NtkMode = "per_query",
    yarn: Yarn = None,
    scaling: Scaling = "own",
    log_length: LogLength = None,
    out: Out = None,
) -> None:
    """Loss by position, and what the far context gains over one cut to the training length, on the same tokens.

    Example: `farspan eval positions runs/mine/model --text test.jsonl.xz --out positions.json`
    """
    from farspan.convert.text import text_tokenizer
    from farspan.evaluation import as_trained, loss_by_position

    loaded, law, of = _load(model, out, ntk, ntk_mode, yarn, scaling, log_length)
    needed = loaded.config.train_length + 1
    found = _long_texts(text, text_tokenizer(model), text_tokens, texts, needed, needed)
    if not found:
        fail(f"--text must hold documents of at least {needed} tokens, got none in {', '.join(text)}; use longer ones")
    with as_trained(loaded.device.type), progress(Console(stderr=True)) as show:
        tell = _counter(show, sum(map(len, found)), f"{len(found)} documents")
        rows = [{**row, "scaling": law} for row in loss_by_position(loaded, found, progress=tell)]
    _show(
        [{**row, "ppl": exp(min(row["nll"] / row["tokens"], 700.0))} for row in rows],
        ("start", "stop", "tokens", "ppl", "gain", "gain_ci95"),
        law,
    )
    _write(out, rows, of)


@evaluate.command("retrieval")
def retrieval_command(
    model: Model,
    tasks: Annotated[
        str, typer.Option(help="Names of tasks, separated by commas.")
    ] = "abcdigits,phonebook,niah_multikey_2",
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "512,1024,2048",
    cases: Annotated[int, typer.Option(help="Prompts per task and length.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.", min=0)] = 0,
    ntk: Ntk = None,
    ntk_mode: NtkMode = "per_query",
    yarn: Yarn = None,
    scaling: Scaling = "own",
    log_length: LogLength = None,
    out: Out = None,
) -> None:
    """Retrieval tasks by length and depth, with Wilson intervals: abcdigits, phonebook, passkey and RULER's
    niah_single_1, niah_multikey_2, niah_multikey_3, vt, fwe, cwe.

    Example: `farspan eval retrieval runs/mine/model --tasks abcdigits,vt --lengths 512,4096 --out retrieval.json`
    """
    import numpy as np

    from farspan.convert.text import text_tokenizer
    from farspan.data.retrieval import TASKS, retrieval_case
    from farspan.errors import require_choice
    from farspan.evaluation import as_trained, retrieval

    wanted, names, tokenizer = whole_numbers(lengths), tasks.split(","), text_tokenizer(model)
    for name in names:
        require_choice("--tasks", name, TASKS)
        for length in (min(wanted), max(wanted)):  # raises if a prompt cannot have this length
            retrieval_case(tokenizer, name, length, np.random.default_rng(seed), 0.5)
    loaded, law, of = _load(model, out, ntk, ntk_mode, yarn, scaling, log_length)
    rows: list[dict[str, Any]] = []
    with as_trained(loaded.device.type), progress(Console(stderr=True)) as show:
        for name in names:
            for length in wanted:
                tell = _counter(show, cases, f"{name} in {length:,} tokens")
                found = retrieval(loaded, tokenizer, task=name, length=length, cases=cases, seed=seed, progress=tell)
                rows += [{**row, "scaling": law} for row in found]
    _show([row for row in rows if row["depth"] is None], ("task", "length", "cases", "accuracy", "ci95", "recall"), law)
    _write(out, rows, of, seed)


@evaluate.command("pairs")
def pairs_command(
    model: Model,
    pairs: Annotated[list[Path], typer.Option(help="JSONL (.gz .xz .zst) with good, bad, set and field.")],
    out: Out = None,
) -> None:
    """Minimal pairs: how often the good sentence is the likelier, by phenomenon, with Wilson intervals.

    Example: `farspan eval pairs models/smollm2-coca --pairs blimp.jsonl.xz --out pairs.json`
    """
    from farspan.convert.text import text_tokenizer
    from farspan.evaluation import as_trained, minimal_pairs, read_pairs, start_token

    made = [pair for file in pairs for pair in read_pairs(file)]
    loaded, law, of = _load(model, out)
    tokenizer = text_tokenizer(model)
    with as_trained(loaded.device.type), progress(Console(stderr=True)) as show:
        tell = _counter(show, 2 * len(made), f"{len(made):,} pairs")
        rows = minimal_pairs(loaded, made, tokenizer.encode, start=start_token(loaded, tokenizer.end), progress=tell)
    rows = [{**row, "scaling": law} for row in rows]
    _show([row for row in rows if row["kind"] != "set"], ("kind", "field", "cases", "correct", "accuracy", "ci95"))
    _write(out, rows, of)


@evaluate.command("bits")
def bits_command(
    model: Model,
    text: Annotated[list[str], typer.Option(help="Texts, as `farspan data` takes them.")],
    length: Annotated[
        int | None, typer.Option(help="Window; by default the training length, or 2048 if that is less.", min=2)
    ] = None,
    text_bytes: Annotated[int, typer.Option(help="Cut each document to so many bytes.", min=1)] = 100_000,
    texts: Annotated[int, typer.Option(help="At most so many documents.", min=1)] = 100,
    out: Out = None,
) -> None:
    """Bits a byte of raw text, in half-overlapping windows: comparable between models with different tokens.

    Example: `farspan eval bits models/smollm2-coca --text test.jsonl.xz --length 2048 --out bits.json`
    """
    from itertools import islice

    from farspan.convert.text import text_tokenizer
    from farspan.data import documents
    from farspan.evaluation import as_trained, bits_per_byte, start_token
    from farspan.evaluation.bits import first_bytes

    found = [
        first_bytes(document.text, text_bytes)
        for document in islice((document for source in text for document in documents(source)), texts)
    ]
    loaded, law, of = _load(model, out)
    tokenizer, window = text_tokenizer(model), length or min(2048, loaded.config.train_length)
    start = start_token(loaded, tokenizer.end)
    with as_trained(loaded.device.type), progress(Console(stderr=True)) as show:
        tell = _counter(show, sum(len(one.encode()) for one in found), f"bytes of {len(found)} texts")
        row = bits_per_byte(loaded, found, tokenizer.encode, start=start, length=window, progress=tell)
    rows = [{**row, "scaling": law}]
    _show(rows, ("length", "texts", "bytes", "tokens", "bits_per_byte"))
    _write(out, rows, of)


def _long_texts(
    sources: list[str], tokenizer: "TextTokenizer", cut: int, most: int, needed: int, trained: int
) -> "list[torch.Tensor]":
    """At most so many documents, cut to so many tokens: those of the training length, else all that are long enough."""
    import torch

    from farspan.data import documents

    goal, long, short = max(needed, trained), list[torch.Tensor](), list[torch.Tensor]()
    for document in (document for source in sources for document in documents(source)):
        ids = tokenizer.encode(document.text)[:cut]
        if len(ids) >= goal:
            long.append(torch.tensor(ids))
        elif len(ids) >= needed and len(short) < most:
            short.append(torch.tensor(ids))
        if len(long) == most or (cut < goal and len(short) == most):
            break
    return long or short


def _counter(show: Show, total: int, text: str) -> Callable[[int], None]:
    """Turns "so many more" into a bar of its own."""
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        show(done, total, text, phase=text)

    show(0, total, text, phase=text)
    return more


def _load(
    path: str,
    out: Path | None,
    ntk: float | None = None,
    mode: str = "per_query",
    yarn: float | None = None,
    scaling: str = "own",
    log_length: bool | None = None,
) -> "tuple[FarspanForCausalLM, str, str | None]":
    """The model with its angles and scores as asked for, what their law is called, and for a file which model it is."""
    import torch

    from farspan.convert import from_pretrained
    from farspan.convert.fingerprint import fingerprint
    from farspan.convert.sources import open_source
    from farspan.errors import require_choice
    from farspan.evaluation.laws import law_of, scaling_name

    require_choice("--scaling", scaling, ("own", "none"))
    require_choice("--ntk-mode", mode, ("per_query", "per_request"))
    if ntk is not None and yarn is not None:
        fail(f"--yarn must be left out with --ntk, got {yarn:g} and {ntk:g}; choose one of them")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = from_pretrained(path, attention=None, dtype=torch.float32, device=device)
    own = model.config.rotary().scaling
    if own is not None and scaling == "none":
        model.set_rope_parameters(rope_type="default")
    elif own is not None and (ntk is not None or yarn is not None):
        option = "--ntk" if yarn is None else "--yarn"
        fail(
            f"{option} must be left out for a model with a law of its own, got one with {scaling_name(own)}; "
            "add --scaling none to put it in that law's place"
        )
    if yarn is not None:
        model.set_rope_parameters(rope_type="yarn", factor=yarn)
    elif ntk is not None:
        model.set_rope_parameters(rope_type="dynamic", factor=ntk, mode=mode)
    if log_length is not None or scaling == "none":
        model.set_log_length(bool(log_length))
    return model, law_of(model.config), None if out is None else fingerprint(open_source(Path(path)))


def _show(rows: list[dict[str, Any]], columns: tuple[str, ...], scaling: str | None = None) -> None:
    table = Table(*columns, title=f"scaling: {scaling}" if scaling else None)
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " … ".join(_cell(v) for v in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _write(out: Path | None, rows: list[dict[str, Any]], of: str | None, seed: int = 0) -> None:
    if out is not None:
        import torch

        from farspan.results import write_result

        write_result(out, rows, device="cuda" if torch.cuda.is_available() else "cpu", seed=seed, model=of)
        print(f"written: {out}")
