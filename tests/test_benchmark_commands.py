"""What the bench commands do around the measuring: rows kept, options obeyed, tables whole."""

import io
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from farspan.benchmark import attention, cosformer, decode, layer, model
from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.record import recorded, unfinished
from farspan.files import check_writable
from farspan.results import write_result
from farspan_cli import bench_tables, main

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
Steps = Iterator[tuple[str, list[dict[str, Any]]]]


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["farspan", "bench", *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    return int(done.value.code or 0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def two_steps(failure: BaseException | None = None) -> Steps:
    yield "first", [{"kind": "a", "figure": 1}]
    if failure is not None:
        raise failure
    yield "second", [{"kind": "b"}, {"kind": "c"}]


def test_rows_are_on_disk_after_each_step(tmp_path: Path) -> None:
    out, seen = tmp_path / "deep" / "result.json", []
    for _ in recorded(two_steps(), out, device="cpu", seed=3):
        seen.append([row["kind"] for row in rows_of(unfinished(out))])
        assert not out.exists()
    assert seen == [["a"], ["a", "b", "c"]]
    assert [row["kind"] for row in rows_of(out)] == ["a", "b", "c"]
    assert [path.name for path in out.parent.iterdir()] == ["result.json"]
    assert json.loads(out.read_text())["seed"] == 3


def test_a_failed_check_leaves_no_figures_on_disk(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    write_result(out, [{"kind": "from before"}], device="cpu", seed=0)
    with pytest.raises(ResultsDifferError):
        list(recorded(two_steps(ResultsDifferError("rope is wrong")), out, device="cpu", seed=0))
    assert rows_of(unfinished(out)) == [{"kind": "no figures", "why": "rope is wrong"}]
    assert rows_of(out) == [{"kind": "from before"}]


def test_a_stopped_run_keeps_its_rows_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(layer, "run", lambda *args, **options: two_steps(KeyboardInterrupt()))
    assert command(monkeypatch, "layer", "--quick", "--out", str(out)) == 130
    assert [row["kind"] for row in rows_of(unfinished(out))] == ["a"]
    assert f"interrupted; {out}.unfinished has the rows so far; the same command begins" in capsys.readouterr().err
    monkeypatch.setattr(layer, "run", lambda *args, **options: two_steps(torch.OutOfMemoryError("CUDA out of memory")))
    assert command(monkeypatch, "layer", "--quick", "--out", str(out)) == 2
    assert f"out of memory after 1 rows; {out}.unfinished has the rows so far; try shorter" in capsys.readouterr().err


def test_an_out_that_cannot_be_written_is_noticed_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    begun = []
    monkeypatch.setattr(model, "check", lambda *args: begun.append(args))
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path, tmp_path / "file" / "result.json"):
        assert command(monkeypatch, "model", "--preset", "tiny", "--out", str(out)) == 2
        printed = capsys.readouterr().err
        assert "out must take the result, could not write" in printed
        assert len(printed.splitlines()) == 1
    assert not begun
    check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


STUDY = {"command": "farspan reproduce --preset gpu --text runs/corpus/books --text stdlib --out runs/33m", "rows": []}


@pytest.mark.parametrize("suffix", ["", ".unfinished"])
@pytest.mark.parametrize(
    ("held", "maker"),
    [
        (json.dumps(STUDY), "made by 'farspan reproduce --preset gpu --text runs/corpus/books …'"),
        (json.dumps(STUDY | {"command": "farspan bench linear --out x"}), "made by 'farspan bench linear --out x'"),
        (json.dumps(STUDY | {"rows": None}), "which holds no result"),
        ("[]", "which holds no result"),
        ("# Notes", "which holds no result"),
    ],
)
@pytest.mark.parametrize(
    ("name", "module"),
    [("attention", attention), ("cosformer", cosformer), ("layer", layer), ("decode", decode), ("model", model)],
)
def test_what_another_command_made_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    module: Any,
    held: str,
    maker: str,
    suffix: str,
) -> None:
    begun = []

    def work(*args: object, **options: object) -> Steps:
        begun.append(name)
        yield from two_steps()

    monkeypatch.setattr(module, "training" if name == "model" else "run", work)
    path = tmp_path / f"result.json{suffix}"
    path.write_text(held)
    assert command(monkeypatch, name, "--out", str(tmp_path / "result.json")) == 2
    printed = capsys.readouterr().err
    assert "farspan: out must be a new file or an earlier result of the same command, got" in printed
    assert f"{path.name}', {maker}" in printed
    assert len(printed.splitlines()) == 1
    assert not begun
    assert path.read_text() == held
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("import_time", []), ("convert_cost", ["none.gguf"]), ("llama_parity", ["none.gguf", "--text", "none.txt"])],
)
def test_scripts_refuse_what_another_command_made_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    script: str,
    arguments: list[str],
) -> None:
    """Work would fail here: neither a process nor the source that it asks for is to be had."""
    out, held = tmp_path / "result.json", json.dumps(STUDY)
    out.write_text(held)
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    path = SCRIPTS / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments, "--out", str(out)])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().err
    assert done.value.code == 2
    assert printed.startswith("out must be a new file or an earlier result of the same command, got")
    assert len(printed.splitlines()) == 1
    assert out.read_text() == held


@pytest.mark.parametrize("program", ["farspan", "farspan/__main__.py"])
def test_ones_own_result_and_an_empty_file_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    out, shown = tmp_path / "result.json", []
    out.touch()
    monkeypatch.setattr(model, "training", lambda *args, **options: two_steps())
    monkeypatch.setattr("farspan_cli.bench.show_model", lambda console, rows, absolute: shown.append(rows))
    for repeats in ("1", "2"):
        assert command(monkeypatch, "model", "--window", "0", "--repeats", repeats, "--out", str(out)) == 0
        made = json.loads(out.read_text())
        assert f"bench model --window 0 --repeats {repeats}" in made["command"]
        out.write_text(json.dumps(made | {"command": made["command"].replace("farspan", Path(program).name)}))
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--quick"], ([1024, 4096], 4096)),
        (["--quick", "--lengths", "64,128"], ([64, 128], 4096)),
        (["--quick", "--published-length", "100"], ([1024, 4096], 100)),
        ([], ([8192, 32768], 8192)),
    ],
)
def test_what_is_asked_for_wins_over_quick(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: tuple[list[int], int]
) -> None:
    asked = []

    def run(lengths: list[int], published: int, **options: object) -> Steps:
        asked.append((lengths, published))
        return two_steps(ResultsDifferError("enough"))

    monkeypatch.setattr(attention, "run", run)
    assert command(monkeypatch, "attention", *arguments) == 2
    assert asked == [expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--device", "cuda"], "use farspan bench layer and bench decode --device cuda, in bfloat16"),
        (["model", "--preset", "7b"], "preset must be"),
        (
            ["layer", "--groups", "0"],
            "--groups must be whole numbers ≥ 1 separated by commas, got '0'; try --groups 1,4",
        ),
    ],
)
def test_bad_input_exits_2_with_one_line_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    begun = []
    monkeypatch.setattr(model, "check", lambda *args: begun.append(args))
    assert command(monkeypatch, *arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1
    assert not begun


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.004, "high": median + 0.003}


def layer_rows() -> list[dict[str, Any]]:
    names = ["rope", "coca-exact, cudnn", "coca-slack, published"]
    row = {
        "kind": "layer",
        "compiler": "inductor",
        "passes": "forward and backward",
        "b": 1,
        "n": 32_768,
        "h": 32,
        "d": 128,
        "g": 32,
    }
    row |= {"best_rope": "rope", "milliseconds": {name: {"median": 1234.567} for name in names}}
    row |= {"time_over_best_rope": {names[1]: spread(1.074), names[2]: spread(21.345)}}
    row |= {"time_over_same_kernel": {names[1]: spread(0.983)}, "of_matmul_peak": dict.fromkeys(names, 0.123)}
    row |= {"peak_bytes": dict.fromkeys(names, 123e9), "missing": {"x": "a reason in [brackets]"}}
    check = {"kind": "check", "attention": "rope", "of": "output", "error": 1e-6, "allowed": 1e-4}
    return [row, check]


def decode_rows() -> list[dict[str, Any]]:
    row = {"kind": "decode", "context": 131_072, "batch": 32, "mode": "compiled", "decodes_on": "SDPA, cudnn first"}
    row |= {"attention": "coca-exact", "reads": "all 131200 slots, masked", "peak_bytes": 123e9}
    return [
        row
        | {"tokens_per_second": 123456.0, "speed_over_rope": spread(1.074), "cache_over_rope": 0.75, "of_copy": 0.876}
    ]


@pytest.mark.parametrize("width", [80, 200])
def test_tables_are_whole(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    bench_tables.show_layer(console, layer_rows())
    bench_tables.show_decode(console, decode_rows(), absolute=True)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    table = [line for line in printed.splitlines() if line and line[0] in "┏┃┡│└"]
    assert table
    assert all(len(line) <= width and line[-1] in "┓┃┩│┘" for line in table)
    assert "…" not in printed
    for figure in ("1234.567", "1.074", "(1.070–1.077)", "(21.341–21.348)", "(0.979–0.986)", "12.3%", "123.00"):
        assert figure in printed
    for figure in ("123,456", "0.75", "131200", "88%"):
        assert figure in printed
    assert "missing: x: a reason in [brackets]" in printed


def test_a_pipe_is_wide_unless_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert bench_tables.make_console().width == bench_tables.PIPE
    monkeypatch.setenv("COLUMNS", "72")
    assert bench_tables.make_console().width == 72
