"""CoCA's speed beside RoPE's: what the benchmarks write → figure, tables and words; and the whole path at toy size."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from farspan.benchmark import layer
from farspan.report import write_report
from farspan.report.decodings import decoding_notes, decoding_tables, decoding_verdicts
from farspan.report.inference import DECODE, KERNELS, parse_inference
from farspan.report.kernels import kernel_tables
from farspan.report.speed_figures import speed_figures
from farspan.report.speeds import SpeedTable, load_speed_tables, speed_tables, speed_verdicts
from farspan.report.tables import Table, to_html, to_markdown
from farspan.report.timings import COCA, groups, parse_timings
from farspan.reproduce import Preset, reproduce
from farspan.reproduce.plan import plan
from tests.report.fabricate import write

RESULTS = Path(__file__).parents[2] / "results"
COMMITTED = ("layer-coca-h200", "decode-h200", "coca-kernels-h200")


def spread(median: float, half: float = 0.01) -> dict[str, float]:
    return {"median": median, "low": median - half, "high": median + half}


def layers(length: int, exact: float, passes: str = "forward", **more: Any) -> dict[str, Any]:
    return {
        "kind": "layer",
        "passes": passes,
        **{"b": 2, "n": length, "h": 8, "g": 8, "d": 16},
        "best_rope": "rope, cudnn",
        "milliseconds": {"rope, cudnn": {"median": 1.5}},
        "time_over_best_rope": {"coca-exact": spread(exact), "alibi": spread(1.3), "alibi, flex": spread(1.2)},
        "peak_bytes": {"rope, cudnn": 100, "coca-exact": 90},
        "compiler": "inductor",
        "dtype": "torch.bfloat16",
        **more,
    }


def decoding(attention: str, mode: str, median: float) -> dict[str, Any]:
    label = {"kind": "decode", "mode": mode, "context": 32_768, "batch": 8, "attention": attention}
    return {**label, "speed_over_rope": spread(median)}


def each(mode: str, tokens: float, over: float) -> dict[str, Any]:
    return {"mode": mode, "tokens_per_second": tokens, "speed_over_rope": over}


DECODED = [
    {"kind": "missing", "mode": "half-width kernel", "why": "no GPU"},
    decoding("rope", "eager", 1.0),
    decoding("coca-exact", "eager", 1.3),
    {"kind": "missing", "mode": "graph", "context": 32_768, "batch": 8, "why": "OutOfMemoryError: no room. Try less."},
    {
        "kind": "best",
        **{"context": 32_768, "batch": 8},
        "each": {"rope": each("graph", 200.0, 1.0), "coca-exact": each("eager", 240.0, 1.2)},
    },
    {"kind": "prefill", "attention": "rope", "length": 32_768, "tokens_per_second": 9.0, "speed_over_rope": 1.0}
    | {"peak_bytes": 4_130_000_000},
    {"kind": "prefill", "attention": "coca-exact", "length": 32_768, "tokens_per_second": 9.0, "speed_over_rope": 1.05}
    | {"peak_bytes": 3_410_000_000},
]


def kernel(b: int, m: int, *, peer: str = "cudnn", coded: float | None = None, **more: Any) -> dict[str, Any]:
    """One shape: RoPE in 0.25 ms, exact in 0.2, slack in 0.125; with t in eight bits in `coded`."""
    times = {"exact": 0.2, "slack": 0.125} | ({"exact, 8-bit t": coded} if coded else {})
    return {
        "kind": "decode",
        **{"b": b, "h": 32, "g": 8, "n": 1, "m": m, "d": 128},
        "best_peer": peer,
        "milliseconds": {name: {"median": time} for name, time in {**times, peer: 0.25}.items()} | {"flash": None},
        "speedup": {name: 0.25 / time for name, time in times.items()},
        "of_copy": dict.fromkeys(times, 0.99),
        **more,
    }


def kernels(*rows: dict[str, Any]) -> list[Table]:
    return kernel_tables(parse_inference([*rows, {"kind": "copy"}], Path("x"), KERNELS, absolute=True))


def shown(table: Table) -> list[tuple[str, ...]]:
    return [(line.label, line.source, *(cell.text for cell in line.cells)) for line in table.lines]


@pytest.fixture
def table() -> SpeedTable:
    return next(table for table in load_speed_tables() if table.name == "coca-speed")


def test_lengths_are_in_order_with_shape_unit_and_range(table: SpeedTable) -> None:
    (made,) = speed_tables(parse_timings([layers(512, 0.95), layers(64, 0.9)], Path("x")), table)
    assert made.columns == ("2 × 64, 8 of 16", "2 × 512, 8 of 16")
    lines = {line.label: line.cells for line in made.lines}
    assert lines["Best RoPE layer"][0].note == "1.50 ms; rope, cudnn"
    assert [cell.text for cell in lines["CoCA exact"]] == ["0.900", "0.950"]
    assert lines["CoCA exact"][0].note == "0.890–0.910"
    assert lines["ALiBi, ours or Flex"][0].text == "1.200"  # the faster of the two
    assert "CoCA slack" not in lines
    assert lines[table.memory][0].text == "0.90"
    assert lines[table.paper_label][0].text == "1.05–1.10"


def test_layers_that_are_not_compiled_stand_apart() -> None:
    timings = parse_timings(
        [layers(512, 0.9), layers(512, 0.6, compiler="none"), layers(512, 0.7, g=2, compiler="none")], Path("x")
    )
    assert [name for name, _ in groups(timings, COCA)] == [
        "forward", "forward, not compiled", "forward, not compiled, 4 query heads a key head"
    ]  # fmt: skip


def test_a_toy_has_neither_milliseconds_nor_memory_and_is_called_one(table: SpeedTable) -> None:
    timings = parse_timings([layers(64, 0.9, compiler="aot_eager", dtype="torch.float32")], Path("x"))
    (made,) = speed_tables(timings, table)
    assert speed_verdicts(timings)[0].startswith("One layer, a toy on a CPU, forward: CoCA exact takes")
    assert made.lines[0].cells[0].note == ""
    assert table.memory not in {line.label for line in made.lines}


def test_passes_and_groups_of_heads_are_kept_apart(table: SpeedTable) -> None:
    rows = [layers(64, 0.9), layers(64, 0.9, "forward and backward"), layers(64, 0.9, g=2)]
    names = [made.name for made in speed_tables(parse_timings(rows, Path("x")), table)]
    assert names[:2] == ["coca-speed-forward", "coca-speed-forward-and-backward"]
    assert names[2] == "coca-speed-forward-4-query-heads-a-key-head"


def test_a_verdict_tells_apart_only_what_the_ranges_do(table: SpeedTable) -> None:
    rows = [layers(64, 0.9), layers(128, 0.98), layers(256, 0.995), layers(512, 1.02)]
    (said,) = speed_verdicts(parse_timings(rows, Path("x")))
    assert "CoCA exact takes 0.90 to 1.02 of the best RoPE layer's time" in said
    assert "(faster at 64 and 128; slower at 512; not told apart at 256 tokens)" in said


def test_the_figure_has_every_length_the_reference_the_paper_and_what_is_off_its_top(table: SpeedTable) -> None:
    over = {"coca-exact": spread(0.9), "coca-slack, published": spread(5.4)}
    rows = [layers(64, 0.9), layers(512, 0.95, time_over_best_rope=over)]
    (figure,) = speed_figures(parse_timings(rows, Path("x")), table)
    for text in (">64<", ">512<", table.reference, "(its Fig. 6)", "CoCA exact", "ALiBi", "↑ 5.4"):
        assert text in figure.svg
    assert "CoCA slack<" not in figure.svg
    assert not speed_figures(parse_timings(rows[:1], Path("x")), table)  # one length is no curve


def test_decoding_is_shown_by_mode_with_the_fairest_first() -> None:
    found = parse_inference(DECODED, Path("x"), DECODE, absolute=True)
    decode, prompt = decoding_tables(found)
    assert decode.columns == ("8 × 32,768",)
    shown = [(line.label, line.source, line.cells[0].text, line.cells[0].note) for line in decode.lines]
    best = "each in its fastest mode"
    assert shown == [
        ("RoPE", best, "1", "graph; 200 tokens/s"),
        ("CoCA exact", best, "1.20", "eager; 240 tokens/s"),
        ("CoCA exact", "eager", "1.30", "1.29–1.31"),
    ]
    assert [line.cells[0].text for line in prompt.lines] == ["1", "4.13", "1.05", "3.41", "about 60"]
    assert decoding_verdicts(found)[0].endswith("fastest mode: 1.20 after 8 × 32,768 tokens.")
    assert decoding_notes(found) == ["Not timed: graph, 8 × 32,768 tokens (OutOfMemoryError: no room)."]


def test_absolute_figures_of_a_cpu_are_left_out() -> None:
    decode, prompt = decoding_tables(parse_inference(DECODED, Path("x"), DECODE, absolute=False))
    assert decode.lines[0].cells[0].note == "graph"
    assert "peak, GB" not in {line.source for line in prompt.lines}


def test_a_removed_variant_in_earlier_results_is_left_out() -> None:
    (made,) = kernels(kernel(8, 4096, coded=0.1, peer="cudnn, heads as queries"))
    assert (made.heading, made.beside) == ("Heads", "Texts")
    assert shown(made) == [("32 heads of width 128, 8 for keys", "8 texts", "1.25")]
    assert made.lines[0].cells[0].note == "0.200 ms; CoCA slack 2.00"
    assert '<th scope="col" class="source">Texts</th>' in to_html(made)
    assert "| Heads | Texts | 4,096 tokens |" in to_markdown(made)


def test_shapes_of_decoding_stand_by_heads_texts_and_length() -> None:
    rows = [kernel(1, 512), kernel(8, 512), kernel(8, 2048), kernel(32, 512, d=64), kernel(1, 512, g=32)]
    (grid,) = kernels(*rows, kernel(1, 2048, coded=0.1))
    assert grid.columns == ("512 tokens", "2,048 tokens")
    assert shown(grid) == [
        ("32 heads of width 128", "1 text", "1.25", "—"),
        ("32 heads of width 128, 8 for keys", "1 text", "1.25", "1.25"),
        ("32 heads of width 128, 8 for keys", "8 texts", "1.25", "1.25"),
        ("32 heads of width 64, 8 for keys", "32 texts", "1.25", "—"),
    ]
    assert grid.lines[0].cells[0].note == "0.200 ms; CoCA slack 2.00"
    assert "speed of CoCA exact over RoPE's (small print: its time; the speed of CoCA slack)" in grid.title


def test_a_chunk_of_queries_stands_beside_keys_made_ready_for_it() -> None:
    times = {"exact": 0.5, "exact, rotated for SDPA": 0.4, "flash": 0.2}
    row = {"kind": "prefill", "n": 512, "speedup": {"exact": 0.4}, "best_peer": "flash"}
    row["milliseconds"] = {name: {"median": time} for name, time in times.items()}
    step = kernel(1, 2048)
    del step["of_copy"]
    (made,) = kernels(step | row)
    assert made.columns == ("RoPE", "CoCA exact", "CoCA exact, keys made for SDPA")
    assert shown(made) == [("32 heads of width 128, 8 for keys", "1 × 2,048, 512 queries", "1", "0.40", "0.50")]
    assert made.lines[0].cells[1].note == "0.500 ms"
    for peer in (None, "exact, rotated for SDPA"):  # RoPE could not be timed
        assert not kernels(step | row | {"best_peer": peer})


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("layer-x", {"kind": "layer", "passes": "forward"}, r"layer-x.json row 0 lacks 'time_over_best_rope'"),
        ("decode-x", {"kind": "decode", "over_rope": 1.0}, r"decode-x.json row 0 lacks 'context'; write it again"),
        ("coca-kernels-x", {"kind": "decode"}, r"coca-kernels-x.json row 0 lacks 'b'"),
        ("decode-x", 3, r"decode-x.json row 0 must have a kind"),
    ],
)
def test_a_row_that_lacks_something_is_refused_with_its_file(name: str, row: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, name, [row])
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)


def test_the_same_length_twice_and_two_devices_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "layer-a", [layers(64, 0.9)])
    write(tmp_path, "layer-b", [layers(64, 0.95)])
    with pytest.raises(ValueError, match=r"layer-b.json must not repeat coca-speed, forward, 64, which is in layer-a"):
        write_report(tmp_path)
    write(tmp_path, "layer-b", [layers(128, 0.95)], device="NVIDIA H200")
    with pytest.raises(ValueError, match="on one device, got CPU, 2 cores, NVIDIA H200; report them separately"):
        write_report(tmp_path)


def test_the_committed_results_make_the_page(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in COMMITTED:
        shutil.copy(RESULTS / f"{name}.json", tmp_path / "results")
    page = write_report(tmp_path)
    html = page.read_text()
    for text in ("What CoCA costs beside RoPE", "Figure 6: ", "Decoding and reading", "Attention alone"):
        assert text in html
    assert "8-bit" not in html
    assert "Table 1:" not in html
    assert {path.stem for path in (page.parent / "figures").glob("*.png")} == {
        "coca-speed-forward",
        "coca-speed-forward-and-backward",
    }
    tables = {"coca-decode", "coca-prompt", "coca-speed-forward", "coca-speed-forward-and-backward"}
    of_kernels = {"coca-kernels-lengths": 6, "coca-kernels-chunks": 3}
    assert {path.stem for path in (page.parent / "tables").glob("*.md")} == tables | set(of_kernels)
    for name, columns in of_kernels.items():  # as many as a person can read, beside heads and texts
        head = (page.parent / "tables" / f"{name}.md").read_text().splitlines()[2]
        assert head.count("|") == columns + 3


@pytest.mark.usefixtures("one_thread")
def test_a_reproduction_times_coca_on_request_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "QUICK", {"rope", "coca-exact"})  # torch.compile takes a second for each
    preset = tmp_path / "preset.toml"
    preset.write_text("[speed]\nlengths = [33]\nrepeats = 1\ncontexts = [16]\nprompts = [32]\n")
    said: list[float] = []
    page = reproduce(Preset.load(preset), tmp_path / "run", only=["speed"], report=lambda x: said.append(x.share))
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == [
        {"step": "speed layer", "state": "done", "message": ""},
        {"step": "speed decode", "state": "done", "message": ""},
    ]
    assert said == sorted(said)
    assert max(said) == 1.0
    html = page.read_text()
    assert "What CoCA costs beside RoPE" in html
    assert "One layer, a toy on a CPU, forward and backward: CoCA exact takes" in html
    assert "Decoding, CoCA exact over RoPE" in html
    assert {path.stem for path in (page.parent / "tables").glob("coca-*.md")} == {
        *("coca-decode", "coca-prompt", "coca-speed-forward", "coca-speed-forward-and-backward")
    }


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_speed_is_measured_only_where_it_is_asked_for(name: str, tmp_path: Path) -> None:
    preset = Preset.load(name)
    assert "speed" not in {step.kind for step in plan(preset, tmp_path)}
    assert [step.name for step in plan(preset, tmp_path, ["speed"])] == ["speed layer", "speed decode"]
    both = plan(preset, tmp_path, ["table1", "speed"])
    assert both[0].kind == "data"
    assert [step.name for step in both[-2:]] == ["speed layer", "speed decode"]


@pytest.mark.parametrize("change", [{"g": 0}, {"time_over_best_rope": [1]}, {"milliseconds": "fast"}], ids=str)
def test_a_row_that_no_benchmark_wrote_is_refused_by_name(change: dict) -> None:
    parse_timings([layers(512, 0.9)], Path("x.json"))
    with pytest.raises(ValueError, match=r"^x\.json row 0 is no benchmark's \(.*; write it again"):
        parse_timings([layers(512, 0.9, **change)], Path("x.json"))
