"""The benchmark of a layer takes every step at toy size, and keeps silent when a layer computes something else."""

import io
import sys

import pytest
import torch
from rich.console import Console

from farspan.benchmark import layer, layer_checks, layer_peers
from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.layer_peers import Peer, Shape, contestants, family_of
from farspan.layers import Attention
from farspan_cli import main
from farspan_cli.bench_gpu import show_layer

pytestmark = pytest.mark.usefixtures("one_thread")
ONLY = {"coca-exact", "rope, flash", "rope, cudnn"}
"""torch.compile takes a second for each."""
TOY = Shape(2, 33, 32, 4, 1)


def test_every_step_at_toy_size() -> None:
    [shape] = layer.shapes([64], [4], "cpu")
    rows = [row for _, new in layer.run([shape], repeats=5, only=ONLY) for row in new]
    checks = [row for row in rows if row["kind"].startswith("check") and "error" in row]
    assert {row["attention"] for row in checks} >= {"rope", "coca-exact", "coca-slack", "coca-strict", "rope, flash"}
    assert all(row["error"] <= row["allowed"] for row in checks)
    assert {row["attention"] for row in rows if row["kind"] == "check as timed"} == {"coca-exact", "rope, flash"}
    found = [row for row in rows if row["kind"] == "layer"]
    assert [row["passes"] for row in found] == list(layer.PASSES)
    for row in found:
        # Compiled code is shared between layers of one class: were it by mistake, this one would run flash's.
        assert "rope, cudnn" not in row["milliseconds"]
        assert "No viable backend" in row["missing"]["rope, cudnn"]
        assert row["best_rope"] == "rope, flash"
        assert set(row["time_over_best_rope"]) == {"coca-exact"}
        assert all(0 < share < 1 for share in row["of_matmul_peak"].values())
    console = Console(file=io.StringIO(), width=300)
    show_layer(console, rows)
    printed = console.file.getvalue()
    assert "missing: rope, cudnn: " in printed
    assert "checked against float64: the worst of" in printed


def test_nothing_is_compiled_when_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    [shape] = layer.shapes([64], [1], "cpu")
    names = {"rope", "coca-slack", "rope, flex"}
    rows = [row for _, new in layer.run([shape], repeats=1, only=names, eager=True) for row in new]
    for row in [row for row in rows if row["kind"] == "layer"]:
        assert (row["compiler"], set(row["milliseconds"])) == ("none", {"rope", "coca-slack"})
        assert row["missing"]["rope, flex"] == "FlexAttention is made to be compiled"


def test_ratios_are_of_neighbours_in_time() -> None:
    """A machine that slows down tenfold half way changes neither ratio."""
    slow = [1.0] * 5 + [10.0] * 5
    seconds = {"rope": slow, "rope, flash": [2 * x for x in slow], "coca-exact": [0.9 * x for x in slow]}
    seconds["coca-exact, flash"] = [1.5 * x for x in slow]
    weights = dict.fromkeys(seconds, 1000)
    row = layer.report(TOY, "forward", seconds, weights, 1e12)
    assert row["best_rope"] == "rope"
    assert row["time_over_best_rope"]["coca-exact"] == pytest.approx({"median": 0.9, "low": 0.9, "high": 0.9})
    assert row["time_over_same_kernel"]["coca-exact, flash"]["median"] == pytest.approx(0.75)
    work = layer.operations(TOY, 1000, "forward")
    assert row["teraflops_a_second"]["rope"] == pytest.approx(work / 5.5 / 1e12)
    assert layer.operations(TOY, 1000, layer.PASSES[1]) == 3 * work


@pytest.mark.parametrize("g", [1, 4])
@torch.no_grad()
def test_contestants_of_a_family_compute_the_same(g: int) -> None:
    shape = Shape(2, 33, 32, 4, g)
    layers, missing = contestants(shape, "cpu")
    x, first, compared = torch.randn(2, 33, 32, dtype=torch.float64), {}, []
    assert missing == {}
    for name, found in layers.items():
        if "cudnn" in name:
            continue
        out = found.double()(x)
        assert (out - first.setdefault(family_of(name), out)).abs().max() <= 1e-6, name  # flex works in float32
        compared += [name] * (name != family_of(name))
    assert set(first) == set(layer_peers.FAMILIES)
    assert {"rope, flex", "alibi, flex", "coca-slack, published", "coca-exact, flash"} <= set(compared)


@pytest.mark.parametrize("family", ["coca-exact", "coca-slack"])
def test_plain_preparation_is_its_family_with_gradients(family: str) -> None:
    """Kept from a CPU's contestants, where it is what the family does."""
    own = Attention(32, 4, family, num_key_heads=2)
    peer = Peer(Shape(2, 33, 32, 4, 2), family, layer_peers.by_torch)
    peer.load_state_dict(own.state_dict())
    x, weights = torch.randn(2, 33, 32), torch.randn(2, 33, 32)
    got, want = (layer_checks.results(one, one, x, weights) for one in (peer, own))
    assert all((got[name] - want[name]).abs().max() <= 1e-5 for name in want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_figures_when_a_layer_is_wrong(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    rows = layer_checks.check(TOY, "cpu", dtype)
    assert {row["attention"] for row in rows if "missing" in row} == {
        *(f"{family}, cudnn" for family in layer_peers.WITH_KERNEL), "rope, flex", "alibi, flex",
    }  # fmt: skip
    for method in ("attend", "features"):
        right = getattr(Attention, method)

        def off(self: Attention, q, *args, right=right):
            return right(self, q * 1.1 if self.spec.form == "exact" else q, *args)

        monkeypatch.setattr(Attention, method, off)
    with pytest.raises(ResultsDifferError, match=r"of 14 layers fail their check: coca-exact, d.*coca-exact, flash"):
        layer_checks.check(TOY, "cpu", dtype)


def test_no_figures_when_a_compiled_layer_is_wrong() -> None:
    want = torch.randn(4, 4)
    results = {"d input": want.clone(), "d q_proj.weight": 3 * want}
    assert layer_checks.check_as_timed("rope", results, [want, 3 * want])["error"] == 0
    for wrong in (want + 0.01, want * torch.nan):
        with pytest.raises(ResultsDifferError, match=r"1 of 1 layers fail their check: rope, d q_proj\.weight"):
            layer_checks.check_as_timed("rope", results | {"d q_proj.weight": wrong}, [want, want])


def test_a_training_step_of_a_compiled_layer_is_checked_in_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose gradient of the input is right, while that of a single weight is not."""
    [shape] = layer.shapes([16], [1], "cpu")
    options = {"device": "cpu", "dtype": torch.float32, "repeats": 1, "only": {"rope"}, "peak": 1e12}
    right = layer.as_call

    def off(made, run, x, passes):
        step = right(made, run, x, passes)
        return step if run is made else lambda: (*(got := step())[:-1], 1.01 * got[-1])

    monkeypatch.setattr(layer, "as_call", off)
    with pytest.raises(ResultsDifferError, match=r"rope, d o_proj\.weight: 1\.0e-02 \(allowed: 1\.0e-04\)"):
        layer.compare(shape, "forward and backward", "aot_eager", **options)


def test_the_named_shapes_and_what_is_too_large_for_them() -> None:
    shapes = layer.shapes(list(layer.SHAPES), [1, 4], "cuda")
    assert {shape.d for shape in shapes} == {64, 128}
    assert {shape.h // shape.g for shape in shapes} == {1, 4}
    assert {shape.b * shape.n for shape in shapes} == {32_768}
    with pytest.raises(ValueError, match=r"groups must be of \(1, 2, 4, 8\).*got 3"):
        layer.shapes([512], [3], "cuda")
    missing = contestants(Shape(1, layer_peers.UNROLLED + 1, 1024, 128, 128), "cpu")[1]
    assert set(missing) == {"alibi", "coca-slack, published"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layer", "--groups", "3"], "groups must be of (1, 2, 4, 8)"),
        (["layer", "--lengths", "x"], "--lengths must be whole numbers"),
        (["layer", "--quick", "--lengths", ""], "--lengths must be whole numbers"),
        (["decode", "--compile", "some"], "--compile must be one, all or none, got 'some'"),
        (["decode", "--preset", "7b", "--contexts", "8", "--prompts", "none"], "preset"),
        (["decode", "--batch", "0"], "--batch must be whole numbers ≥ 1 separated by commas, got '0'; try --batch 1,8"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["farspan", "bench", *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    printed = capsys.readouterr().err
    assert done.value.code == 2
    assert message in printed
    assert len(printed.splitlines()) == 1
