"""`farspan` as a test calls it: in this process, or in one of its own."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest

from farspan_cli import main


def command(*arguments: object, before: str = "") -> list[str]:
    """What starts the command in a process of its own, after some Python."""
    code = f"{before}\nimport sys; sys.argv = ['farspan', *sys.argv[1:]]; from farspan_cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


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
