"""The page: offline, escaped, and one clear line where the files are not right."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from farspan.report import write_report
from farspan.report.results import collect
from farspan.report.tables import file_of
from farspan.results import write_result
from tests.command_line import called
from tests.report.fabricate import fabricate, passkey_row, position_rows, ppl_row, retrieval_rows, train_row, write

RESULTS = Path(__file__).parents[2] / "results"
HOSTILE = '"><i>mine</i> <script>alert(1)</script> $\\frac{$ [x](javascript:y)'

FOUND = passkey_row("rope", 0, "none", 512, [(3, True)])
PPL = ppl_row("rope", 0, "none", 512, 9.0)
POSITION = position_rows("rope")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a run in which everything that a user can name is hostile."""
    folder = fabricate(tmp_path_factory.mktemp("run"))
    steps = [{"step": "train <script>", "state": "failed", "message": "disk & memory"}, {"step": "b", "state": "done"}]
    (folder / "status.json").write_text(json.dumps(steps))
    write(folder, "ppl-odd", [ppl_row(HOSTILE, 0, HOSTILE, 512, 9.0)], command="farspan <b>x</b>", device="<u>")
    write(folder, "passkey-odd", [passkey_row(HOSTILE, 0, "none", 512, [(3, True)])])
    write(folder, "positions-odd", position_rows(HOSTILE))
    write(folder, "retrieval-odd", retrieval_rows(HOSTILE, task=HOSTILE))
    return write_report(folder)


def test_the_page_is_well_formed_and_asks_for_nothing_from_outside(page: Path) -> None:
    text = page.read_text()
    elements = list(ElementTree.fromstring(text.removeprefix("<!doctype html>")).iter())
    assert not {"script", "link", "iframe", "object"} & {element.tag for element in elements}
    for name in ("src", "href", "srcset", "poster"):
        assert all(element.get(name, "#").startswith(("#", "data:")) for element in elements)
    assert "url(http" not in text
    assert "@import" not in text
    identifiers = [element.get("id") for element in elements if element.get("id")]
    assert len(identifiers) == len(set(identifiers))


def test_texts_and_provenance_of_the_run_are_escaped_in_every_file(page: Path) -> None:
    text = page.read_text()
    for wanted in ("train &lt;script&gt;", "disk &amp; memory", "1 of 2 steps did not finish", "abc123", "torch 2.11"):
        assert wanted in text
    for absent in ("ALiBi", "not run", "CoCA strict"):  # what was not run is not shown
        assert absent not in text
    files = [page, *page.parent.rglob("*.md"), *page.parent.rglob("*.svg")]
    for path in files:
        for raw in ("<i>mine", "<b>x</b>", "<u>", "<script", *["[x]("] * (path.suffix == ".md")):
            assert raw not in path.read_text(), path.name


def test_tables_and_figures_are_written_beside_the_page(page: Path) -> None:
    tables, figures = ({path.name for path in (page.parent / name).iterdir()} for name in ("tables", "figures"))
    assert {"table1.md", "table3-passkey.md", "training.md", "positions.md"} <= tables
    retrieval = file_of("retrieval", HOSTILE, HOSTILE, "none")
    for name in ("perplexity-none", "passkey-dynamic_ntk-4", "distance-dynamic_ntk-4", retrieval, "loss", "positions"):
        assert f"{name}.svg" in figures
        assert (page.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_both_schemas_share_a_vocabulary(tmp_path: Path) -> None:
    """ "ntk-4" is dynamic in schema 1 and static since; a file's name says nothing about its kind."""
    write(tmp_path, "anything", [ppl_row("rope", 0, "ntk-4/per_query+log", 512, 20.0)])
    new = [ppl_row("rope", 0, scaling, 512, 30.0) for scaling in ("ntk-4", "dynamic_ntk-4", "linear-2")]
    write_result(tmp_path / "results" / "passkey.json", new, device="cpu", seed=0, kind="perplexity")
    write_result(tmp_path / "results" / "later.json", [{"x": 1}], device="cpu", seed=0, kind="of a later version")
    (tmp_path / "results" / "plan.json").write_text('{"steps": 3}')  # no result
    for name in ("layer-coca", "decode", "coca-kernels", "cosformer"):  # nor are benchmarks
        shutil.copy(RESULTS / f"{name}-h200.json", tmp_path / "results")
    run = collect(tmp_path)
    assert [source.file for source in run.sources] == ["anything.json", "passkey.json"]
    assert {row.scaling for row in run.of("perplexity")} == {"dynamic_ntk-4+log", "ntk-4", "dynamic_ntk-4", "linear-2"}
    text = write_report(tmp_path).read_text()
    for name in ("dynamic NTK 4, log length", "NTK 4", "PI 2"):
        assert name in text


def test_rows_of_farspan_eval_are_named_after_their_file(tmp_path: Path) -> None:
    for seed, ppl in enumerate((20.0, 22.0)):
        rows = [{**ppl_row("", 0, "none", n, ppl + n / 512)} for n in (512, 1024)]
        for row in rows:
            del row["variant"], row["seed"]
        write(tmp_path, f"ppl-hybrid-pope-s{seed}", rows)
    write_report(tmp_path)
    table = (tmp_path / "report" / "tables" / "measured-perplexity.md").read_text()
    assert "| Hybrid PoPE | no scaling (2 seeds, 4 texts, 1,000 tokens) | 22.00 (21.00–23.00) | 23.00" in table


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("ppl", PPL | {"ppl": float("nan")}, "ppl must be greater than 0, got nan"),
        ("ppl", PPL | {"length": 10**15}, "length must be less than or equal to 1099511627776, got 1000000000000000"),
        ("ppl", PPL | {"seed": "a"}, "seed must be a whole number, got 'a'"),
        ("ppl", {"ppl": 3.0}, "length must be given"),
        ("ppl", 3, "row 1 must be a JSON object, got '3'"),
        ("passkey", FOUND | {"correct": 2}, "correct must lie in 0 … cases, got 2 of 1"),
        ("passkey", FOUND | {"outcomes": [3]}, "outcomes.0 must be a valid dictionary"),
        ("positions", POSITION | {"gain": float("nan")}, "gain must be greater than -inf, got nan"),
    ],
)
def test_rows_that_make_no_sense_give_one_line(name: str, row: Any, message: str, tmp_path: Path) -> None:
    good = {"positions": POSITION, "passkey": FOUND, "ppl": PPL}[name]
    path = write(tmp_path, name, [good | {"variant": "a"}, row])
    error = error_of(tmp_path)
    assert error.startswith(f"farspan: {path} row 1")
    assert message in error
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a JSON file"),
        ("[" * 100_000, "must be a JSON file"),
        ('{"schema": 3, "rows": []}', "must be a result file of schema 1 or 2"),
        ('{"schema": 1, "rows": [{"ppl": 3.0}]}', "command must be given"),
    ],
    ids=["json", "deep", "schema", "provenance"],
)
def test_files_that_are_no_results_give_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ppl-a.json").write_text(text)
    assert message in error_of(tmp_path)


def error_of(folder: Path, *options: object) -> str:
    """Return the one line of a report that cannot be made."""
    status, _, error = called("report", folder, *options)
    assert (status, error.count("\n")) == (2, 1)
    return error


def test_measurements_that_contradict_each_other_are_not_shown(tmp_path: Path) -> None:
    for name, ppl in (("ppl-a", 9.0), ("ppl-b", 9.5)):
        write(tmp_path, name, [ppl_row("rope", 0, "none", 512, ppl)])
    said = (
        "ppl-b.json row 0: rope, 0, none, sliding, 512 was measured before with another outcome, in .*ppl-a.json row 0"
    )
    with pytest.raises(ValueError, match=said):
        collect(tmp_path)
    (tmp_path / "results" / "ppl-b.json").unlink()
    for length in (512, 1024):
        write(tmp_path, f"train-{length}", [train_row("rope", length, length)])
    with pytest.raises(ValueError, match="must hold one training length, got 1024, 512"):
        collect(tmp_path)


def test_seeds_are_spoken_of_where_there_are_several(tmp_path: Path) -> None:
    for seeds in ((0,), (0, 1)):
        folder = fabricate(tmp_path / str(len(seeds)), variants=("rope",), seeds=seeds)
        text = write_report(folder).read_text()
        assert [words in text for words in ("Bands: range over seeds", "One line per seed")] == [len(seeds) > 1] * 2


def test_a_perplexity_that_has_run_away_is_shown(tmp_path: Path) -> None:
    for name, ppl in (("rope", 1e300), ("coca-exact", float("inf")), ("alibi", 1e-320)):
        write(tmp_path, name, [ppl_row(name, 0, "none", n, 20.0) | {"ppl": ppl} for n in (512, 1024)])
    text = write_report(tmp_path).read_text()
    assert "<td>1.0e+300</td>" in text
    assert "<td>inf</td>" in text


@pytest.mark.parametrize(("of", "change"), [("model", {"kind": "odd"}), ("census", {"past_pi": {}})])
def test_an_analysis_that_is_not_complete_gives_one_line(of: str, change: dict[str, Any], tmp_path: Path) -> None:
    data = json.loads((RESULTS / "analysis" / "analysis-coca-exact.json").read_text())
    rows = [row | change if row["kind"] == of else row for row in data["rows"]]
    write(tmp_path, "analysis-x", rows, schema=2, kind="analysis")
    assert "a row of an analysis is not complete" in error_of(tmp_path)
    assert not (tmp_path / "report").exists()


def test_an_analysis_of_version_0_1_is_shown_without_what_was_removed(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in ("rope", "coca-slack"):  # they have rows of heads, of slack's parts, and of bounds
        shutil.copy(RESULTS / "analysis" / f"analysis-{name}.json", tmp_path / "results")
    page = write_report(tmp_path).read_text()
    assert set(re.findall('id="(look-[a-z]+)"', page)) == {"look-angles", "look-scores", "look-borders", "look-drift"}
    table = (tmp_path / "report" / "tables" / "analysis.md").read_text()
    assert "| RoPE | 47.7% | 39.2% | 48.0% | 31.6% | 39.5% | 0.48 → 0.70 | +2.15 | 512 | 16,384 |" in table
    assert "| CoCA slack | 0.0% |" in table


def test_a_run_that_has_only_failed_says_so(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('[{"step": "convert original", "state": "failed", "message": "no disk"}]')
    text = write_report(tmp_path).read_text()
    assert "no disk" in text
    assert "Table 1" not in text
    (tmp_path / "status.json").write_text('[{"step": "a", "state": "lost"}]')
    with pytest.raises(ValueError, match="state must be"):
        write_report(tmp_path)


def test_the_command_line_writes_the_page_and_says_what_it_needs(tmp_path: Path) -> None:
    assert error_of(tmp_path).startswith("farspan: folder must hold results/*.json, got ")
    write(tmp_path, "ppl", [PPL])
    for _ in range(2):  # drawn again
        status, out, error = called("report", tmp_path, "--out", tmp_path / "page")
        assert (status, error, out.strip()) == (0, "", f"written: {tmp_path / 'page' / 'index.html'}")
    assert (tmp_path / "page" / "index.html").read_text() == write_report(tmp_path).read_text()  # the same run
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "index.html").write_text("mine")
    assert "out must be a new folder or one with an earlier report" in error_of(tmp_path, "--out", tmp_path / "own")
    assert (tmp_path / "own" / "index.html").read_text() == "mine"
