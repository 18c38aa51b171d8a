"""The kernels' benchmark takes every step at toy size, and keeps silent when a kernel is wrong."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.benchmark import eight_bits, kernel_checks, kernels, tuning
from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.ahead import compile_ahead
from farspan.benchmark.clock import UNFAIR, Times, clock
from farspan.ops import launch
from farspan.ops.coca.kernels import attention

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "coca_kernels.py"
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="--toy is for the interpreter, without a GPU")


@interpreted
def test_every_step_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy", "--repeats", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"assembler", "check", "copy", "decode", "prefill", "prepare"}
    checks = {row["case"]: row for row in rows if row["kind"] == "check"}
    assert all(row["error"] <= row["allowed"] for row in checks.values())
    assert all(0 < row["rms_ratio"] < 2 for row in checks.values())
    for name in ("left padding", "positions a row", "free positions", "pages, first a row", "8-bit t, few queries"):
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
    for row in (row for row in rows if row["kind"] in ("decode", "prefill", "prepare")):
        assert row["ptxas"] == rows[0]["ptxas"]
        copies = row["copy_terabytes_a_second"]
        assert copies["before"] > 0 < copies["after"]
        for name, share in row.get("of_copy", {}).items():
            assert share == pytest.approx(row["terabytes_a_second"][name] / max(copies.values()))
    coded = {"exact, 8-bit t", "slack, 8-bit t"}
    assert decode["of_copy"].keys() == {"exact", "slack"} | coded == decode["speedup"].keys()
    assert decode["of_copy_alike"].keys() == {"exact", "slack"}
    moved = {name: rate * decode["milliseconds"][name]["median"] for name, rate in decode["terabytes_a_second"].items()}
    assert moved["exact, 8-bit t"] / moved["sdpa"] == pytest.approx((8 + 4 + 2 * 16) / (4 * 16))
    assert decode["quantizing_rms"].keys() == coded
    assert all(1e-4 < error < 0.05 for error in decode["quantizing_rms"].values())
    alike = decode["terabytes_a_second"]["slack"] / decode["copy_alike_terabytes_a_second"]
    assert decode["of_copy_alike"]["slack"] == pytest.approx(alike)
    assert prepared["of_copy"].keys() == prepared["backward"]["of_copy"].keys() == {"fused"}
    assert all(
        decode["error_as_timed"][form] <= decode["allowed_as_timed"][form] for form in {"exact", "slack"} | coded
    )
    assert prepared["backward"]["error_as_timed"] <= prepared["backward"]["allowed_as_timed"]


@interpreted
def test_no_figures_when_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    right = kernel_checks.half_width_attention
    monkeypatch.setattr(kernel_checks, "half_width_attention", lambda *args, **options: 1.1 * right(*args, **options))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 1
    printed = capsys.readouterr()
    assert "no figures: 4 of 11 kernel checks fail: pages, 1 queries" in printed.err
    assert "×" not in printed.out


@interpreted
def test_eight_bits_alone_time_decoding_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy", "--eight-bits", "--repeats", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"assembler", "check", "copy", "decode"}
    assert all(row["case"].startswith("8-bit t") for row in rows if row["kind"] == "check")
    assert list(rows[-1]["milliseconds"])[:4] == ["exact", "slack", "exact, 8-bit t", "slack, 8-bit t"]


@interpreted
def test_no_figures_when_codes_are_read_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked against the codes, not against t: another scale is wrong, however near."""
    right = eight_bits.half_width_attention

    def off(*args: Any, t_scale: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(*args, t_scale=1.1 * t_scale, **options)

    monkeypatch.setattr(eight_bits, "half_width_attention", off)
    with pytest.raises(ResultsDifferError, match="3 of 3 kernel checks fail: 8-bit t, one query"):
        eight_bits.check_codes("cpu", toy=True)
    with pytest.raises(ResultsDifferError, match=r"exact, 8-bit t as timed is wrong on decode \(2, 2, 1, 1, 70, 16\)"):
        kernels.decode(kernels.TOY[0], "cpu", 1)


@interpreted
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_no_figures_of_a_shape_at_which_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Right where kernels are checked, and wrong where they are timed."""
    right = kernels.half_width_attention
    monkeypatch.setattr(kernels, "half_width_attention", lambda *args, **options: 1.1 * right(*args, **options))
    with pytest.raises(ResultsDifferError, match=rf"exact as timed is wrong on {kind} \(2, 2, 1, 1, 70, 16\)"):
        getattr(kernels, kind)(kernels.TOY[0], "cpu", 1)


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
@pytest.mark.parametrize("eight_bits", [False, True])
def test_tuning_checks_each_cut(
    eight_bits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = [row for _, new in tuning.run(device="cpu", repeats=1, toy=True, eight_bits=eight_bits) for row in new]
    assert rows[0] == {"kind": "assembler", "ptxas": ".".join(map(str, launch.assembler()))}
    assert rows[1:]
    assert all(row["error"] <= row["allowed"] for row in rows[1:])
    assert all(list(row["of_copy"]) == ["exact, 8-bit t" if eight_bits else "exact"] for row in rows[1:])
    right = attention.launch
    monkeypatch.setattr(attention, "launch", lambda *args: 1.1 * right(*args))
    options = ["--eight-bits"] if eight_bits else []
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--toy", "--tune", "--repeats", "1", *options])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit_.value.code == 1
    assert "no figures: cut (8, 32, 4, 2), splits 1, is wrong on (2, 2, 1, 1, 70, 16)" in capsys.readouterr().err


@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_refused_cut_is_told_with_its_bits_and_without_the_device(
    eight_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "compile_ahead", lambda function, calls: ([], dict.fromkeys(calls, "too large")))
    steps = tuning.run(device="cuda", repeats=1, eight_bits=eight_bits)
    next(steps)
    _, rows = next(steps)
    cuts = [(shape, cut, eight_bits) for shape in tuning.SHAPES for cut in tuning.variants(shape)]
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
    assert kernels.NOTED[0].coded_bytes == 8 * 32 * 32_768 * (64 + 4 + 256)
    assert kernels.NOTED[0].key_bytes == (3 * 8 * 32 * 32_768 * 128, 4 * 8 * 32 * 32_768 * 128)


def test_clock_gives_the_median_and_its_surroundings() -> None:
    times = clock(lambda: torch.ones(1000).sum(), device="cpu", repeats=10)
    assert 0 < times.low <= times.median <= times.high


def test_a_process_that_dies_is_reported_and_holds_nothing_up() -> None:
    good, bad = compile_ahead(os._exit, [(3,)], workers=1)
    assert good == []
    assert bad == {(3,): "its process ended with code 3"}
