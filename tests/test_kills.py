"""A few kills of each command; ``make kills`` makes hundreds."""

from pathlib import Path

import pytest

from tests.kills import COMMANDS, kill_and_compare, make_kill_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_kill_inputs(folder)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_writes_what_an_uninterrupted_one_does(name: str, inputs: Path) -> None:
    kills = {"train": 3, "finetune": 2, "convert": 4, "export": 4}.get(name, 1)
    outcome = kill_and_compare(COMMANDS[name].split(), inputs, seed=1, kills=kills)
    assert outcome.kills == kills
    assert outcome.good, outcome
