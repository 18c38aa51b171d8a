"""A drop-in study's table: what stands beside what, which numbers are ratios, and what is said of them."""

from pathlib import Path
from typing import Any

import pytest

from farspan.report import write_report
from farspan.report.collect import collect
from farspan.report.studies import cache_table, study_notes, study_table, study_verdicts
from farspan.report.study_table import load_study_table, parse_study_table
from farspan.reproduce import Preset
from tests.report.fabricate import passkey_row, ppl_row, write


def model_row(name: str, attention: str, stages: int, length: int, **more: Any) -> dict[str, Any]:
    known = {"model": name, "attention": attention, "stages": stages, "train_length": length}
    return {**known, "tokens": 1_000_000 * stages, "seconds": 90.0, "own_scaling": "none", "passkey_share": 0.0, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "model-original", [model_row("original", "rope", 0, 8192)])
    tuned = model_row("distill-long-4-long", "coca-exact", 3, 2048, own_scaling="ntk-4", passkey_share=0.05)
    write(tmp_path, "model-distill-long-4-long", [tuned])
    write(tmp_path, "model-mine", [model_row("mine", "coca-exact", 1, 2048, seconds=None)])
    values = {"original": (30.0, 29.0, 400.0, 28.5), "distill-long-4-long": (31.5, 34.0, 40.0, 31.4)}
    for name, (near, middle, far, cut) in values.items():
        length = 8192 if name == "original" else 2048
        rows = [ppl_row(name, 0, "none", 2048, near), ppl_row(name, 0, "none", length, cut, "truncated")]
        write(tmp_path, f"ppl-near-{name}-none", rows)
        write(
            tmp_path,
            f"ppl-far-{name}-none",
            [ppl_row(name, 0, "none", n, p) for n, p in ((8192, middle), (32768, far))],
        )
    write(tmp_path, "ppl-far-original-ntk-4", [ppl_row("original", 0, "ntk-4", 32768, 60.0)])
    scaled = [ppl_row("distill-long-4-long", 0, "ntk-4", n, p) for n, p in ((8192, 32.0), (32768, 33.075))]
    write(tmp_path, "ppl-far-distill-long-4-long-ntk-4", scaled)
    found = [(100, True)] * 9 + [(30_000, False)]
    rows = [passkey_row("distill-long-4-long", 0, "ntk-4", 32768, found, 2048)]
    write(tmp_path, "passkey-distill-long-4-long-ntk-4", rows)
    write(
        tmp_path,
        "bits-original",
        [{"variant": "original", "scaling": "none", "bits_per_byte": 1.1816, "length": 8, "bytes": 9, "texts": 1}],
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
    table = study_table(collect(folder), load_study_table())
    found = next(one for one in table.lines if (one.label, one.source) == (label, source))
    return [cell.text for cell in found.cells]


LONG = "Distilled, 4: and longer rows under dynamic NTK"


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


def test_a_model_that_the_table_does_not_know_is_shown_last(folder: Path) -> None:
    table = study_table(collect(folder), load_study_table())
    assert [one.label for one in table.lines][-1] == "mine"
    assert table.lines[-1].counts == "not run"
    assert table.columns[2] == "ppl at 32,768"


def test_the_headline_names_cost_and_reach(folder: Path) -> None:
    said = study_verdicts(collect(folder), load_study_table())
    assert said[0].startswith(
        f"{LONG} (3M tokens): perplexity 31.50 at 2,048, +5.0% against the original's; with dynamic"
    )
    assert "×1.05 of that at 32,768; passkey there 0.90 (95% 0.60–0.98)" in said[0]
    assert "The paper: perplexity +13.3%" in said[1]
    assert "×1.69 of that at 32,768; passkey there 0.30" in said[1]
    assert said[2].startswith("The original was not fine-tuned on the same text")
    write(folder, "model-control-3-all", [model_row("control-3-all", "rope", 3, 2048)])
    write(folder, "ppl-near-control-3-all-none", [ppl_row("control-3-all", 0, "none", 2048, 27.0)])
    said = study_verdicts(collect(folder), load_study_table())
    assert said[2].startswith("Original, fine-tuned on the text (control) (3M tokens): perplexity 27.00 at 2,048;")
    for law, keys, value in (("ntk-4", 6, 30.0), ("ntk-4+log", 9, 28.0)):
        found = [(30_000, True)] * keys + [(30_000, False)] * (10 - keys)
        write(folder, f"passkey-control-3-all-{law}", [passkey_row("control-3-all", 0, law, 32768, found, 2048)])
        write(folder, f"ppl-far-control-3-all-{law}", [ppl_row("control-3-all", 0, law, 32768, value)])
    said = study_verdicts(collect(folder), load_study_table())
    assert "at 2,048; with dynamic NTK 4 ×1.11 of that at 32,768; passkey there 0.60 (95% 0.31–0.83), with" in said[2]
    assert "with log length 0.90 (95% 0.60–0.98); what a CoCA model gains" in said[2]


def test_a_layout_that_needs_no_law_is_in_the_headline_and_is_no_control(folder: Path) -> None:
    for name, attention in (("distill-local-3-text", "coca-exact"), ("control-local-3-text", "rope")):
        write(folder, f"model-{name}", [model_row(name, attention, 3, 2048, window=512)])
        write(folder, f"ppl-near-{name}-none", [ppl_row(name, 0, "none", 2048, 32.0)])
        write(folder, f"ppl-far-{name}-none", [ppl_row(name, 0, "none", 32768, 32.0)])
        found = [(30_000, True)] * 10
        write(folder, f"passkey-{name}-none", [passkey_row(name, 0, "none", 32768, found, 2048)])
    said = study_verdicts(collect(folder), load_study_table())
    assert said[0].startswith("Three of four layers local")
    assert "with no scaling ×1.00 of that at 32,768; passkey there 1.00" in said[0]
    assert said[1].startswith("RoPE in that layout")
    assert any(one.startswith("The original was not fine-tuned on the same text") for one in said)
    write(folder, "model-a", [model_row("a", "rope", 0, 2048, window=512)])  # before the original by name
    write(folder, "cache-a", [{"variant": "a", "length": 16, "bytes": 1024}])
    table = cache_table(collect(folder), load_study_table())
    assert table is not None
    assert ("Original", "1.0000") in [(one.label, one.cells[-1].text) for one in table.lines]


def test_notes_say_who_saw_passkeys_and_who_has_a_law_of_its_own(folder: Path) -> None:
    said = " ".join(study_notes(collect(folder)))
    assert "Passkey texts were among the training rows of distill-long-4-long (5%), and of no other model" in said
    assert "takes away: distill-long-4-long (dynamic NTK 4)" in said


def test_a_cache_is_given_as_a_share_of_the_original_s(folder: Path) -> None:
    table = cache_table(collect(folder), load_study_table())
    assert table is not None
    assert [(one.label, one.cells[-1].text) for one in table.lines] == [("Original", "1.0000"), ("mine", "0.7500")]


def test_the_page_is_about_the_study_alone(folder: Path) -> None:
    text = write_report(folder).read_text()
    assert "<h1>CoCA dropped into an existing model</h1>" in text
    assert "Table 1: perplexity beyond the training length" not in text
    assert "sampled queries" not in text  # a note about `farspan analyze`
    assert (folder / "report" / "tables" / "dropin.tex").is_file()


def test_a_study_without_a_model_yet_says_so(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('[{"step": "convert original", "state": "failed", "message": "no disk"}]')
    text = write_report(tmp_path).read_text()
    assert "No task is finished yet." in text
    assert "no disk" in text
    assert "Table 1" not in text


def test_every_measured_model_of_the_shipped_studies_has_a_label() -> None:
    labelled = {row.model for row in load_study_table().rows}
    for name in ("dropin", "dropin-cpu"):
        assert {m.name for m in Preset.load(name).study.members.values() if m.measures} == labelled


def test_a_benchmark_of_the_model_is_no_model_of_the_study(folder: Path) -> None:
    made = collect(folder)
    benchmark = Path(__file__).parents[2] / "results" / "model-h200.json"  # of `farspan bench model`
    for name in ("model-h200", "pairs-h200", "train-h200"):
        (folder / "results" / f"{name}.json").write_text(benchmark.read_text())
    assert collect(folder) == made


def test_a_folder_with_nothing_but_a_benchmark_of_the_model_says_what_a_report_needs(tmp_path: Path) -> None:
    write(tmp_path, "model-350m", [{"kind": "training", "attention": "rope"}])
    with pytest.raises(ValueError, match=r"results must hold ppl-, passkey-, .* run `farspan reproduce` first"):
        collect(tmp_path)


def test_bad_files_are_refused_by_name(folder: Path) -> None:
    row = {"variant": "mine", "scaling": "none", "kind": "all", "set": "", "field": "", "cases": 2, "correct": 3}
    write(folder, "pairs-mine", [row])
    with pytest.raises(ValueError, match=r"pairs-mine.json row 0: correct must lie in 0 … cases, got 3 of 2"):
        collect(folder)
    write(folder, "model-mine", [{"attention": "rope"}])
    with pytest.raises(ValueError, match=r"model-mine.json row 0: model must be given; a row has model, attention"):
        collect(folder)
    text = 'title = "t"\nkind = "study"\ntrain_length = 4\nwindows = [1]\nprompts = [1]\n'
    text += '[[rows]]\nlabel = "a"\nmodel = "b"\n'
    assert parse_study_table("x", text + "paper = { none = [1.0, 0.5] }").rows[0].paper == {"none": [1.0, 0.5]}
    with pytest.raises(ValueError, match=r"experiment x: paper.none must have .* each of the 2 windows and prompts"):
        parse_study_table("x", text + "paper = { none = [1.0] }")
