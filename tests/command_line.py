"""`farspan` as a test calls it: in this process, or in one of its own."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from farspan_cli import main


def command(*arguments: object, before: str = "") -> list[str]:
    """What starts the command in a process of its own, after some Python."""
    code = f"{before}\nimport sys; sys.argv = ['farspan', *sys.argv[1:]]; from farspan_cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def farspan(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, when it has ended."""
    started = [sys.executable, "-m", "farspan_cli", *map(str, arguments)]
    return subprocess.run(started, capture_output=True, text=True, cwd=cwd)


def refusal(*arguments: object, cwd: Path) -> str:
    """The one line of a command that refuses its input: it exits with 2, and leaves an empty folder empty."""
    done = farspan(*arguments, cwd=cwd)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not list(cwd.iterdir())
    return done.stderr


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
