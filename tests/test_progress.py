"""Progress of the command line: what a terminal is too narrow for is the text, not the time."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from farspan_cli.progress import show_progress


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_narrow_terminal_cuts_the_text_and_not_the_times(width: int) -> None:
    said = "stage-2-logits: step 1,000, loss 0.00052, 112,000 tokens/s"
    console = Console(force_terminal=True, width=width, file=(file := io.StringIO()))
    with show_progress(console) as show:
        show(0, 100, said)
        show(40, 100, said)
    line = Text.from_ansi(file.getvalue().replace("\r", "\n")).plain.splitlines()[-1].rstrip()
    assert len(line) <= width
    assert " 40% 0:00:00 left -:--:-- stage-2-logits: " in line
    assert line.endswith("tokens/s" if width == 140 else "…")


def test_a_log_is_silent_at_first_and_then_has_a_line_per_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("farspan_cli.progress.time.monotonic", lambda: now[0])
    with show_progress(Console(file=io.StringIO())) as progress:
        for seconds, done, phase in ((1, 0, "a"), (4, 1, "a"), (5, 2, "a"), (30, 5, "a"), (31, 0, "b")):
            now[0] = 100.0 + seconds
            progress(done, 10, f"at {seconds}", phase=phase)
    assert capsys.readouterr().err == " 10%  at 4  (0:00:27 left)\n 50%  at 30  (0:00:29 left)\n  0%  at 31\n"
