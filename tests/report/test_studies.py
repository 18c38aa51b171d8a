"""A drop-in study's table: what stands beside what, and which numbers are ratios."""

from pathlib import Path
from typing import Any

import pytest

from farspan.experiments import load
from farspan.report import write_report
from farspan.report.measured import study_tables
from farspan.report.results import collect
from farspan.reproduce import Preset
from tests.report.fabricate import passkey_row, ppl_row, write

RESULTS = Path(__file__).parents[2] / "results"
LONG = "Distilled, 4: and longer rows under dynamic NTK"


def model_row(name: str, attention: str, stages: int, length: int, **more: Any) -> dict[str, Any]:
    known = {"model": name, "attention": attention, "stages": stages, "train_length": length}
    return {**known, "tokens": 1_000_000 * stages, "seconds": 90.0, "own_scaling": "none", "passkey_share": 0.0, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "model-original", [model_row("original", "rope", 0, 8192)])
    tuned = model_row("distill-long-4-long", "coca-exact", 3, 2048, own_scaling="ntk-4", passkey_share=0.05)
    write(tmp_path, "model-distill-long-4-long", [tuned])
    write(tmp_path, "model-mine", [model_row("mine", "coca-exact", 1, 2048, seconds=None)])
    write(tmp_path, "model-unmeasured", [model_row("unmeasured", "coca-exact", 1, 2048)])
    values = {"original": (30.0, 29.0, 400.0, 28.5), "distill-long-4-long": (31.5, 34.0, 40.0, 31.4)}
    for name, (near, middle, far, cut) in values.items():
        length = 8192 if name == "original" else 2048
        rows = [ppl_row(name, 0, "none", 2048, near), ppl_row(name, 0, "none", length, cut, "truncated")]
        write(tmp_path, f"ppl-near-{name}", rows)
        write(tmp_path, f"ppl-far-{name}", [ppl_row(name, 0, "none", n, p) for n, p in ((8192, middle), (32768, far))])
    write(tmp_path, "ppl-far-original-ntk-4", [ppl_row("original", 0, "ntk-4", 32768, 60.0)])
    scaled = [ppl_row("distill-long-4-long", 0, "ntk-4", n, p) for n, p in ((8192, 32.0), (32768, 33.075))]
    write(tmp_path, "ppl-far-distill-long-4-long-ntk-4", scaled)
    found = [(100, True)] * 9 + [(30_000, False)]
    write(tmp_path, "passkey-long", [passkey_row("distill-long-4-long", 0, "ntk-4", 32768, found, 2048)])
    bits = {"scaling": "none", "length": 8, "bytes": 9, "texts": 1}
    write(
        tmp_path, "bits", [{"variant": x, **bits, "bits_per_byte": b} for x, b in (("original", 1.1816), ("mine", 2))]
    )
    pairs = [
        {"variant": "original", "scaling": "none", "kind": kind, "set": "", "field": name, "cases": 200, "correct": n}
        for kind, name, n in (("all", "", 150), ("field", "syntax", 7))
    ]
    write(tmp_path, "pairs-original", pairs)
    for name, held in (("original", 4096), ("mine", 3072)):
        write(tmp_path, f"cache-{name}", [{"variant": name, "length": 16, "bytes": held}])
    return tmp_path


def line(folder: Path, label: str, source: str) -> list[str]:
    table = study_tables(collect(folder))[0]
    return [cell.text for cell in next(x for x in table.lines if (x.label, x.source) == (label, source)).cells]


def test_a_line_has_windows_their_ratio_the_control_and_skills(folder: Path) -> None:
    expected = ["30.00", "29.00", "400.00", "×13.33", "28.50", "—", "—", "0.750", "1.182", "0", "—"]
    assert line(folder, "Original", "no scaling") == expected
    scaled = ["31.50", "32.00", "33.08", "×1.05", "31.40", "—", "0.90", "—", "—", "—", "—"]
    assert line(folder, LONG, "dynamic NTK 4") == scaled
    assert line(folder, LONG, "no scaling")[-2:] == ["3M", "1.5"]


def test_dynamic_ntk_changes_nothing_inside_the_models_own_training_length(folder: Path) -> None:
    assert line(folder, "Original", "dynamic NTK 4")[:3] == ["30.00", "29.00", "60.00"]
    assert line(folder, LONG, "dynamic NTK 4")[1] != line(folder, LONG, "no scaling")[1]


def test_the_paper_stands_beside_its_counterpart_with_its_own_ratio(folder: Path) -> None:
    assert line(folder, "Original", "paper, no scaling")[:5] == ["7.30", "inf", "inf", "—", "—"]
    assert line(folder, "Original", "paper, dynamic NTK 4")[3:7] == ["×18.34", "—", "1.00", "0.03"]


def test_a_model_that_the_table_does_not_know_is_last_and_an_unmeasured_one_is_left_out(folder: Path) -> None:
    table = study_tables(collect(folder))[0]
    assert table.lines[-1].label == "mine"
    assert table.columns[2] == "ppl at 32,768"


def test_caches_are_shares_of_the_originals_whose_layers_see_everything(folder: Path) -> None:
    write(folder, "model-a", [model_row("a", "rope", 0, 2048, window=512)])  # before the original by name
    write(folder, "cache-a", [{"variant": "a", "length": 16, "bytes": 1024}])
    table = study_tables(collect(folder))[1]
    shares = {one.label: one.cells[-1].text for one in table.lines}
    assert shares == {"Original": "1.0000", "a": "0.2500", "mine": "0.7500"}


def test_a_study_has_a_page_of_its_own(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert "CoCA dropped into an existing model" in text
    assert "Table 1" not in text
    assert (folder / "report" / "tables" / "dropin.tex").is_file()


def test_every_measured_model_of_the_shipped_studies_has_a_label() -> None:
    (experiment,) = load("study")
    labelled = {row.variant for row in experiment.rows}
    for name in ("dropin", "dropin-cpu"):
        assert set(Preset.load(name).models) <= labelled


def test_a_benchmark_of_the_model_is_no_model_of_the_study(folder: Path) -> None:
    made = collect(folder)
    for name in ("model-h200", "pairs-h200", "train-h200"):
        (folder / "results" / f"{name}.json").write_text((RESULTS / "model-h200.json").read_text())
    assert collect(folder) == made
