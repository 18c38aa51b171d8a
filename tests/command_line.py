"""`farspan` as a test calls it: in this process, or in one of its own."""

import io
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from farspan_cli import main
from tests.processes import Started


def program(before: str, *arguments: str) -> None:
    """Be the command, after some Python: this is what a process of its own runs."""
    exec(before, {})
    sys.argv = ["farspan", *arguments]
    main()


def started(*arguments: object, before: str = "", cwd: Path | None = None) -> Started:
    """The command in a process of its own, while it runs."""
    return Started(program, before, *map(str, arguments), cwd=cwd)


def farspan(*arguments: object, before: str = "", cwd: Path | None = None) -> CompletedProcess[str]:
    """The command in a process of its own, when it has ended."""
    with started(*arguments, before=before, cwd=cwd) as running:
        return running.wait()


def refusal(*arguments: object, cwd: Path) -> str:
    """The one line of a command that refuses its input: it exits with 2, and leaves an empty folder empty."""
    with chdir(cwd):
        status, _, err = called(*arguments)
    assert status == 2
    assert len(err.splitlines()) == 1
    assert not list(cwd.iterdir())
    return err


def called(*arguments: object) -> tuple[int, str, str]:
    """The command in this process: exit status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["farspan", *map(str, arguments)]),
        pytest.raises(SystemExit) as exit_,
    ):
        main()
    return int(exit_.value.code or 0), out.getvalue(), err.getvalue()
