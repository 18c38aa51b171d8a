"""Progress of the command line: silent at first, then the current phase with the time left."""

import pytest

from farspan_cli.progress import show_progress


def test_a_log_is_silent_at_first_and_then_has_a_state_of_each_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with show_progress() as progress:
        for seconds, done, phase in ((0, 1, "a"), (1, 2, "a"), (20, 5, "a"), (31, 6, "a"), (32, 0, "b"), (33, 3, "b")):
            now[0] = 100.0 + seconds
            progress(done, 10, f"at {seconds}", phase=phase)
    lines = capsys.readouterr().err.split("\n")
    assert lines.pop() == ""
    assert [(line[:4].strip(), line[line.index("left") :]) for line in lines] == [
        ("50%", "left) at 20"), ("60%", "left) at 31"),
    ]  # fmt: skip
    assert "00:20 (00:25 left)" in lines[0]  # four of the nine that were left
