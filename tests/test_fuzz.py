"""A short run of the fuzzer; ``make fuzz`` runs thousands of cases."""

import os

import pytest

from tests.fuzz import fuzz_commands, fuzz_ops, undamaged_commands

SEED = int(os.environ.get("FARSPAN_FUZZ_SEED", "0"))


def test_each_command_succeeds_before_it_is_damaged() -> None:
    failed = [str(outcome) for outcome in undamaged_commands() if outcome.status or outcome.fault]
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("part", range(6))
def test_hostile_command_lines_end_in_one_line_and_leave_nothing(part: int) -> None:
    faults = [str(outcome) for outcome in fuzz_commands(50, 6 * SEED + part) if outcome.fault]
    assert not faults, "\n\n".join(faults)


def test_hostile_calls_of_ops_end_in_finite_numbers_or_one_line() -> None:
    faults = list(fuzz_ops(2000, SEED))
    assert not faults, "\n".join(faults)
