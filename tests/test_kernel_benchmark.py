"""The kernels' benchmark takes every step at toy size, and keeps silent when a kernel is wrong."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.benchmark import kernel_checks, kernels, tuning
from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.ahead import compile_ahead
from farspan.benchmark.clock import UNFAIR, Times, clock
from farspan.ops.coca import COCA
from farspan.ops.device import assembler
from farspan.ops.triton import coca_decode

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "coca_kernels.py"
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="--toy is for the interpreter, without a GPU")


def make_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the half-width kernel return a tenth too much."""
    first, *rest = COCA.entries
    assert first.name == "decode_triton"
    monkeypatch.setattr(COCA, "entries", (first._replace(run=lambda call: 1.1 * first.run(call)), *rest))


@interpreted
def test_every_step_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy", "--repeats", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"assembler", "check", "copy", "decode", "prepare"}
    checks = {row["case"]: row for row in rows if row["kind"] == "check"}
    assert all(row["error"] <= row["allowed"] for row in checks.values())
    assert all(0 < row["rms_ratio"] < 2 for row in checks.values())
    for name in ("decode, left padding", "decode, positions per row", "features, free", "lengths, first per row"):
        assert any(case.startswith(name) for case in checks)
    decode = next(row for row in rows if row["kind"] == "decode")
    ours, peers = (
        [t["median"] for name, t in decode["milliseconds"].items() if (name in kernels.OURS) is mine]
        for mine in (True, False)
    )
    prepared = next(row for row in rows if row["kind"] == "prepare")
    assert {"torch, compiled", "rope, torch, compiled"} <= prepared["milliseconds"].keys()
    assert prepared["best_peer"] in prepared["milliseconds"]
    assert prepared["missing"] == decode["missing"] == {}
    assert decode["speedup"]["exact"] == pytest.approx(min(peers) / ours[0])
    for row in (row for row in rows if row["kind"] in ("decode", "prepare")):
        assert row["ptxas"] == rows[0]["ptxas"]
        copies = row["copy_terabytes_a_second"]
        assert copies["before"] > 0 < copies["after"]
        for name, share in row.get("of_copy", {}).items():
            assert share == pytest.approx(row["terabytes_a_second"][name] / max(copies.values()))
    assert decode["of_copy"].keys() == {"exact", "slack"} == decode["speedup"].keys()
    assert decode["of_copy_alike"].keys() == {"exact", "slack"}
    moved = {name: rate * decode["milliseconds"][name]["median"] for name, rate in decode["terabytes_a_second"].items()}
    assert moved["exact"] / moved["sdpa"] == pytest.approx(3 / 4)
    alike = decode["terabytes_a_second"]["slack"] / decode["copy_alike_terabytes_a_second"]
    assert decode["of_copy_alike"]["slack"] == pytest.approx(alike)
    assert prepared["of_copy"].keys() == prepared["backward"]["of_copy"].keys() == {"fused"}
    assert all(decode["error_as_timed"][form] <= decode["allowed_as_timed"][form] for form in ("exact", "slack"))
    assert prepared["backward"]["error_as_timed"] <= prepared["backward"]["allowed_as_timed"]


@interpreted
def test_no_figures_when_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    make_wrong(monkeypatch)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 1
    printed = capsys.readouterr()
    assert "no figures: 7 of 11 kernel checks fail: decode, 1 of 70" in printed.err
    assert "×" not in printed.out


@interpreted
def test_no_figures_of_a_shape_at_which_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right where kernels are checked, and wrong where they are timed."""
    make_wrong(monkeypatch)
    with pytest.raises(ResultsDifferError, match=r"exact as timed is wrong on decode \(2, 2, 1, 1, 70, 16\)"):
        kernels.decode(kernels.TOY[0], "cpu", 1)


@interpreted
def test_no_figures_of_a_preparation_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.coca_features
    monkeypatch.setattr(kernels, "coca_features", lambda *args, **options: [1.1 * x for x in right(*args, **options)])
    with pytest.raises(ResultsDifferError, match=r"fused as timed is wrong on prepare exact \(2, 2, 1, 1, 70, 16\)"):
        kernels.prepare(kernels.TOY[0], "exact", "cpu", 1)


@interpreted
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats must be ≥ 1, got 0; try --repeats 30\n"),
        (["--out", str(Path(__file__).parent)], "out must take the result, could not write"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy", *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr()
    assert exit_.value.code == 2
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out  # noticed before anything is measured


@interpreted
def test_tuning_checks_each_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    rows = [row for _, new in tuning.run(device="cpu", repeats=1, toy=True) for row in new]
    assert rows[0] == {"kind": "assembler", "ptxas": ".".join(map(str, assembler()))}
    assert rows[1:]
    assert all(row["error"] <= row["allowed"] for row in rows[1:])
    assert all(list(row["of_copy"]) == ["exact"] for row in rows[1:])
    right = coca_decode.launch
    monkeypatch.setattr(coca_decode, "launch", lambda *args: 1.1 * right(*args))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy", "--tune", "--repeats", "1"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 1
    assert "no figures: cut (8, 32, 4, 2), splits 1, is wrong on (2, 2, 1, 1, 70, 16)" in capsys.readouterr().err


def test_a_refused_cut_is_told_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "compile_ahead", lambda function, calls: ([], dict.fromkeys(calls, "too large")))
    steps = tuning.run(device="cuda", repeats=1)
    next(steps)
    _, rows = next(steps)
    cuts = [(shape, cut) for shape in tuning.SHAPES for cut in tuning.variants(shape)]
    assert rows == [{"kind": "refused", "call": call, "why": "too large"} for call in cuts]


@interpreted
def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "no CUDA device; --toy takes the same steps without one\n"


def test_a_peer_that_fails_is_named_in_the_row() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")

    calls = {"exact": lambda: sum(range(100)), "flash": fail, "cudnn": lambda: sum(range(1000))}
    row = kernels.report("decode", kernels.TOY[0], kernels.times_of(calls, "cpu", 3))
    assert row["missing"] == {"flash": "OutOfMemoryError: CUDA out of memory."}
    assert row["best_peer"] == "cudnn"
    assert row["milliseconds"]["flash"] is None
    with pytest.raises(RuntimeError, match="out of memory"):  # ours may not fail
        kernels.times_of({"exact": fail}, "cpu", 3)


def test_a_peer_timed_with_its_launches_is_not_divided_by_ours_without() -> None:
    seconds = {"exact": (1.0, True), "flash": (2.0, True), "cudnn": (1.5, False)}
    row = kernels.report(
        "decode", kernels.TOY[0], {name: Times(t, t, t, graph) for name, (t, graph) in seconds.items()}
    )
    assert row["best_peer"] == "flash"
    assert row["speedup"] == {"exact": 2.0}
    assert row["missing"] == {"cudnn": UNFAIR}
    assert row["milliseconds"]["cudnn"]["median"] == 1500.0


def test_nan_is_wrong() -> None:
    truth = torch.ones(3, dtype=torch.float64)
    row = kernel_checks.error_row("x", torch.tensor([1.0, torch.nan, 1.0]), truth, truth.float())
    assert not row["error"] <= row["allowed"]


def test_recorded_shapes_cover_the_grid_that_fits() -> None:
    shapes = kernels.decoding_shapes()
    assert {shape.d for shape in shapes} == {64, 128}
    assert {shape.h // shape.g for shape in shapes} == {1, 4, 8}
    assert {shape.b for shape in shapes} >= {1, 8, 32}
    assert {shape.m for shape in shapes} >= {512, 131_072}
    assert max(shape.key_bytes[1] for shape in shapes) <= kernels.LARGEST
    assert kernels.NOTED[0].key_bytes == (3 * 8 * 32 * 32_768 * 128, 4 * 8 * 32 * 32_768 * 128)


def test_clock_gives_the_median_and_its_surroundings() -> None:
    times = clock(lambda: torch.ones(1000).sum(), device="cpu", repeats=10)
    assert 0 < times.low <= times.median <= times.high


def test_a_process_that_dies_is_reported_and_holds_nothing_up() -> None:
    good, bad = compile_ahead(os._exit, [(3,)], workers=1)
    assert good == []
    assert bad == {(3,): "its process ended with code 3"}
