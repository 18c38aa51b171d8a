"""A drop-in study's table: what stands beside what, and which numbers are ratios."""

from pathlib import Path
from typing import Any

import pytest

from farspan.experiments import load
from farspan.report import write_report
from farspan.report.measured import study_tables
from farspan.report.results import collect
from farspan.reproduce import Preset
from tests.report.fabricate import passkey_row, ppl_row, shown, write

LONG = "Distilled, 4: and longer rows under dynamic NTK"


def model_row(name: str, attention: str, stages: int, length: int, **more: Any) -> dict[str, Any]:
    known = {"model": name, "attention": attention, "stages": stages, "train_length": length}
    return {**known, "tokens": 1_000_000 * stages, "seconds": 90.0, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The original with 8,192 positions, a model distilled with 2,048, one that the table does not know, and more."""
    long = "distill-long-4-long"
    models = [model_row("original", "rope", 0, 8192), model_row(long, "coca-exact", 3, 2048)]
    taught = {"passkey_share": 0.0, "retrieval_share": 0.05}
    models += [model_row(name, "coca-exact", 1, 2048, seconds=None, **taught) for name in ("mine", "unmeasured")]
    write(tmp_path, "models", [*models, model_row("a", "rope", 0, 2048, window=512)])
    ppl = [ppl_row("original", 0, "none", n, x) for n, x in ((2048, 30.0), (8192, 29.0), (32768, 400.0))]
    ppl += [ppl_row(long, 0, "none", n, x) for n, x in ((2048, 31.5), (8192, 34.0), (32768, 40.0))]
    ppl += [ppl_row("original", 0, "none", 8192, 28.5, "truncated"), ppl_row(long, 0, "none", 2048, 31.4, "truncated")]
    ppl += [ppl_row(long, 0, "ntk-4", 8192, 32.0), ppl_row(long, 0, "ntk-4", 32768, 33.075)]
    write(tmp_path, "ppl", [*ppl, ppl_row("original", 0, "ntk-4", 32768, 60.0)])
    write(tmp_path, "passkey", [passkey_row(long, 0, "ntk-4", 32768, [(100, True)] * 9 + [(30_000, False)])])
    bits = {"length": 8, "bytes": 9, "texts": 1}
    write(
        tmp_path, "bits", [{"variant": x, **bits, "bits_per_byte": b} for x, b in (("original", 1.1816), ("mine", 2))]
    )
    pairs = [
        {"kind": kind, "set": "", "field": kind, "cases": 200, "correct": n} for kind, n in (("all", 150), ("set", 7))
    ]
    write(tmp_path, "pairs", [{"variant": "original", **row} for row in pairs])
    held = {"original": 4096, "mine": 3072, "a": 1024}
    write(tmp_path, "cache", [{"variant": name, "length": 16, "bytes": size} for name, size in held.items()])
    return tmp_path


def test_each_scaling_stands_above_the_papers_and_dynamic_ntk_changes_nothing_inside_the_training_length(
    folder: Path,
) -> None:
    """Windows, their ratio, context cut, passkeys, pairs, bits, tokens, minutes; what was not measured is left out."""
    table, caches, stages = study_tables(collect(folder))
    assert table.columns[2] == "ppl at 32,768"
    skills = ("—", "—", "0.750", "1.182", "0", "—")
    none = ("—",) * 4
    assert shown(table) == [
        ("Original", "no scaling", "30.00", "29.00", "400.00", "×13.33", "28.50", *skills),
        ("Original", "dynamic NTK 4", "30.00", "29.00", "60.00", "×2.00", "28.50", "—", "—", *none),
        ("Original", "paper, no scaling", "7.30", "inf", "inf", "—", "—", "1.00", "0.09", *none),
        ("Original", "paper, dynamic NTK 4", "7.30", "14.40", "133.87", "×18.34", "—", "1.00", "0.03", *none),
        (LONG, "no scaling", "31.50", "34.00", "40.00", "×1.27", "31.40", "—", "—", "—", "—", "3,000,000", "1.5"),
        (LONG, "dynamic NTK 4", "31.50", "32.00", "33.08", "×1.05", "31.40", "—", "0.90", *none),
        ("mine", "no scaling", "—", "—", "—", "—", "—", "—", "—", "—", "2.000", "1,000,000", "—"),
    ]
    shares = {line[0]: line[-1] for line in caches.lines}
    assert shares == {"Original": "1.0000", "a": "0.2500", "mine": "0.7500"}  # the original's layers see everything
    assert shown(stages)[:2] == [(LONG, "", "3", "—", "—"), ("mine", "", "1", "0.0%", "5.0%")]


def test_a_study_has_a_page_of_its_own(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert "CoCA dropped into an existing model" in text
    assert "Table 1" not in text
    assert (folder / "report" / "tables" / "dropin.md").is_file()


def test_every_measured_model_of_the_shipped_studies_has_a_label() -> None:
    (experiment,) = load("study")
    labelled = {row.variant for row in experiment.rows}
    for name in ("dropin", "dropin-cpu"):
        assert set(Preset.load(name).models) <= labelled
