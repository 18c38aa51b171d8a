"""Work in several processes comes back in order, and is begun no sooner than it is wanted."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from farspan.pool import in_order


def slow_square(number: int) -> int:
    time.sleep(0.01 if number % 2 else 0.03)
    return number**2


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert list(in_order(slow_square, range(9), workers, remedy="")) == [number**2 for number in range(9)]
    assert list(in_order(slow_square, [], workers, remedy="")) == []


def test_items_are_taken_only_as_results_are_wanted() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = in_order(slow_square, items(), 2, remedy="")
    assert next(results) == 0
    assert len(taken) <= 2 * 2 + 1
    results.close()
    assert len(taken) <= 2 * 2 + 1


def killed_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_worker_that_dies_is_one_sentence_with_its_remedy() -> None:
    with pytest.raises(OSError, match=r"^workers must survive, got one of 2 that ended by itself, .*; try again$"):
        list(in_order(killed_at_three, range(9), 2, remedy="try again"))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_function_is_its_own(workers: int) -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda number: 1 / number, range(3), workers, remedy=""))
