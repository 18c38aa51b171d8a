"""The application object, and how every command fails: one line on stderr, exit 2, never a traceback."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

UsageError: Any = typer.BadParameter.__base__  # typer carries its own click, and does not export the name


class InterruptedByUserError(Exception):
    """Ctrl-C, with what the command says about where it stopped."""


ORDER = [
    *("demo", "doctor", "data", "train", "eval", "report", "convert", "finetune", "generate", "export"),
    *("reproduce", "analyze", "bench", "launch-path", "tasks-path"),
]
"""Commands as `farspan --help` lists them: in the order in which a user meets them."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; typer itself would end it with status 130 and without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise InterruptedByUserError(str(error)) from error


app = typer.Typer(
    name="farspan",
    cls=_Commands,
    help="Transformers that work far beyond the length they were trained on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point."""
    try:
        sys.exit(app(prog_name="farspan", standalone_mode=False))
    except UsageError as error:
        if not error.format_message():  # a command without arguments: its help was shown
            sys.exit(2)
        command = error.ctx.command_path if error.ctx else "farspan"
        fail(f"{error.format_message().rstrip('.')}{_given(error)}; see '{command} --help'")
    except (ValueError, OSError) as error:
        fail(str(error))
    except (InterruptedByUserError, KeyboardInterrupt, typer.Abort) as error:
        print(f"interrupted; {str(error) or 'give the same command again'}", file=sys.stderr)
        sys.exit(130)
    except RecursionError:
        fail("an input nests too deep to be read; correct it")
    except OverflowError as error:
        fail(f"a number is too large ({error}); give a smaller one")
    except (MemoryError, RuntimeError) as error:  # torch raises its own, or RuntimeError on a CPU
        if not is_out_of_memory(error):
            raise
        fail("out of memory; give shorter lengths, fewer rows at a time or a smaller model")


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Return whether Python or torch could not allocate; a size beyond int64 counts too."""
    texts = "out of memory", "not enough memory", "can't allocate memory", "Storage size calculation overflowed"
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _given(error: UsageError) -> str:
    """Say what the option in question was given, where the message does not."""
    for name in getattr(getattr(error, "param", None), "opts", []):
        for word, after in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
            value = after if word == name else word.removeprefix(f"{name}=") if word.startswith(f"{name}=") else ""
            if value and repr(value) not in error.format_message():
                return f", got {value}"
    return ""


@contextmanager
def making(out: Path) -> Iterator[None]:
    """Make a Ctrl-C that comes after the model's folder is complete say so: the same command would raise for it."""
    config = out / "config.json"  # the last of its files to come
    before = config.exists()
    try:
        yield
    except KeyboardInterrupt as error:
        if before or not config.exists():
            raise
        raise KeyboardInterrupt(f"{out} is complete") from error


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


def whole_numbers(text: str, option: str = "--lengths", example: str = "2048,8192") -> list[int]:
    """Read "512,1024" as [512, 1024]."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        fail(f"{option} must be whole numbers ≥ 1 separated by commas, got {text!r}; try {option} {example}")
    return numbers


def weighted(text: str, option: str, kind: str, example: str) -> tuple[str, float]:
    """Read "books=0.75" as ("books", 0.75), and "books" as ("books", 1.0). `kind`: what the option calls a source."""
    source, sign, weight = text.rpartition("=")
    if not sign:
        return text, 1.0
    try:
        if 0 < float(weight) < math.inf:
            return source, float(weight)
    except ValueError:
        pass
    fail(f"{option} must be {kind} or {kind}=WEIGHT with a weight above 0, got {text!r}; try {example}")
