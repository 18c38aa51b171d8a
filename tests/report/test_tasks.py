"""Tables of tasks: every seed counts, ahead is said only where intervals do not touch, and bad rows are refused."""

from pathlib import Path
from typing import Any

import pytest

from farspan.report import write_report
from farspan.report.collect import collect
from farspan.report.task_table import load_task_tables
from farspan.report.tasks import measured, task_notes, task_table, task_verdicts
from tests.report.fabricate import fabricate, write


def row(task: str, variant: str, seed: int, **values: Any) -> dict[str, Any]:
    head = {"task": task, "variant": variant, "seed": seed, "length": 2000, "parameters": 800_000, "steps": 3000}
    speed = {"pretraining_steps": 0, "seconds": 60.0, "tokens_per_second": 1e6 + seed, "peak_bytes": None}
    return {**head, **speed, "losses": [[0, 2.3], [10, 2.0]], **values}


def results(folder: Path, right: dict[str, tuple[int, int]], ppl: dict[str, tuple[float, ...]]) -> Path:
    for variant, counts in right.items():
        for seed, correct in enumerate(counts):
            write(
                folder, f"task-listops-{variant}-s{seed}", [row("listops", variant, seed, cases=2000, correct=correct)]
            )
    for variant, values in ppl.items():
        for seed, value in enumerate(values):
            write(folder, f"task-lm-{variant}-s{seed}", [row("lm", variant, seed, ppl=value, tokens=1000)])
    return folder


RIGHT = {"rope": (740, 730), "cosformer": (700, 780), "cosformer-plain": (350, 360)}
PPL = {"rope": (20.0, 20.4, 20.1), "cosformer": (22.0, 22.2, 22.1), "cosformer-plain": (22.1, 23.0, 22.4)}


def test_seeds_are_pooled_and_the_paper_stands_beside(tmp_path: Path) -> None:
    run = collect(results(tmp_path, RIGHT, PPL))
    found = measured(run, "accuracy", "listops", "cosformer")
    assert found is not None
    assert (found.value, found.low, found.high, found.seeds, found.cases) == (0.37, 0.35, 0.39, 2, 4000)
    tables = {table.name: table for table in load_task_tables()}
    lra = task_table(run, tables["cosformer-lra"])
    assert lra is not None
    cells = {(line.label, line.source): [cell.text for cell in line.cells] for line in lra.lines}
    assert cells["cosFormer", "ours"] == ["0.3700", "—", "—"]
    assert cells["cosFormer", "paper"] == ["0.3650", "0.6770", "0.7196"]
    assert ("cosFormer without re-weighting", "paper") not in cells
    assert task_table(run, tables["cosformer-recall"]) is None
    assert task_table(run, tables["cosformer-memory"]) is None


def test_ahead_is_said_only_where_nothing_overlaps(tmp_path: Path) -> None:
    said = task_verdicts(collect(results(tmp_path, RIGHT, PPL)), load_task_tables())
    assert said == [
        "Perplexity: cosFormer 22.10, RoPE 20.17: worse; "
        "cosFormer 22.10, cosFormer without re-weighting 22.50: not told apart.",
        "ListOps: cosFormer 0.3700, RoPE 0.3675: not told apart; "
        "cosFormer 0.3700, cosFormer without re-weighting 0.1775: better.",
    ]


def test_linear_coca_is_held_against_cosformer(tmp_path: Path) -> None:
    run = collect(results(tmp_path, {"cosformer": (700, 780), "linear-coca": (300, 310)}, {}))
    said = task_verdicts(run, load_task_tables())
    assert said == ["ListOps: Linear CoCA (experimental) 0.1525, cosFormer 0.3700: worse."]
    (lra,) = (task_table(run, table) for table in load_task_tables() if table.name == "cosformer-lra")
    assert lra is not None
    assert [line.cells[0].text for line in lra.lines if line.label == "Linear CoCA (experimental)"] == ["0.1525"]


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_range_of_few_seeds_parts_nothing(seeds: int, tmp_path: Path) -> None:
    """However far apart: one seed is a point, and two points have no known luck."""
    ppl = {"rope": (20.0,) * seeds, "cosformer": (90.0, 91.0, 92.0)}
    (said,) = task_verdicts(collect(results(tmp_path, {}, ppl)), load_task_tables())
    assert said == f"Perplexity: cosFormer 91.00, RoPE 20.00: too few seeds to tell apart ({seeds} of at least 3)."


def test_seeds_that_disagree_settle_nothing(tmp_path: Path) -> None:
    """The pooled interval of 4000 cases is narrow, but one seed of each is on the other's side."""
    right = {"rope": (900, 600), "cosformer": (500, 700)}
    said = task_verdicts(collect(results(tmp_path, right, {})), load_task_tables())
    assert said == ["ListOps: cosFormer 0.3000, RoPE 0.3750: not told apart."]


def test_one_seed_is_called_luck(tmp_path: Path) -> None:
    write(tmp_path, "task-listops-rope-s0", [row("listops", "rope", 0, cases=10, correct=3)])
    assert any("One seed only (listops)" in note for note in task_notes(collect(tmp_path)))


def test_a_page_can_have_both_suites(tmp_path: Path) -> None:
    fabricate(tmp_path, variants=("rope", "coca-exact"), lengths=(512, 1024), cases=6)
    text = write_report(results(tmp_path, RIGHT, PPL)).read_text()
    assert "Table 1: perplexity beyond the training length" in text
    assert "cosFormer, Table 4: Long Range Arena" in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "correct must lie in 0 … cases, got None of None"),
        ({"cases": 10, "correct": 11}, "correct must lie in 0 … cases, got 11 of 10"),
        ({"cases": 10, "correct": 1, "seconds": None}, "seconds must be a number, got None"),
        ({"ppl": "low"}, "ppl must be a number, got 'low'"),
    ],
)
def test_rows_that_say_nothing_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "task-listops-rope-s0", [row("listops", "rope", 0, **values)])
    with pytest.raises(ValueError, match=message):
        collect(tmp_path)
