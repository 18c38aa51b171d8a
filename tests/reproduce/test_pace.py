"""The time left is estimated within a kind of work: a slow kind says nothing about a fast one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import farspan_cli
from farspan.reproduce.pace import Left, Pace
from farspan.reproduce.step import Step
from farspan.reproduce.study_work import StudyWork
from tests.reproduce.checkpoints import made

CONVERT, COPY, TRAIN = (Step("convert", Path(), like=like) for like in ("calibrated", "copied", ""))
SECONDS = {"calibrated": 600.0, "attention": 20.0, "logits": 20.0, "text": 20.0, "long": 20.0}
"""What pretended steps take; all others a second."""


class Clock:
    """Time that passes only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_nothing_is_said_before_the_second_news_of_a_kind(clock: Clock) -> None:
    ahead = Pace().begin(CONVERT, [TRAIN])
    assert ahead.left() is None
    clock.now = 300.0  # compiling
    assert ahead.left(0.1) is None
    clock.now = 310.0
    assert ahead.left(0.2) == Left(pytest.approx(80.0), whole=False)


def test_a_phase_is_not_averaged_with_the_one_before(clock: Clock) -> None:
    ahead = Pace().begin(CONVERT, [])
    for clock.now, part in ((1.0, 0.5), (2.0, 1.0)):
        ahead.left(part)
    assert ahead.left(1.0) is None  # weights are read, and nothing is known of the fitting
    for clock.now, part in ((20.0, 0.25), (30.0, 0.5)):
        left = ahead.left(part)
    assert left == Left(pytest.approx(20.0), whole=True)


def test_what_is_read_first_is_not_taken_for_the_whole(clock: Clock) -> None:
    ahead = Pace().begin(CONVERT, [])
    for clock.now, part in ((1.0, 0.25), (2.0, 0.5)):
        left = ahead.left(part)
    assert left == Left(pytest.approx(2.0), whole=False)  # fitting may follow


def test_a_step_speaks_for_those_alike_and_for_no_others(clock: Clock) -> None:
    pace = Pace()
    ahead = pace.begin(CONVERT, [CONVERT, COPY, COPY])
    ahead.left(0.0)
    clock.now = 50.0
    assert ahead.left(0.5) == Left(150.0, whole=False)
    pace.add(CONVERT, 100.0)
    pace.add(COPY, 2.0)
    assert pace.begin(COPY, [CONVERT, COPY]).left() == Left(104.0, whole=True)


def test_a_step_that_an_earlier_call_began_counts_in_full(clock: Clock) -> None:
    ahead = Pace().begin(TRAIN, [])
    ahead.left(0.8)
    clock.now = 10.0
    ahead.left(0.9)
    assert ahead.takes == pytest.approx(100.0)


@pytest.fixture
def study(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[tuple[int, str]]]:
    """Runs a study whose steps only pretend; the seconds left that it has shown, and the "+" after each."""

    def pretend(self: StudyWork, step: Step) -> None:
        for tenth in range(1, 11):
            clock.now += SECONDS.get(step.like, 1.0) / 10
            self.say("working", tenth / 10)
        step.result.parent.mkdir(exist_ok=True)
        step.result.write_text("{}")

    monkeypatch.setattr(StudyWork, "do", pretend)
    monkeypatch.setattr("farspan.report.write_report", lambda folder: folder / "index.html")
    command = ["farspan", "reproduce", "--preset", str(made(tmp_path)), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", command)

    def run() -> list[tuple[int, str]]:
        with pytest.raises(SystemExit) as ended:
            farspan_cli.main()
        assert not ended.value.code
        said = re.findall(r"(\d+):(\d+):(\d+)(\+?) left", capsys.readouterr().err)
        return [(int(h) * 3600 + int(m) * 60 + int(s), more) for h, m, s, more in said]

    return run


def test_a_slow_calibration_does_not_make_a_short_study_seem_long(study: Any, clock: Clock) -> None:
    said = study()
    assert len(said) >= 10
    assert max(seconds for seconds, _ in said) <= clock.now
    assert said[0][1] == "+"  # trainings and measurements are to come, of which nothing is known
    assert said[-1][1] == ""


def test_what_an_earlier_call_has_done_is_not_to_come(study: Any, tmp_path: Path) -> None:
    study()
    next((tmp_path / "out" / "results").glob("model-*-1-*.json")).unlink()  # a training, before finished measurements
    said = study()
    assert said
    assert all(more == "" for _, more in said)
