"""Attention alone against length: result files → multiples of ours, on the page and in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from farspan.benchmark import cosformer
from farspan.report import write_report
from farspan.report.speeds import load_speed_tables, speed_tables, speed_verdicts
from farspan.report.timings import Spread, parse_timings
from farspan.reproduce import Preset, reproduce
from farspan.results import write_result


def linear(length: int, softmax: float, fla: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "linear",
        "passes": "forward",
        "n": length,
        "d": 64,
        "milliseconds": {"triton": {"median": 0.5}, "fla": {"median": 0.5 * fla}},
        "speedup": {"flash softmax": {"median": softmax}, "fla": {"median": fla}},
        "memory_over_least": {"triton": 1.14, "fla": 2.0},
        **more,
    }


(COSFORMER,) = (table for table in load_speed_tables() if table.name == "cosformer-length")
ROWS = [{"kind": "check"}, linear(4096, 2.8, 3.75), linear(1024, 0.97, 3.9), linear(2048, 1.5, 4.1)]


def test_times_are_multiples_of_ours_in_order_of_length() -> None:
    (table,) = speed_tables(parse_timings(ROWS, Path("x")), COSFORMER)
    assert table.columns == ("1,024", "2,048", "4,096")
    lines = {line.label: [cell.text for cell in line.cells] for line in table.lines}
    assert lines["Softmax attention (SDPA, flash on a GPU)"] == ["0.97", "1.50", "2.80"]
    assert lines["flash-linear-attention"] == ["3.90", "4.10", "3.75"]
    assert lines["memory, cosFormer's over the least"] == ["1.14"] * 3
    assert "cosFormer in plain torch" not in lines  # was not in the run
    assert table.lines[0].cells[0].note == "0.50 ms"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ROWS, "faster than softmax attention from 2,048 tokens on, 3.8 to 4.1 times as fast"),
        ([*ROWS, linear(8192, 0.9, 1.0)], "never faster than softmax attention"),
    ],
)
def test_a_verdict_looks_at_every_longer_length(rows: list[dict[str, Any]], words: str) -> None:
    (verdict,) = speed_verdicts(parse_timings(rows, Path("x")))
    assert words in verdict


def test_time_and_memory_of_a_cpu_are_joined_by_length() -> None:
    rows = [
        {"kind": "length", "length": 64, "heads": 2, "head_dim": 8, "peak_bytes": 4 * 2 * 8 * 64 * 2},
        {"kind": "softmax", "length": 64, "heads": 2, "head_dim": 8, "speedup": 0.5},
    ]
    (timing,) = parse_timings(rows, Path("x"))
    assert timing.times == {"flash softmax": Spread.alone(0.5)}
    assert timing.memory == 5 / 4  # q, k, v and twice an output
    assert timing.unit == ""


def test_a_row_that_lacks_something_is_refused_with_its_file() -> None:
    with pytest.raises(ValueError, match=r"speed-x.json row 0 lacks 'speedup'; write it again"):
        parse_timings([{"kind": "softmax", "length": 3}], Path("speed-x.json"))


def test_a_reproduction_times_attention_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cosformer, "in_fresh_process", lambda function, *arguments: function(*arguments))
    preset = tmp_path / "preset.toml"
    task = "[tasks.listops]\nlength = 16\ngenerator = { max_length = 16, min_length = 3 }\n"
    preset.write_text(f"{task}[speed]\nlengths = [64, 128]\nrepeats = 1\n")
    page = reproduce(Preset.load(preset), tmp_path / "run", only=["speed"])
    result = json.loads((tmp_path / "run" / "results" / "speed-cosformer.json").read_text())
    assert {row["length"] for row in result["rows"] if row["kind"] == "softmax"} == {64, 128}
    html = page.read_text()
    assert "cosFormer against length" in html
    assert "Table 1" not in html
    assert [path.name for path in (page.parent / "figures").glob("*.png")] == ["cosformer-length-forward-width-64.png"]
    assert write_report(tmp_path / "run") == page


def test_two_runs_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in ("cpu", "gpu"):
        write_result(tmp_path / "results" / f"speed-{name}.json", ROWS, device=name, seed=0)
    with pytest.raises(ValueError, match=r"one speed-\*.json, got speed-cpu.json, speed-gpu.json"):
        write_report(tmp_path)
