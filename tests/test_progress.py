"""Progress of the command line: what a terminal is too narrow for is the text, not the time."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from farspan_cli.progress import progress


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_narrow_terminal_cuts_the_text_and_not_the_times(width: int) -> None:
    said = "stage-2-logits: step 1,000, loss 0.00052, 112,000 tokens/s"
    console = Console(force_terminal=True, width=width, file=(file := io.StringIO()))
    with progress(console) as show:
        show(0, 100, said)
        show(40, 100, said)
    line = Text.from_ansi(file.getvalue().replace("\r", "\n")).plain.splitlines()[-1].rstrip()
    assert len(line) <= width
    assert " 40% 0:00:00 left -:--:-- stage-2-logits: " in line
    assert line.endswith("tokens/s" if width == 140 else "…")


@pytest.mark.parametrize(("left", "shown"), [("0:12:00+", "left 0:12:00+ convert"), ("", "left -:--:-- convert")])
def test_what_the_caller_knows_of_the_time_left_is_shown_as_it_is(left: str, shown: str) -> None:
    console = Console(force_terminal=True, width=80, file=(file := io.StringIO()))
    with progress(console) as show:
        for done in (0.0, 0.2, 0.4):
            show(done, 1.0, "convert", left=left)
    assert shown in Text.from_ansi(file.getvalue().replace("\r", "\n")).plain.splitlines()[-1]
