"""Rows of benchmarks → multiples of a reference, in tables and figures."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from farspan.bench import layer
from farspan.experiments import load
from farspan.report import write_report
from farspan.report.figures import speed_figures
from farspan.report.results import Record, Run
from farspan.report.speed import Spread, decoding_tables, kernel_tables, speed_tables, timings
from farspan.report.tables import to_markdown
from tests.command_line import called
from tests.report.fabricate import shown, small, write

RESULTS = Path(__file__).parents[2] / "results"
COCA, COSFORMER = load("speed")


def run_of(kind: str, *rows: Any, device: str = "NVIDIA H200") -> Run:
    made = [Record(row) for row in rows]
    for i, row in enumerate(made):
        row.where, row.source = f"x.json row {i}", Record(device=device)
    return Run({kind: made})


def spread(median: float, half: float = 0.01) -> dict[str, float]:
    return {"median": median, "low": median - half, "high": median + half}


def layers(length: int, exact: float, passes: str = "forward", **more: Any) -> dict[str, Any]:
    return {
        **{"kind": "layer", "passes": passes, "b": 2, "n": length, "h": 8, "g": 8, "d": 16},
        **{"best_rope": "rope, cudnn", "milliseconds": {"rope, cudnn": {"median": 1.5}}},
        "time_over_best_rope": {"coca-exact": spread(exact), "alibi": spread(1.3), "alibi, flex": spread(1.2)},
        "peak_bytes": {"rope, cudnn": 100, "coca-exact": 90},
        **{"compiler": "inductor", "dtype": "torch.bfloat16", **more},
    }


def linear(length: int, softmax: float, fla: float) -> dict[str, Any]:
    return {
        **{"kind": "linear", "passes": "forward", "n": length, "d": 64},
        "milliseconds": {"triton": {"median": 0.5}, "fla": {"median": 0.5 * fla}},
        "speedup": {"flash softmax": {"median": softmax}, "fla": {"median": fla}},
        "memory_over_least": {"triton": 1.14, "fla": 2.0},
    }


SIZE = {"context": 32_768, "batch": 8}
READ = {"kind": "prefill", "length": 32_768, "tokens_per_second": 9.0}
DECODED = [
    {"kind": "missing", "mode": "half-width kernel", "why": "no GPU"},
    {"kind": "decode", "mode": "eager", **SIZE, "attention": "rope", "speed_over_rope": spread(1.0)},
    {"kind": "decode", "mode": "eager", **SIZE, "attention": "coca-exact", "speed_over_rope": spread(1.3)},
    {"kind": "missing", "mode": "graph", **SIZE, "why": "OutOfMemoryError: too large. Try less."},
    {
        **{"kind": "best", **SIZE},
        "each": {
            "rope": {"mode": "graph", "tokens_per_second": 200.0, "speed_over_rope": 1.0},
            "coca-exact": {"mode": "eager", "tokens_per_second": 240.0, "speed_over_rope": 1.2},
        },
    },
    {**READ, "attention": "rope", "speed_over_rope": 1.0, "peak_bytes": 4_130_000_000},
    {**READ, "attention": "coca-exact", "speed_over_rope": 1.05, "peak_bytes": 3_410_000_000},
]


def test_lengths_are_in_order_with_shape_unit_and_range() -> None:
    (made,) = speed_tables(run_of("bench-layer", layers(512, 0.95), layers(64, 0.9)), COCA)
    assert made.columns == ("2 × 64, 8 of 16", "2 × 512, 8 of 16")
    lines = {label: cells for label, _, *cells in made.lines}
    assert small(lines["Best RoPE layer"][0]) == "1.50 ms; rope, cudnn"
    assert lines["CoCA exact"] == ["0.900\n0.890–0.910", "0.950\n0.940–0.960"]
    assert lines["ALiBi, ours or Flex"][0].startswith("1.200\n")  # the faster of the two
    assert "CoCA slack" not in lines
    assert lines["peak memory, exact CoCA's over the best RoPE layer's"][0] == "0.90"
    assert lines["The paper's CoCA (its Fig. 6)"][0] == "1.05–1.10"


def test_passes_compilers_and_groups_of_heads_are_kept_apart_and_a_toy_has_no_absolute_numbers() -> None:
    rows = [layers(64, 0.9), layers(64, 0.9, "forward and backward"), layers(64, 0.9, g=2, compiler="none")]
    toy = layers(64, 0.9, compiler="aot_eager", dtype="torch.float32")
    assert [made.name for made in speed_tables(run_of("bench-layer", *rows), COCA)] == [
        *("coca-speed-forward", "coca-speed-forward-and-backward"),
        "coca-speed-forward-not-compiled-4-query-heads-per-key-head",
    ]
    (made,) = speed_tables(run_of("bench-layer", toy), COCA)
    assert made.lines[0][2] == "1"
    assert not any("memory" in label for label, *_ in made.lines)


def test_times_of_cosformer_are_multiples_of_ours() -> None:
    rows = [{"kind": "check"}, linear(4096, 2.8, 3.75), linear(1024, 0.97, 3.9), linear(2048, 1.5, 4.1)]
    (table,) = speed_tables(run_of("bench-cosformer", *rows), COSFORMER)
    assert table.columns == ("1,024", "2,048", "4,096")
    lines = {label: cells for label, _, *cells in shown(table)}
    assert lines["Softmax attention (SDPA, flash on a GPU)"] == ["0.97", "1.50", "2.80"]
    assert lines["flash-linear-attention"] == ["3.90", "4.10", "3.75"]
    assert lines["memory, cosFormer's over the least"] == ["1.14"] * 3
    assert "cosFormer in plain torch" not in lines  # was not in the run
    assert small(table.lines[0][2]) == "0.50 ms"


def test_time_and_memory_of_a_cpu_are_joined_by_length() -> None:
    size = {"length": 64, "heads": 2, "head_dim": 8}
    rows = [{"kind": "length", **size, "peak_bytes": 4 * 2 * 8 * 64 * 2}, {"kind": "softmax", **size, "speedup": 0.5}]
    ((timing,),) = timings(run_of("bench-cosformer", *rows), "bench-cosformer").values()
    assert timing.times == {"flash softmax": Spread(0.5, 0.5, 0.5)}
    assert timing.memory == 5 / 4  # q, k, v and twice an output


def test_the_figure_has_every_length_the_reference_and_the_paper() -> None:
    rows = [layers(64, 0.9), layers(512, 0.95)]
    (figure,) = speed_figures(run_of("bench-layer", *rows), COCA)
    assert figure
    for text in (">64<", ">512<", "Best RoPE layer", "(its Fig. 6)", "CoCA exact", "ALiBi"):
        assert text in figure.svg
    assert "CoCA slack<" not in figure.svg
    assert not list(speed_figures(run_of("bench-layer", rows[0]), COCA))  # one length is no curve


def test_decoding_is_shown_by_mode_with_the_fairest_first_and_on_a_cpu_without_absolute_numbers() -> None:
    decode, prompt = decoding_tables(run_of("bench-decode", *DECODED))
    assert decode.columns == ("8 × 32,768",)
    best = "each in its fastest mode"
    assert decode.lines == [
        ("RoPE", best, "1\ngraph\n200 tokens/s"),
        ("CoCA exact", best, "1.20\neager\n240 tokens/s"),
        ("CoCA exact", "eager", "1.30\n1.29–1.31"),
        ("All models", "graph", "not timed\nOutOfMemoryError: too large"),
    ]
    assert [line[2] for line in shown(prompt)] == ["1", "4.13", "1.05", "3.41", "about 60"]
    decode, prompt = decoding_tables(run_of("bench-decode", *DECODED, device="CPU, 2 cores"))
    assert decode.lines[0][2] == "1\ngraph"
    assert "peak, GB" not in {line[1] for line in prompt.lines}


def test_kernels_stand_by_shape_and_a_chunk_of_queries_beside_keys_made_ready_for_it() -> None:
    rows = json.loads((RESULTS / "coca-kernels-h200.json").read_text())["rows"]
    assert any("8-bit" in str(row) for row in rows)  # a removed variant in earlier results
    by_length, chunks = kernel_tables(run_of("bench-kernels", *rows))
    assert by_length.columns[:3] == ("512 tokens", "2,048 tokens", "4,096 tokens")
    lines = {row[:2]: row[2:] for row in shown(by_length)}
    assert lines["32 heads of width 128", "1 sequence"] == ("0.75", "1.02", "—", "1.17", "1.23", "1.29")
    assert lines["32 heads of width 128, 8 for keys", "32 sequences"][0] == "1.17"
    assert small(by_length.lines[0][2]) == "0.017 ms; CoCA slack 0.76"
    assert "speed of CoCA exact over RoPE's (small print: its time; the speed of CoCA slack)" in by_length.title
    assert "| Heads | Sequences | 512 tokens | 2,048 tokens |" in to_markdown(by_length)
    assert chunks.columns == ("RoPE", "CoCA exact", "CoCA exact, keys made for SDPA")
    assert shown(chunks)[0] == ("32 heads of width 128", "1 × 32,768, 512 queries", "1", "0.74", "0.50")
    assert small(chunks.lines[0][3]) == "1.257 ms"
    for peer in (None, "exact, rotated for SDPA"):  # RoPE could not be timed
        assert not kernel_tables(run_of("bench-kernels", *(row | {"best_peer": peer} for row in rows)))


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("bench-layer", layers(64, 0.9) | {"g": 0}, r"row 0 is no row of a benchmark \(.*; write it again"),
        ("bench-layer", layers(64, 0.9) | {"time_over_best_rope": [1]}, "row 0 is no row of a benchmark"),
        ("bench-layer", layers(64, -0.9), r"row 0 is no row of a benchmark \(a ratio must be positive"),
        ("bench-layer", {"kind": "layer", "passes": "forward", "b": 1}, "row 0 lacks 'best_rope'; write it again"),
        ("bench-cosformer", {"kind": "softmax", "length": 3}, "row 0 lacks 'speedup'"),
        ("bench-decode", {"kind": "best", "each": {}}, "row 0 lacks 'context'"),
        ("bench-kernels", {"kind": "decode", "m": 1, "best_peer": "cudnn"}, "row 0 lacks 'milliseconds'"),
        ("bench-decode", {"mode": "eager"}, "row 0 lacks 'kind'"),
    ],
)
def test_a_row_that_lacks_something_gives_one_line(kind: str, row: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, "x", [row], schema=2, kind=kind)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


REPEATED = "b.json row 0: .* was measured before with another outcome, in .*a.json row 0"
TWO_DEVICES = "times of one device, got CPU, GPU; report them separately"


@pytest.mark.parametrize(
    ("first", "second", "device", "message"),
    [
        (layers(64, 0.9), layers(64, 0.95), "CPU", REPEATED),
        (linear(64, 1.0, 1.0), linear(64, 1.1, 1.0), "CPU", REPEATED),
        (DECODED[2], DECODED[2] | {"speed_over_rope": 2.0}, "CPU", REPEATED),
        (layers(64, 0.9), layers(128, 0.9), "GPU", TWO_DEVICES),
        (layers(64, 0.9), linear(64, 1.0, 1.0), "GPU", TWO_DEVICES),
    ],
)
def test_runs_that_do_not_belong_together_give_one_line(
    first: Any, second: Any, device: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path, "a", [first], device="CPU")
    write(tmp_path, "b", [second], device=device)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_the_committed_results_make_the_page(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in ("layer-coca-h200", "decode-h200", "coca-kernels-h200"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path / "results")
    page = write_report(tmp_path)
    html = page.read_text()
    for text in ("What CoCA costs beside RoPE", "Figure 6: ", "Decoding and reading", "Attention alone"):
        assert text in html
    assert "8-bit" not in html
    assert "Table 1:" not in html
    assert '<th scope="col" class="source">Sequences</th>' in html
    drawn = {"coca-speed-forward", "coca-speed-forward-and-backward"}
    tables = {"coca-decode", "coca-prompt", "coca-kernels-lengths", "coca-kernels-chunks", *drawn}
    assert {path.stem for path in (page.parent / "figures").glob("*.png")} == drawn
    assert {path.stem for path in (page.parent / "tables").glob("*.md")} == tables


BENCHES = (
    ("layer", "--lengths", 33, "--quick"),
    ("decode", "--preset", "tiny", "--contexts", 16, "--batch", 1, "--prompts", 32),
    ("cosformer", "--lengths", "64,128", "--published-length", 64),
)


@pytest.mark.usefixtures("one_thread")
def test_what_bench_measures_is_shown_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "QUICK", {"rope", "coca-exact"})  # torch.compile takes a second for each
    (tmp_path / "results").mkdir()
    for name, *options in BENCHES:
        out = tmp_path / "results" / f"{name}.json"
        status, said, err = called("bench", name, *options, "--repeats", 1, "--device", "cpu", "--out", out)
        assert status == 0, err + said
    page = write_report(tmp_path)
    assert {path.stem for path in (page.parent / "tables").glob("*.md")} == {
        *("coca-decode", "coca-prompt", "coca-speed-forward", "coca-speed-forward-and-backward"),
        "cosformer-length-forward-width-64",
    }
    assert [path.name for path in (page.parent / "figures").glob("*.png")] == ["cosformer-length-forward-width-64.png"]
