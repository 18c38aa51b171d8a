"""The page: offline, escaped, honest, and refused where the files are not right."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import farspan_cli
from farspan.report import load_experiments, write_report
from farspan.report.collect import collect
from farspan.report.summary import notes, summary
from tests.command_line import called
from tests.report.fabricate import GROWTH, fabricate, passkey_row, ppl_row, train_row, write

SMALL = {"variants": ("rope", "coca-exact"), "lengths": (512, 1024), "cases": 6}


class Tags(HTMLParser):
    """Collects every tag with its attributes, and checks that block elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img", "link"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fabricate(tmp_path_factory.mktemp("run"), **SMALL)  # type: ignore[arg-type]
    steps = [{"step": "train <script>", "state": "failed", "message": "disk & memory"}, {"step": "b", "state": "done"}]
    (folder / "status.json").write_text(json.dumps(steps))
    write(folder, "ppl-odd", [ppl_row("<i>mine</i>", 0, "none", 512, 9.0)], command="farspan <b>x</b>", device="<u>")
    write(folder, "passkey-odd", [passkey_row('"><i>mine</i>', 0, "none", 512, [(3, True)], 512)])
    return write_report(folder)


def test_the_page_asks_for_nothing_from_outside(page: Path) -> None:
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.stack == []
    for tag, attributes in tags.seen:
        assert tag not in ("script", "link", "iframe", "object")
        for name in ("src", "href", "xlink:href", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert "url(http" not in text
    assert "@import" not in text
    identifiers = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_texts_from_the_run_are_escaped(page: Path) -> None:
    text = page.read_text()
    for raw in ("<script>", "<i>mine", "<b>x</b>", "<u>"):
        assert raw not in text
    assert "train &lt;script&gt;" in text
    assert "disk &amp; memory" in text
    assert "1 of 2 steps did not finish" in text


def test_tables_and_figures_are_written_beside_the_page(page: Path) -> None:
    assert page.name == "index.html"
    tables, figures = ({path.name for path in (page.parent / name).iterdir()} for name in ("tables", "figures"))
    assert {"table1.md", "table1.tex", "table3-passkey.tex", "control.md", "training.md"} <= tables
    for name in ("perplexity-none", "passkey-ntk-4", "figure4-far", "figure5-ntk-4", "depth-rope-none", "loss"):
        assert {f"{name}.png", f"{name}.svg"} <= figures
    for path in (page.parent / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_provenance_and_notes_are_on_the_page(page: Path) -> None:
    text = page.read_text()
    for wanted in ("abc123", "CPU, 2 cores", "torch 2.11", "farspan reproduce --out run"):
        assert wanted in text
    assert "5.0% of the training text, the same for every variant" in text
    assert "Not run, Table 1: ALiBi; " in text
    assert "the paper goes to ×64" in text


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    folder = fabricate(tmp_path, variants=("rope",), seeds=(0,), laws=("none",), lengths=(512, 1024), cases=4)
    first, second = (write_report(folder, tmp_path / name).read_text() for name in ("a", "b"))
    assert first == second


def test_the_verdict_says_when_coca_is_better(tmp_path: Path) -> None:
    said = summary(collect(fabricate(tmp_path, lengths=(512, 1024, 2048), cases=100)))
    assert said[0].startswith("Without scaling, past the training length of 512 RoPE's perplexity rises ×9.03")
    assert "CoCA exact's rises ×1.82 (20.05 → 36.53)" in said[0]
    assert "Holds up better than RoPE here: CoCA exact, CoCA slack and CoCA strict." in said[0]
    (passkey,) = (text for text in said if text.startswith("Without scaling, passkey"))
    assert re.search(r"CoCA exact 0\.\d\d \(95% [^)]*\), finds more keys", passkey)
    assert any("no variant gains from the longer context" in text for text in said)


def test_the_verdict_says_when_coca_is_worse(tmp_path: Path) -> None:
    growth = {**GROWTH, "rope": 0.2, "coca-exact": 1.5}
    said = summary(collect(fabricate(tmp_path, growth=growth, lengths=(512, 1024, 2048), cases=100)))
    assert "Not better than RoPE here: CoCA exact" in said[0]
    assert "Holds up better" not in said[0]
    (passkey,) = (text for text in said if text.startswith("Without scaling, passkey"))
    assert re.search(r"CoCA exact 0\.\d\d \(95% [^)]*\), finds fewer keys: not better", passkey)


@pytest.mark.parametrize(
    ("rope", "coca", "verdict"),
    [
        ((10.0, 20.0), (30.0, 40.0), "Grows less but does not end lower, not better"),
        ((20.0, 40.0), (10.0, 30.0), "Ends lower but does not grow less, not better"),
        ((20.0, float("inf")), (20.0, 30.0), "Holds up better than RoPE here: CoCA exact."),
        ((20.0, float("nan")), (20.0, 30.0), "Not a number, so that nothing can be said: CoCA exact."),
    ],
)
def test_the_verdict_needs_both_less_growth_and_a_lower_end(
    tmp_path: Path, rope: tuple[float, float], coca: tuple[float, float], verdict: str
) -> None:
    for name, values in (("rope", rope), ("coca-exact", coca)):
        rows = [ppl_row(name, 0, "none", n, 20.0) | {"ppl": ppl} for n, ppl in zip((512, 1024), values, strict=True)]
        write(tmp_path, f"ppl-{name}", rows)
    said = summary(collect(tmp_path))
    assert verdict in said[0]
    assert said[-1].startswith("One seed only")


def test_overlapping_seeds_are_not_called_settled(tmp_path: Path) -> None:
    for name, last in (("rope", (40.0, 60.0)), ("coca-exact", (30.0, 50.0))):
        rows = [ppl_row(name, seed, "none", 512, 20.0) for seed in (0, 1)]
        write(tmp_path, f"ppl-{name}", rows + [ppl_row(name, seed, "none", 1024, ppl) for seed, ppl in enumerate(last)])
    assert "(not settled, the seeds' ranges overlap): CoCA exact" in summary(collect(tmp_path))[0]


def test_a_run_without_anything_to_compare_says_so(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('[{"step": "train", "state": "failed", "message": "no data"}]')
    run = collect(tmp_path)
    assert summary(run) == [
        "RoPE and CoCA were not both measured past the training length: this run compares nothing yet."
    ]
    assert notes(run, load_experiments())
    assert "no data" in write_report(tmp_path).read_text()


BAD = {
    "not json": ("{", "must be a JSON file"),
    "a list": ("[]", "must be a result file of schema 1"),
    "another schema": ('{"schema": 2, "rows": []}', "must be a result file of schema 1"),
    "no provenance": ('{"schema": 1, "rows": []}', "command must be given"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    path = write(tmp_path, "ppl-bad", [])
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        collect(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("prefix", "row", "message"),
    [
        ("ppl", {"ppl": "high"}, "ppl must be a number, got 'high'"),
        ("ppl", {"length": 0}, "length must be at least 1, got 0"),
        ("ppl", {"seed": True}, "seed must be a whole number, got True"),
        ("ppl", {"variant": None}, "variant must be a text, got None"),
        ("passkey", {"correct": 9}, "correct must lie in 0 … cases, got 9 of 1"),
        ("passkey", {"near": 3}, "must be a JSON object, got 3"),
        ("passkey", {"outcomes": [{"distance": 3}]}, "right must be given"),
        ("train", {"losses": [1]}, "losses must be a list of [step, loss], got [1]"),
    ],
)
def test_a_malformed_row_is_refused_by_file_and_field(
    tmp_path: Path, prefix: str, row: dict[str, object], message: str
) -> None:
    good = {
        "ppl": ppl_row("rope", 0, "none", 512, 20.0),
        "passkey": passkey_row("rope", 0, "none", 512, [(3, True)], 512),
        "train": train_row("rope", 0),
    }
    path = write(tmp_path, f"{prefix}-bad", [good[prefix]])
    collect(tmp_path)
    write(tmp_path, f"{prefix}-bad", [good[prefix] | row])
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        collect(tmp_path)
    assert str(error.value).startswith(f"{path} row 0: ")


def test_the_same_measurement_twice_and_two_training_lengths_are_refused(tmp_path: Path) -> None:
    for name in ("ppl-a", "ppl-b"):
        write(tmp_path / "twice", name, [ppl_row("rope", 0, "none", 512, 20.0)])
    with pytest.raises(ValueError, match=r"ppl-b\.json row 0 must be the only one .* got another in ppl-a\.json"):
        collect(tmp_path / "twice")
    write(tmp_path / "two", "train-a", [train_row("rope", 0, 512), train_row("coca-exact", 0, 64)])
    with pytest.raises(ValueError, match=r"length must be the same for every variant, got \[64, 512\]"):
        collect(tmp_path / "two")


def test_the_command_line_writes_the_page_and_says_where(tmp_path: Path) -> None:
    fabricate(tmp_path / "run", variants=("rope",), seeds=(0,), laws=("none",), lengths=(512, 1024), cases=4)
    status, out, err = called("report", tmp_path / "run", "--out", tmp_path / "page")
    assert (status, err) == (0, "")
    assert out.strip() == f"written: {tmp_path / 'page' / 'index.html'}"
    assert (tmp_path / "page" / "index.html").is_file()


def test_the_command_line_refuses_an_empty_folder_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["farspan", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        farspan_cli.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("farspan: folder must hold results/*.json, got ")
    assert len(error.splitlines()) == 1


def test_the_command_line_help_shows_an_example() -> None:
    assert "farspan report runs/demo" in called("report", "--help")[1]
