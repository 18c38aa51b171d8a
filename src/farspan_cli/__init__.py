"""The command line: each subcommand parses its arguments and makes one call.

It lives beside the package because importing `farspan` registers its model with transformers, which loads torch;
`farspan --help` must not wait for that.
"""

from farspan_cli import analyze, bench, convert, data, evaluate, experiments, finetune, start, train  # noqa: F401
from farspan_cli.app import main

__all__ = ["main"]
