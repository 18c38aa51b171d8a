"""Ops and layers take every step at toy size, and give no figures when a candidate computes something else."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from farspan.bench import Row, Steps, checks, layer
from farspan.bench.checks import PASSES, ResultsDifferError
from farspan.bench.layer import Shape, make_candidate
from farspan.layers import Attention

pytestmark = pytest.mark.usefixtures("one_thread")
TOY = Shape(2, 100, 64, 4, 2)
ONCE: dict[str, Any] = {"repeats": 1, "device": "cpu"}
MEGABYTE = 2**20


def take(steps: Steps) -> list[Row]:
    return [row for _, measure in steps for row in measure()]


def test_memory_grows_with_the_length_and_not_its_square_as_in_the_published_formulation() -> None:
    """Recorded at 8192 tokens: 11 times slower, 63 times the memory. Beside other tests a clock tells little.

    The scores of one of eight heads would add 64 MB at 4096.
    """
    short, long = (row for row in take(layer.op_steps([4096], 1024, **ONCE)) if row["kind"] == "op")
    assert set(short["peak_bytes"]) == {*long["peak_bytes"], layer.PUBLISHED} == {*layer.OPS, layer.PUBLISHED}
    assert short["peak_bytes"][layer.PUBLISHED] >= 12 * short["peak_bytes"]["coca-slack"]
    assert short["best_peer"] == layer.PUBLISHED
    assert short["time_over_best_peer"]["coca-slack"]["median"] < 1
    for name in layer.OPS:
        assert long["peak_bytes"][name] <= 4.1 * short["peak_bytes"][name]
        assert long["peak_bytes"][name] <= (100 if name == "alibi" else 60) * MEGABYTE


@pytest.mark.parametrize("alone", [True, False])
def test_windows_beside_full_rope(alone: bool) -> None:
    todo = layer.shapes([300], [1], "cpu", 32, alone)
    rows = take(layer.steps(todo, window=32, alone=alone, **ONCE))
    found = [row for row in rows if "best_rope" in row]
    assert [(row["kind"], row["passes"]) for row in found] == [("op" if alone else "window layer", x) for x in PASSES]
    for row in found:
        timed = set(layer.WINDOWS) - {"rope, window, flex", "rope, window, flash-attn"}
        assert set(row["milliseconds"]) == timed == set(row["peak_bytes"])
        assert set(row["time_over_best_rope"]) == timed - {"rope"}
        assert set(row["missing"]) == {"rope, window, flex", "rope, window, flash-attn"}
        assert (row["window"], row["best_rope"], row["compiler"]) == (32, "rope", "none")
    errors = [row for row in rows if row["kind"] == "check"]
    assert len(errors) == 8
    assert all(0 < row["error"] <= row["allowed"] for row in errors)


def test_gradients_that_are_zero_are_judged_by_the_others() -> None:
    """A query that sees only itself has a score without a gradient; rounding must not look like an infinite error."""
    rows = take(layer.steps([Shape(1, 32, 64, 2, 2)], window=1, alone=True, **ONCE))
    assert max(row["error"] for row in rows if row["kind"] == "check") < 1e-5


@pytest.mark.parametrize("eager", [False, True])
def test_every_step_of_a_layer(monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    only = ("coca-exact", "rope, flash", "rope, cudnn", "rope", "rope, flex", "coca-exact, plain")
    if eager:
        monkeypatch.setattr(torch, "compile", None)
    rows = take(layer.steps(layer.shapes([64], [4], "cpu"), only=only, eager=eager, **ONCE))
    found = [row for row in rows if row["kind"] == "layer"]
    assert [row["passes"] for row in found] == list(PASSES)
    for row in found:
        # Compiled code is shared between layers of one class: were it by mistake, this one would run flash's.
        assert "No viable backend" in row["missing"]["rope, cudnn"]
        assert set(row["time_over_best_rope"]) == {"coca-exact"}
        assert row["compiler"] == ("none" if eager else "aot_eager")
        assert ("rope, flex" in row["missing"]) == (eager or row["passes"] == PASSES[1])
        assert row["missing"]["coca-exact, plain"] == "what the library itself does without CUDA"
    assert {row["attention"] for row in rows if row["kind"] == "check"} >= {"rope", "rope, flash", "coca-exact"}


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("g", [1, 4])
@torch.no_grad()
def test_candidates_compute_their_definition(g: int, window: int | None) -> None:
    shape, x = Shape(2, 33, 32, 4, g), torch.randn(2, 33, 32)
    others = {"rope, cudnn", "coca-exact, cudnn", "coca-slack, cudnn", "rope, window, flash-attn"}
    for name in {*(layer.FULL if window is None else layer.WINDOWS), *layer.OPS} - others:
        made = make_candidate(name, shape, x, alone=False, window=window, compiler=None)
        blocks = [(slice(0, 2), slice(0, 33)), (slice(1, 2), slice(7, 9))]
        assert (checks.pick(made.run(), blocks) - made.twin(torch.float64, blocks)[0]).abs().max() <= 1e-5, name


@pytest.mark.parametrize(("alone", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=str)
@pytest.mark.parametrize("passes", PASSES)
def test_no_figures_when_a_candidate_is_wrong(
    monkeypatch: pytest.MonkeyPatch, passes: str, dtype: torch.dtype, alone: bool
) -> None:
    """By a few percent; gradients are checked by themselves."""
    options: dict[str, Any] = {"alone": alone, "dtype": dtype, **ONCE}
    assert layer.time_shape(layer.OPS, TOY, passes, **options)[-1]["best_rope"] == "rope"
    attend = Attention.attend

    def off(self: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
        if passes == PASSES[0]:
            return 1.05 * attend(self, q, k, v, *args)
        return attend(self, q, k, v + 0.05 * (v - v.detach()), *args)  # the same output, another gradient

    monkeypatch.setattr(Attention, "attend", off)
    for name in layer.OPS:
        with pytest.raises(ResultsDifferError, match=f"{name}, {'output' if passes == PASSES[0] else 'd '}.* is wrong"):
            layer.time_shape((name, "rope"), TOY, passes, **options)


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize(("window", "dtype"), [(32, torch.float32), (2048, torch.bfloat16)])
def test_no_figures_of_a_window_that_is_one_key_off(
    monkeypatch: pytest.MonkeyPatch, window: int, dtype: torch.dtype, more: int
) -> None:
    """Nor of another library's, within its wider limit: that candidate is missing. The small check has it right."""
    right = layer.make_mask
    off = lambda *x, window=None: right(*x, window=window and window + more * (window in (32, 2048)))  # noqa: E731
    monkeypatch.setattr(layer, "make_mask", off)
    shape, options = Shape(1, 300 if window == 32 else 2200, 64, 2, 2), {"alone": True, "dtype": dtype, **ONCE}
    for passes in PASSES:
        with pytest.raises(ResultsDifferError, match=r"rope, window, (output|d .), is wrong"):
            layer.time_shape(("rope", "rope, window"), shape, passes, window=window, **options)
    monkeypatch.setitem(layer.CORES, "flash-attn", lambda *inputs: layer.own(*inputs))
    monkeypatch.setattr(layer, "why_not", lambda *_: None)
    names = ("rope", "rope, window, flash-attn")
    row = layer.time_shape(names, shape, PASSES[0], window=window, **options)[-1]
    assert "flash-attn, output, is wrong by" in row["missing"][names[1]]
    assert set(row["milliseconds"]) == {"rope"}


@pytest.mark.parametrize("n", [100, 1024])
def test_no_figures_when_one_query_is_wrong(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Any query of a small shape; of a large one those at edges, in any of its sequences."""
    attend = Attention.attend

    def off(self: Attention, q: torch.Tensor, *inputs: Any) -> torch.Tensor:
        out = attend(self, q, *inputs)
        out[0, :, 37 if n == 100 else out.shape[2] // 2 - 1] *= 1 if n != out.shape[2] else 1.1
        return out

    monkeypatch.setattr(Attention, "attend", off)
    with pytest.raises(ResultsDifferError, match="rope, output, is wrong"):
        layer.time_shape(("rope",), Shape(2, n, 64, 2, 2), PASSES[0], alone=True, **ONCE)


def test_another_librarys_candidate_without_memory_for_its_check_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    made = make_candidate("rope, flash", TOY, torch.randn(2, 100, 64), alone=True, window=None, compiler=None)
    missing: dict[str, str] = {}
    like = torch.empty(2, 100, 4, 16)
    for ours in (False, True):
        candidates = {"rope": made._replace(ours=True), "flash": made._replace(twin=full, ours=ours)}
        with pytest.raises(RuntimeError, match="out of memory") if ours else nullcontext():
            rows, seconds, _ = checks.compare(candidates, like, PASSES[1], missing=missing, repeats=1, device="cpu")
            assert missing == {"flash": "OutOfMemoryError: CUDA out of memory."}
            assert [row["attention"] for row in rows] == ["rope"] == list(seconds)
