"""Tables carry the right numbers: means over seeds, intervals, counts, the paper's values."""

import math
import re
from pathlib import Path
from typing import Any

from farspan.evaluation import conditions
from farspan.experiments import load_all
from farspan.report import measured
from farspan.report.results import collect, scaling_of
from farspan.report.tables import Table, perplexity_text, scaling_name, to_markdown
from farspan.utils import wilson
from tests.report.fabricate import (
    fabricate,
    passkey_row,
    position_rows,
    ppl_row,
    retrieval_rows,
    shown,
    small,
    train_row,
    write,
)

EXPERIMENTS = {experiment.name: experiment for experiment in load_all()}


def table1(folder: Path) -> Table:
    (table,) = measured.experiment_tables(collect(folder), EXPERIMENTS["table1"])
    return table


def test_a_cell_is_the_mean_over_seeds_with_their_range_beside_the_papers(tmp_path: Path) -> None:
    write(tmp_path, "ppl-a", [ppl_row("rope", 0, "none", 512, 20.0), ppl_row("rope", 0, "none", 1024, 300.0)])
    write(tmp_path, "ppl-b", [ppl_row("rope", 1, "none", 512, 21.0)])
    table = table1(tmp_path)
    assert table.columns == ("512", "1,024", "2,048", "4,096", "8,192", "16,384", "32,768")
    assert shown(table) == [  # what was not run is not shown
        ("RoPE, no scaling", "ours", "20.50", "300.00", *["—"] * 5),
        ("RoPE, no scaling", "paper", "19.66", "411.50", "3,276", "3,026", "3,028", "inf", "inf"),
    ]
    assert small(table.lines[0][2]) == "20.00–21.00"
    assert small(table.lines[0][1]) == "1–2 seeds, 4 texts, 1,000 tokens"


def test_accuracy_is_counted_over_all_cases_with_its_wilson_interval(tmp_path: Path) -> None:
    outcomes = [[(100, True)] * 8 + [(900, False)] * 2, [(100, True)] * 4 + [(900, False)] * 6]
    write(tmp_path, "passkey-a", [passkey_row("rope", s, "none", 1024, found) for s, found in enumerate(outcomes)])
    write(tmp_path, "train-a", [train_row("rope", 0)])
    run = collect(tmp_path)
    (table,) = measured.experiment_tables(run, EXPERIMENTS["table2"])
    low, high = wilson(12, 20)
    assert table.lines[0][3] == f"0.60\n95% {low:.2f}–{high:.2f}\nseeds 0.40–0.80"
    assert small(table.lines[0][1]) == "2 seeds, 20 cases"
    for ends, expected in (((0, 512), (1.0, 12)), ((512, math.inf), (0.0, 8))):
        found = run.passkey_between("rope", "none", *ends)
        assert (found.value, found.cases) == expected


def test_columns_are_aligned_by_multiples_of_the_training_length(tmp_path: Path) -> None:
    write(tmp_path, "train-a", [train_row("rope", 0, length=64)])
    write(tmp_path, "ppl-a", [ppl_row("rope", 0, "none", 64, 30.0), ppl_row("rope", 0, "none", 128, 60.0)])
    table = table1(tmp_path)
    assert table.columns[:3] == ("64 (paper 512)", "128 (paper 1,024)", "(paper 2,048)")
    assert [row[1:4] for row in shown(table)] == [("ours", "30.00", "60.00"), ("paper", "19.66", "411.50")]


def test_ntk_modes_are_separate_lines_and_per_query_is_the_default(tmp_path: Path) -> None:
    found = {"ntk-4/per_query": 22.0, "ntk-4/per_request": 25.0}
    write(tmp_path, "ppl-a", [ppl_row("rope", 0, name, 1024, ppl) for name, ppl in found.items()])
    table = measured.measured_table(collect(tmp_path), "perplexity")
    assert shown(table) == [("RoPE", "dynamic NTK 4", "22.00"), ("RoPE", "dynamic NTK 4 per request", "25.00")]
    assert shown(table1(tmp_path))[0][1:3] == ("ours", "22.00")


def test_the_control_stands_below_and_one_number_serves_all_lengths(tmp_path: Path) -> None:
    rows = [ppl_row("rope", 0, "none", n, 20.0 + n / 512) for n in (512, 1024)]
    cut = [ppl_row("rope", 0, "none", n, ppl, "truncated") for n, ppl in ((512, 19.0), (1024, 18.0))]
    for name, control in (("one", cut[:1]), ("two", cut)):
        write(tmp_path / name, "ppl-a", rows + control)
        table = measured.measured_table(collect(tmp_path / name), "perplexity")
        numbers = ("19.00", "19.00") if name == "one" else ("19.00", "18.00")
        assert shown(table)[1] == ("RoPE", "no scaling, context cut", *numbers)


def test_every_table_is_well_formed_in_markdown(tmp_path: Path) -> None:
    run = collect(fabricate(tmp_path, ("alibi", "rope", "coca-slack", "coca-strict")))
    made = {name: measured.experiment_tables(run, EXPERIMENTS[name]) for name in ("table1", "table2", "table3")}
    assert [table.name for table in made["table3"]] == ["table3-perplexity", "table3-passkey"]
    training = measured.training_table(run)
    assert shown(training)[0][-2:] == ("5.0%", "12.0%")
    for table in [training, *(table for each in made.values() for table in each)]:
        rows = [row for row in to_markdown(table).splitlines() if row.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
        assert len(rows) == len(table.lines) + 2


def test_the_loss_by_position_stands_above_what_the_far_context_gains(tmp_path: Path) -> None:
    write(tmp_path, "a", position_rows("rope"))
    one = measured.position_table(collect(tmp_path))
    write(tmp_path, "b", position_rows("rope", seed=1))
    two = measured.position_table(collect(tmp_path))
    assert one.columns == ("1–511", "512–1,023")
    losses = [("loss", "2.000", "1.000"), ("context cut", "2.000", "1.250"), ("gain", "+0.000", "+0.250")]
    assert [row[1:] for row in shown(one)] == losses
    assert small(one.lines[2][3]) == "95% +0.200 to +0.300"
    assert two.lines[2][3] == "+0.250"  # no interval of one seed stands for two


def test_retrieval_is_counted_over_all_depths_and_seeds(tmp_path: Path) -> None:
    write(tmp_path, "a", [*retrieval_rows("rope"), *retrieval_rows("rope", seed=1, right=1)])
    table = measured.retrieval_table(collect(tmp_path))
    assert table.columns == ("512", "1,024")
    assert table.lines[0][2].startswith("0.38\n")  # 4 and 2 of 8
    assert small(table.lines[0][1]) == "2 seeds, 16 cases"


def task(name: str, variant: str, seed: int, **values: Any) -> dict[str, Any]:
    head = {"task": name, "variant": variant, "seed": seed, "length": 2000, "parameters": 800_000, "steps": 3000}
    speed = {"pretraining_steps": 0, "seconds": 60.0, "tokens_per_second": 1e6 + seed, "peak_bytes": None}
    return {**head, **speed, "losses": [[0, 2.3], [10, 2.0]], **values}


def test_seeds_of_a_task_are_pooled_and_the_paper_stands_beside(tmp_path: Path) -> None:
    counts = {"rope": (740, 730), "cosformer": (700, 780), "cosformer-plain": (350, 360)}
    rows = [task("listops", v, seed, cases=2000, correct=n) for v, ns in counts.items() for seed, n in enumerate(ns)]
    rows.append(task("lm", "rope", 0, ppl=20.0, tokens=1000, peak_bytes=2_500_000_000))
    write(tmp_path, "tasks", rows)
    run = collect(tmp_path)
    found = measured.task_at(run, "accuracy", "listops", "cosformer")
    assert (found.value, found.low, found.high, found.seeds, found.cases) == (0.37, 0.35, 0.39, 2, 4000)
    lra = measured.task_table(run, EXPERIMENTS["cosformer-lra"])
    training = measured.task_training_table(run)
    assert shown(lra)[2:] == [
        ("cosFormer", "ours", "0.3700", "—", "—"),
        ("cosFormer", "paper", "0.3650", "0.6770", "0.7196"),
        ("cosFormer without re-weighting", "ours", "0.1775", "—", "—"),
    ]
    assert shown(training)[-1] == ("lm", "RoPE", "1", "800,000", "2,000", "0", "3,000", "1.0", "1,000,000", "2.5")
    assert measured.task_table(run, EXPERIMENTS["cosformer-recall"]) is None


def test_numbers_and_scalings_stay_readable() -> None:
    assert [perplexity_text(value) for value in (math.exp(700), math.inf, math.nan)] == ["1.0e+304", "inf", "nan"]
    for scaling, words in {
        "none+log": "no scaling, log length",
        "dynamic_ntk-2.5/per_request+log": "dynamic NTK 2.5 per request, log length",
        "linear-4": "PI 4",
        "llama3-8": "Llama 3 8",
        "mine": "mine",
    }.items():
        assert scaling_name(scaling) == words
    for name in conditions.NAMES.values():
        assert scaling_name(scaling_of(f"{name}-4", 1)) != f"{name}-4"
