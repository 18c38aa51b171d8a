"""The command line: each subcommand parses its arguments and makes one call.

It lives beside the package because importing `farspan` registers its model with transformers, which loads torch;
`farspan --help` must not wait for that.
"""

from farspan_cli.app import main

# The order in which `farspan --help` lists commands:
# isort: off
from farspan_cli import start, data, train, evaluate, convert, finetune, experiments, analyze, bench  # noqa: F401
# isort: on

__all__ = ["main"]
