"""The timer measures what it says, the checker sees what is wrong, and rows survive what ends a run."""

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from farspan import bench
from farspan.bench import Steps, cosformer, layer, model, timing, unfinished
from farspan.bench.checks import ResultsDifferError, check
from farspan.bench.timing import in_turn, peak_bytes, time_candidates
from farspan_cli import bench as command
from tests.command_line import called, refusal

MEGABYTE = 2**20


def test_peak_memory_is_the_most_that_tensors_held_at_once() -> None:
    held = torch.ones(MEGABYTE)

    def call() -> None:
        for size in (3, 2):  # each is freed before the next
            torch.ones(size, MEGABYTE).sum()
        held.data = torch.ones(1)  # what was there before does not count, freed or not

    assert 0 <= peak_bytes(call, "cpu") - 12 * MEGABYTE < 100
    x = torch.ones(MEGABYTE, requires_grad=True)
    assert 0 <= peak_bytes(lambda: (x * x).sum().backward(), "cpu") - 8 * MEGABYTE < 100  # x·grad, twice


def test_calls_take_turns_in_random_orders() -> None:
    made: list[str] = []
    found = in_turn({name: partial(made.append, name) for name in "abc"}, repeats=12, device="cpu")
    assert {name: len(seconds) for name, seconds in found.items()} == dict.fromkeys("abc", 12)
    rounds = ["".join(made[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(order) == list("abc") for order in rounds)
    assert len(set(rounds)) > 3


def test_a_candidate_that_fails_is_missing_unless_it_is_required() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")

    calls: dict[str, Callable[[], Any]] = {"ours": lambda: sum(range(100)), "flash": fail}
    seconds, _ = time_candidates(calls, missing := {}, repeats=3, device="cpu")
    assert missing == {"flash": "OutOfMemoryError: CUDA out of memory."}
    assert set(seconds) == {"ours"}
    with pytest.raises(RuntimeError, match="out of memory"):
        time_candidates(calls, {}, repeats=3, device="cpu", required=["flash"])


def test_on_a_gpu_graphs_are_replayed_and_what_cannot_be_captured_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def capture(call: Callable[[], Any]) -> Callable[[], None]:
        if call.args == ("flash",):  # type: ignore[attr-defined]
            raise RuntimeError("operation not permitted when stream is capturing")
        return partial(made.append, "replayed")

    monkeypatch.setattr(timing, "captured", capture)
    monkeypatch.setattr(timing, "peak_bytes", lambda call, device: call() or 0)
    monkeypatch.setattr(timing, "in_turn", lambda calls, **options: {name: [call()] for name, call in calls.items()})
    calls = {name: partial(made.append, name) for name in ("ours", "flash")}
    seconds, _ = time_candidates(calls, missing := {}, repeats=1, device="cuda", graph=True)
    assert missing == {"flash": "RuntimeError: operation not permitted when stream is capturing"}
    assert set(seconds) == {"ours"}
    assert made == ["ours", "flash", "replayed", "replayed"]  # tried again when all graphs exist, then timed


@pytest.mark.parametrize("wrong", [1.01, torch.nan, -1.0])
def test_the_rule_sees_errors_above_twice_the_plain_ones(wrong: float) -> None:
    truth = torch.linspace(1, 2, 50, dtype=torch.float64)
    plain, ours = truth.float() * 1.001, truth.float() * 1.0019
    found = check("ours", ours, truth, plain)
    assert 0 < found["error"] <= found["allowed"] < 2.1e-3
    with pytest.raises(ResultsDifferError, match="ours is wrong by"):
        check("ours", truth.float() * wrong, truth, plain)
    with pytest.raises(ResultsDifferError):
        check("ours", ours[:-1], truth, limit=1.0) if wrong > 1 else check("ours", truth.float() * wrong, truth)


def two_steps(failure: BaseException | None = None) -> Steps:
    def second() -> list[dict[str, Any]]:
        if failure is not None:
            raise failure
        return [{"kind": "b"}, {"kind": "c"}]

    return [("first", lambda: [{"kind": "a", "figure": 1}]), ("second", second)]


def kinds(path: Path) -> list[str]:
    return [row["kind"] for row in json.loads(path.read_text())["rows"]]


SETTINGS: dict[str, Any] = {"kind": "bench-layer", "device": "cpu"}


def test_rows_are_on_disk_after_each_step_and_name_their_kind(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "result.json"
    seen: list[tuple[float, list[str]]] = []

    def progress(done: float, total: float | None, text: str = "", *, phase: str = "") -> None:
        seen.append((done, kinds(unfinished(out)) if unfinished(out).exists() else []))

    bench.run(two_steps(), out=out, progress=progress, **SETTINGS)
    assert seen == [(0, []), (1, ["a"]), (2, ["a", "b", "c"])]
    assert kinds(out) == ["a", "b", "c"]
    assert [path.name for path in out.parent.iterdir()] == ["result.json"]
    result = json.loads(out.read_text())
    assert (result["schema"], result["kind"], result["seed"]) == (2, "bench-layer", 0)
    with pytest.raises(FileExistsError, match="add --force"):
        bench.run([("never", pytest.fail)], out=out, **SETTINGS)
    bench.run(two_steps()[:1], out=out, force=True, **SETTINGS)
    assert kinds(out) == ["a"]


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "result.json.unfinished has the rows so far; the same command begins anew"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "out of memory; give shorter lengths"),
        (ResultsDifferError("rope is wrong"), 2, "farspan: no figures: rope is wrong"),
    ],
    ids=["interrupt", "memory", "wrong"],
)
def test_a_stopped_run_keeps_its_rows_unless_they_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: BaseException, status: int, message: str
) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(layer, "steps", lambda *args, **options: two_steps(failure))
    found, _, err = called("bench", "layer", "--out", out)
    assert found == status
    assert message in err
    assert len(err.splitlines()) == 1
    assert not out.exists()
    assert (kinds(unfinished(out)) == ["a"]) if "wrong" not in message else not unfinished(out).exists()


def test_an_out_that_exists_or_cannot_be_written_is_noticed_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model, "training", lambda *args, **options: [("never", pytest.fail)])
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path, tmp_path / "file", tmp_path / "file" / "result.json"):
        status, _, err = called("bench", "model", "--preset", "tiny", "--out", out)
        assert (status, len(err.splitlines())) == (2, 1)
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "attention --lengths a,b",
            "--lengths must be whole numbers from 1 to 16,777,216, separated by commas, got 'a,b'",
        ),
        ("attention --lengths 99999999999999999999", "--lengths must be whole numbers from 1 to 16,777,216, separated"),
        ("attention --device tpu", "Invalid value for '--device': Value error, 'tpu' is not one of 'cpu', 'cuda'"),
        ("attention --repeats 0", "'--repeats'"),
        ("layer --layouts hybrid-cosformer --window 8", "window must be left out of 'hybrid-cosformer'"),
        ("layer --groups 3", "groups must be of (1, 2, 4, 8), query heads per key head, got 3"),
        ("layer --layouts hybrid-rop", "did you mean 'hybrid-rope'"),
        ("model --layouts llama --preset tiny", "got 'llama'"),
        ("decode --preset 7b --contexts 8", "preset"),
        ("decode --preset tiny --layouts cosformer", "layouts must have a softmax in every layer, got 'cosformer'"),
        ("decode --batch 0", "--batch must be whole numbers from 1 to"),
    ],
)
def test_bad_input_exits_2_with_one_line_before_measuring(arguments: str, message: str, tmp_path: Path) -> None:
    assert message in refusal("bench", *arguments.split(), "--out", "result.json", cwd=tmp_path)


def test_what_is_asked_for_wins_over_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(layer, "op_steps", lambda *given, **options: asked.append(given) or [])
    for arguments in (["--lengths", "64,128"], ["--published-length", "100"]):
        assert called("bench", "attention", "--quick", *arguments)[0] == 0
    assert asked == [([64, 128], 4096), ([1024, 4096], 100)]


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.004, "high": median + 0.003}


def some_rows() -> list[dict[str, Any]]:
    names = ["rope", "coca-exact, cudnn", "coca-slack, published"]
    layers: dict[str, Any] = {"kind": "layer", "passes": "forward and backward", "b": 1, "n": 32_768, "d": 128, "g": 32}
    layers |= {"milliseconds": dict.fromkeys(names, spread(1234.567)), "peak_bytes": dict.fromkeys(names, 123e9)}
    layers |= {"time_over_best_rope": {names[1]: spread(1.074)}, "missing": {"x": "a reason in [brackets]"}}
    check = {"kind": "check", "attention": "rope", "error": 1e-6, "allowed": 1e-4}
    step: dict[str, Any] = {"kind": "decode", "context": 131_072, "batch": 32, "mode": "graph", "attention": "pope"}
    step |= {
        "tokens_per_second": 123_456.0,
        "cache_over_rope": 0.75,
        "speed_over_rope": spread(1.07),
        "peak_bytes": 1e6,
    }
    return [layers, check, step, {"kind": "missing", "attention": "rope", "why": "no memory"}]


def test_tables_have_every_figure_the_missing_and_the_nearest_check() -> None:
    console = Console(file=io.StringIO(), width=120)
    command.print_rows(console, some_rows())
    printed = console.file.getvalue()
    for figure in ("1,234.567", "1.074", "1.070–1.077", "123,000.0 MB", "131072", "123456", "0.750", "1.066–1.073"):
        assert figure in printed
    assert "missing: rope: no memory\nmissing: x: a reason in [brackets]\n" in printed
    assert "1 checks passed; nearest to its limit: rope, relative error 1.0e-06 (allowed: 1.0e-04)" in printed


def test_gpu_shapes_cover_the_record_and_fit() -> None:
    assert {shape.b * shape.n for shape in cosformer.shapes(cosformer.LENGTHS)} == {cosformer.TOKENS}
    layers = layer.shapes(list(layer.SHAPES), [1, 4], "cuda")
    assert {shape.b * shape.n for shape in layers} == {32_768}
    assert {shape.d for shape in layers} == {64, 128}
