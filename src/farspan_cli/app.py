"""The application, what commands share, and how each fails: one line on stderr, exit 2, never a traceback."""

import math
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

UsageError: Any = typer.BadParameter.__base__  # typer carries its own click, and does not export the name

ORDER = [
    *("demo", "doctor", "data", "train", "eval", "report", "convert", "finetune", "generate", "export"),
    *("reproduce", "analyze", "bench", "launch-path", "tasks-path"),
]
"""Commands as `farspan --help` lists them: in the order in which a user meets them."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    name="farspan",
    cls=_Commands,
    help="Transformers that work far beyond the length they were trained on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "Storage size calculation overflowed")
"""What torch says when it cannot allocate; a size beyond int64 counts too."""


def main() -> None:
    """Entry point. Calling `app` itself would end at Ctrl-C without a word."""
    try:
        with typer.main.get_command(app).make_context("farspan", sys.argv[1:]) as context:
            sys.exit(context.command.invoke(context))
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except UsageError as error:
        if not error.format_message():  # a command without arguments: its help was shown
            sys.exit(2)
        command = error.ctx.command_path if error.ctx else "farspan"
        fail(f"{error.format_message().rstrip('.')}{_given(error)}; see '{command} --help'")
    except BrokenPipeError:  # of `farspan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tells of it at its end
        sys.exit(1)
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt as error:
        print(f"interrupted; {str(error) or 'give the same command again'}", file=sys.stderr)
        sys.exit(130)
    except RecursionError:
        fail("an input nests too deep to be read; correct it")
    except OverflowError as error:
        fail(f"a number is too large ({error}); give a smaller one")
    except (MemoryError, RuntimeError) as error:  # torch raises its own, or RuntimeError on a CPU
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        fail("out of memory; give shorter lengths, fewer rows at a time or a smaller model")


def _given(error: UsageError) -> str:
    """Say what an option was given, which pydantic's message does not."""
    cause = error.__cause__
    return f", got {cause.errors()[0]['input']}" if hasattr(cause, "errors") else ""


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with 2."""
    print(f"farspan: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _version(show: bool) -> None:
    if show:
        print(metadata.version("farspan"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Transformers that work far beyond the length they were trained on."""


# Options that several commands have


def sharing(shared: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Give a command the options of `shared`, which is called with the command, its own options bound."""
    _, *more = signature(shared).parameters.values()

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        _, *own = signature(command).parameters.values()

        def whole(**given: Any) -> None:
            shared(partial(command, **{one.name: given.pop(one.name) for one in own}), **given)

        parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*own, *more)]
        whole.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        whole.__annotations__ = {one.name: one.annotation for one in parameters}
        whole.__doc__ = command.__doc__
        return whole

    return decorate


LONGEST = 2**24
"""Most tokens of one sequence: more fit into no memory."""


def numbers(option: str, example: str, help: str) -> Any:
    """Make an option that reads "512,1024" as [512, 1024]."""

    def read(text: str) -> list[int]:
        try:
            found = [int(part) for part in text.split(",")]
        except ValueError:
            found = [0]
        if not 1 <= min(found) <= max(found) <= LONGEST:
            what = f"whole numbers from 1 to {LONGEST:,}, separated by commas"
            fail(f"{option} must be {what}, got {text!r}; try {option} {example}")
        return found

    return typer.Option(option, parser=read, metavar="N,N", help=help)


def weighted(text: str, option: str, kind: str, example: str) -> tuple[str, float]:
    """Read "books=0.75" as ("books", 0.75), and "books" as ("books", 1.0). `kind`: what the option calls a source."""
    source, sign, weight = text.rpartition("=")
    try:
        if 0 < float(weight if sign else 1) < math.inf:
            return (source, float(weight)) if sign else (text, 1.0)
    except ValueError:
        pass
    fail(f"{option} must be {kind} or {kind}=WEIGHT with a weight above 0, got {text!r}; try {example}")


Model = Annotated[
    Path, typer.Argument(help="A farspan folder, or anything `farspan convert` reads, with its tokenizer.")
]
Folder = Annotated[Path, typer.Option("--out", help="Folder for the model; new or empty.", show_default=False)]
RunFolder = Annotated[Path, typer.Option("--out", help="Folder of the run; the same command continues there.")]
Result = Annotated[Path | None, typer.Option("--out", help="Write the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing result.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn.", min=0, max=2**63 - 1)]
Texts = Annotated[int, typer.Option(help="At most so many documents.", min=1)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Default: the source's.")]


def torch_dtype(name: str | None) -> Any:
    """Return torch's dtype of that name; None for None."""
    import torch

    return getattr(torch, name) if name else None


def show_table(
    console: Console, headings: Iterable[str], rows: Iterable[Iterable[Any]], title: str | None = None
) -> None:
    """Print a table: numbers with three digits, intervals, and "–" for None."""
    table = Table(*(Column(heading, overflow="fold") for heading in headings), title=title)
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " … ".join(map(_cell, value))
    return f"{value:.3f}" if isinstance(value, float) else "–" if value is None else str(value)
