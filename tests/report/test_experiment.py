"""The shipped experiments have the papers' numbers, and a wrong one gives one line with its name."""

import tomllib

import pytest

from farspan.experiments import LENGTHS, load, load_all, make_experiment

GOOD = """
title = "T"
kind = "perplexity"
caption = "c"
train_length = 512
lengths = [512, 1024]
rows = [{ label = "RoFormer", variant = "rope", scaling = "dynamic_ntk-4", paper = [19.66, "OOM"] }]
"""


def test_the_papers_numbers_are_the_papers() -> None:
    assert {x.name for x in load(*LENGTHS)} == {"table1", "table2", "table3", "figure1", "figure4", "figure5"}
    papers = {x.name: {(r.kind, r.variant, r.scaling): r.paper for r in x.rows} for x in load_all()}
    assert papers["table1"]["", "rope", "none"] == [19.66, 411.5, 3276.0, 3026.0, 3028.0, "inf", "inf"]
    assert papers["table1"]["", "coca-slack", "dynamic_ntk-4"] == [20.11, 20.81, 25.88, 34.16, 55.75, 89.31, 101.13]
    assert papers["table1"]["", "coca-exact", "none"] == []
    assert papers["table2"]["", "alibi", "none"] == [0.82, 0.65, 0.28, 0.18, 0.12, "OOM", "OOM"]
    strict = papers["table3"]["passkey", "coca-strict", "dynamic_ntk-8"]
    assert strict == [1.0, 0.93, 0.65, 0.34, 0.10, 0.04, 0.01]
    assert papers["dropin"]["", "original", "dynamic_ntk-4"] == [7.30, 14.40, 133.87, 1.0, 0.03]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("caption =", "captoin =", "'captoin'; did you mean 'caption'"),
        ("label =", "lable =", "'lable'; did you mean 'label'"),
        ('"dynamic_ntk-4"', '"ntk-4"', "rows[0].scaling must be 'none', 'dynamic_ntk-2', 'dynamic_ntk-4'"),
        ('"perplexity"', '"ppl"', "kind must be 'perplexity', 'passkey'"),
        ('"OOM"', '"oom"', "got 'oom'"),
        (', "OOM"', "", "paper must have one value for each of the 2 columns, got 1"),
        ('title = "T"', "", "title must be given"),
    ],
)
def test_a_wrong_experiment_gives_one_line(old: str, new: str, message: str) -> None:
    assert make_experiment("right", tomllib.loads(GOOD)).rows[0].paper == [19.66, "OOM"]
    with pytest.raises(ValueError, match=r"^experiment wrong: ") as error:
        make_experiment("wrong", tomllib.loads(GOOD.replace(old, new)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
