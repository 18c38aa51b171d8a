"""The shipped experiments parse, and a wrong one is refused by name."""

import pytest

from farspan.report.experiment import KINDS, load_experiments, parse_experiment

GOOD = """
title = "T"
kind = "perplexity"
caption = "c"
train_length = 512
lengths = [512, 1024]
rows = [{ label = "RoFormer", variant = "rope", scaling = "ntk-4", paper = [19.66, "OOM"] }]
"""


def test_every_shipped_experiment_parses_and_says_where_its_numbers_are_from() -> None:
    experiments = {experiment.name: experiment for experiment in load_experiments()}
    assert set(experiments) == {"table1", "table2", "table3", "figure1", "figure4", "figure5"}
    assert {experiment.kind for experiment in experiments.values()} == set(KINDS)
    for experiment in experiments.values():
        assert experiment.rows
        assert "paper" in experiment.caption


def test_the_papers_numbers_are_the_papers() -> None:
    experiments = {experiment.name: experiment for experiment in load_experiments()}
    table1 = {(row.variant, row.scaling): row.paper for row in experiments["table1"].rows}
    assert table1["rope", "none"] == (19.66, 411.5, 3276.0, 3026.0, 3028.0, "inf", "inf")
    assert table1["coca-slack", "ntk-4"] == (20.11, 20.81, 25.88, 34.16, 55.75, 89.31, 101.13)
    assert table1["coca-exact", "none"] == ()
    table2 = {(row.variant, row.scaling): row.paper for row in experiments["table2"].rows}
    assert table2["alibi", "none"] == (0.82, 0.65, 0.28, 0.18, 0.12, "OOM", "OOM")
    strict = {
        row.scaling: row.paper for row in experiments["table3"].rows_of("passkey") if row.variant == "coca-strict"
    }
    assert strict["ntk-8"] == (1.0, 0.93, 0.65, 0.34, 0.10, 0.04, 0.01)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("caption =", "captoin =", "'captoin'; did you mean 'caption'"),
        ("label =", "lable =", "'lable'; did you mean 'label'"),
        ('"rope"', '"ropee"', "'ropee'; did you mean 'rope'"),
        ('"ntk-4"', '"ntk-5"', "scaling must be one of"),
        ('"perplexity"', '"ppl"', "kind must be one of"),
        ('"OOM"', '"oom"', "paper must hold numbers, 'OOM' or 'inf', got 'oom'"),
        (', "OOM"', "", "paper must have one value for each of the 2 lengths, got 1"),
        ("train_length = 512", "", "train_length must be given"),
        ('title = "T"', "title = ", "experiment wrong"),
    ],
)
def test_a_wrong_experiment_is_refused_by_name(old: str, new: str, message: str) -> None:
    assert parse_experiment("right", GOOD).rows[0].paper == (19.66, "OOM")
    with pytest.raises(ValueError, match="experiment wrong") as error:
        parse_experiment("wrong", GOOD.replace(old, new))
    assert message in str(error.value)
