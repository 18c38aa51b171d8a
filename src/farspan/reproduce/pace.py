"""How long the rest of a reproduction takes, by what this call has seen of the same kinds of work."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from farspan.reproduce.step import Step


@dataclass(frozen=True)
class Left:
    """The time that is left, as far as it is known."""

    seconds: float
    whole: bool
    """Whether that is all; False while there are steps of a kind that this call has not seen."""


class Pace:
    """Remembers how long steps took. Kinds are not compared: a calibration says nothing about a training.

    >>> from pathlib import Path
    >>> train, test = Step("train", Path("a.json")), Step("ppl", Path("b.json"))
    >>> pace = Pace()
    >>> pace.add(train, 60.0)
    >>> pace.begin(test, [train, train]).left()
    Left(seconds=120.0, whole=False)
    """

    def __init__(self) -> None:
        self._took: dict[tuple[str, ...], list[float]] = {}

    def add(self, step: Step, seconds: float) -> None:
        """A step is done."""
        self._took.setdefault(step.alike, []).append(seconds)

    def begin(self, step: Step, others: Iterable[Step]) -> "Ahead":
        """A step begins, and these are to come."""
        kinds = [other.alike for other in others]
        rest = [self._usual(kind) for kind in kinds if kind != step.alike]
        return Ahead(self._usual(step.alike), kinds.count(step.alike), rest, phases=step.kind == "convert")

    def _usual(self, kind: tuple[str, ...]) -> float | None:
        return fmean(self._took[kind]) if kind in self._took else None


class Ahead:
    """One step that is being done, and those after it."""

    def __init__(self, usual: float | None, twins: int, rest: list[float | None], *, phases: bool) -> None:
        """`phases`: after weights are read there may be fitting to do, of which reading says nothing."""
        self._usual, self._twins, self._rest = usual, twins, rest
        self._phases_to_come = 2 if phases and usual is None else 0
        self._began = time.monotonic()
        self._first = self._last = (self._began, 1.0)

    @property
    def takes(self) -> float:
        """What the step has taken; where an earlier call began it, what it would have taken."""
        return max(self._elapsed, self._phase or 0.0)

    def left(self, part: float | None = None) -> Left | None:
        """What is left when so much of the step is done; None before anything is known."""
        if part is not None:
            news = (time.monotonic(), part)
            if part < self._last[1]:  # another phase: weights are read, now they are fitted
                self._phases_to_come -= 1
                self._first = news
            self._last = news
        each = self._phase if self._usual is None else self._usual
        steps = [self._own, *[each] * self._twins, *self._rest]
        known = [seconds for seconds in steps if seconds is not None]
        return Left(sum(known), len(known) == len(steps) and self._phases_to_come <= 0) if known else None

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def _phase(self) -> float | None:
        """What the phase takes from end to end, by its speed since the first news of it: loading goes before that."""
        (began, before), (now, part) = self._first, self._last
        return (now - began) / (part - before) if part > before else None

    @property
    def _own(self) -> float | None:
        """The rest of the step, by its own speed and by what such a step takes."""
        found = [] if self._usual is None else [max(0.0, self._usual - self._elapsed)]
        part = self._last[1]
        if self._phase is not None and part < 1:  # at 1 there is no news yet of the next phase, or of the end
            found.append(self._phase * (1 - part))
        return max(found, default=None)
