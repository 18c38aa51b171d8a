"""Attention and layers take every step at toy size, and give no figures when a candidate computes something else."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farspan.bench import Row, Steps, attention, layer
from farspan.bench.checks import ResultsDifferError, definition
from farspan.bench.layer import PASSES, Peer, Shape, candidates
from farspan.layers import Attention, AttentionSpec
from farspan.ops import Rotary, coca_attention
from farspan.ops.coca import COCA

pytestmark = pytest.mark.usefixtures("one_thread")
TOY = Shape(2, 33, 32, 4, 1)
ONCE: dict[str, Any] = {"repeats": 1, "device": "cpu", "seed": 0}
MEGABYTE = 2**20


def take(steps: Steps) -> list[Row]:
    return [row for _, measure in steps for row in measure()]


def break_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("attend", "features"):
        right = getattr(Attention, method)

        def off(self: Attention, q: torch.Tensor, *args: Any, right: Any = right) -> Any:
            return right(self, q * 1.1 if self.spec.form == "exact" else q, *args)

        monkeypatch.setattr(Attention, method, off)


# The op alone


def test_the_published_formulation_is_slack_coca() -> None:
    q, v, t = torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16), torch.rand(1, 2, 50, 8)
    published = layer.published_coca(q, t, v, Rotary(16))
    assert torch.allclose(published, coca_attention(q, t, v, rotary=Rotary(16), form="slack"), atol=1e-5)


def test_the_published_formulation_is_far_behind_and_no_figures_when_it_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded at 8192 tokens: 11 times slower, 63 times the memory. Beside other tests a clock tells little."""
    [row] = attention.against_published(2048, **ONCE)
    assert row["memory_ratio"] >= 12
    assert min(row["seconds"]["published"]) > min(row["seconds"]["farspan"])
    monkeypatch.setattr(layer, "published_coca", lambda q, t, v, rotary: v)
    with pytest.raises(ResultsDifferError, match="CoCA beside its published formulation, 64 tokens, is wrong"):
        attention.against_published(64, **ONCE)


def test_memory_grows_with_the_length_not_its_square() -> None:
    """Four times the tokens, at most about four times the memory; the scores of one of eight heads would add 64 MB."""
    peaks = []
    for n in (1024, 4096):
        [row] = [x for x in attention.compare(Shape(1, n, 512, 8, 8), PASSES[0], attention.SPECS, **ONCE) if "n" in x]
        peaks.append(row["peak_bytes"])
    for name in attention.SPECS:
        assert peaks[1][name] <= 6 * peaks[0][name] + 40 * MEGABYTE
        assert peaks[1][name] <= (160 if name == "alibi" else 100) * MEGABYTE


@pytest.mark.parametrize("passes", PASSES)
def test_windows_and_layouts_beside_full_rope(passes: str) -> None:
    steps = attention.window_steps([300], 32, ["rope", "hybrid-rope", "hybrid-pope", "coca-exact"], 2, **ONCE)
    rows = take([step for step in steps if f"{passes}, 1" in step[0]])
    [row] = [row for row in rows if row["kind"] == "op"]
    timed = {"rope", "rope, window", "coca-exact, window", "pope, window", "hybrid-rope", "hybrid-pope", "coca-exact"}
    assert set(row["milliseconds"]) == timed == set(row["peak_bytes"])
    assert set(row["time_over_best_rope"]) == timed - {"rope"}
    assert set(row["missing"]) == {"rope, window, flex", "rope, window, flash-attn"}
    assert (row["window"], row["passes"], row["best_rope"]) == (32, passes, "rope")
    assert all(0 < row["error"] <= row["allowed"] for row in rows if row["kind"] == "check")


@pytest.mark.parametrize("passes", PASSES)
def test_no_figures_when_an_op_is_wrong(monkeypatch: pytest.MonkeyPatch, passes: str) -> None:
    """Of a window by one key, and of any op by one percent; gradients are checked by themselves."""
    shape = Shape(1, 300, 64, 2, 2)
    right = attention.make_mask
    monkeypatch.setattr(attention, "make_mask", lambda *x, window: right(*x, window=window and window + 1))
    with pytest.raises(ResultsDifferError, match=r"rope, window, (output|d.), is wrong"):
        attention.compare(shape, passes, {}, window=32, **ONCE)
    monkeypatch.setattr(attention, "make_mask", right)
    attend = Attention.attend

    def off(self: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
        if passes == PASSES[0]:
            return 1.01 * attend(self, q, k, v, *args)
        return attend(self, q, k, v + 0.01 * (v - v.detach()), *args)  # the same output, another gradient

    monkeypatch.setattr(Attention, "attend", off)
    for name, spec in attention.SPECS.items():
        with pytest.raises(ResultsDifferError, match=f"{name}, {'output' if passes == PASSES[0] else 'dv'}, is wrong"):
            attention.compare(shape, passes, {name: spec, "rope": attention.SPECS["rope"]}, **ONCE)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_two_layers_read_and_decode_and_give_no_figures_when_wrong(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rows = attention.two_layers(kind, 64, **ONCE)
    assert [row["attention"] for row in rows] == list(attention.MODELS)
    assert [row["cache_over_rope"] for row in rows] == [1.0, 0.75, 0.75]
    assert all(row["time_over_rope"]["low"] > 0 for row in rows)
    if kind == "decode":  # only decoding takes the path of one query
        zero = [
            entry._replace(run=lambda call: torch.zeros_like(call.q)) if entry.name == "decode_cpu" else entry
            for entry in COCA.entries
        ]
        monkeypatch.setattr(COCA, "entries", zero)
    else:
        right = F.scaled_dot_product_attention
        off = lambda q, *args, **options: right(q, *args, **options) * (q.dtype == torch.float64)  # noqa: E731
        monkeypatch.setattr(F, "scaled_dot_product_attention", off)
    with pytest.raises(
        ResultsDifferError, match="coca-exact, a decoding step" if kind == "decode" else "rope, a prompt"
    ):
        attention.two_layers(kind, 64, **ONCE)


def test_the_half_width_kernel_beside_rope_and_no_figures_when_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = attention.Shape(2, 2, 1, 1, 70, 16)
    [row] = attention.time_decoding(shape, device, 2)
    assert row["speedup"].keys() == row["of_copy"].keys() == {"exact", "slack"}
    assert row["best_peer"] in row["milliseconds"]
    moved = {name: rate * row["milliseconds"][name]["median"] for name, rate in row["terabytes_a_second"].items()}
    assert moved["exact"] / moved[row["best_peer"]] == pytest.approx(3 / 4)
    first, *rest = COCA.entries
    assert first.name == "decode_triton"
    monkeypatch.setattr(COCA, "entries", (first._replace(run=lambda call: 1.1 * first.run(call)), *rest))
    with pytest.raises(ResultsDifferError, match=r"exact, decode \(2, 2, 1, 1, 70, 16\), is wrong"):
        attention.time_decoding(shape, device, 1)


# One layer


@pytest.mark.parametrize(("window", "eager"), [(None, False), (None, True), (16, False)])
def test_every_step_of_a_layer_at_toy_size(monkeypatch: pytest.MonkeyPatch, window: int | None, eager: bool) -> None:
    todo = layer.shapes([64], [4], "cpu", window)
    only = {"coca-exact", "rope, flash", "rope, cudnn", "rope", "rope, flex"} if window is None else None
    if eager or window is not None:
        monkeypatch.setattr(torch, "compile", None)
    rows = take(layer.steps(todo, repeats=5, only=only, window=window, eager=eager))
    checks = [row for row in rows if row["kind"].startswith("check") and "error" in row]
    assert all(row["error"] <= row["allowed"] for row in checks)
    found = [row for row in rows if "best_rope" in row]
    assert [row["passes"] for row in found] == list(PASSES)
    for row in found:
        if window is not None:
            assert row["kind"] == "window layer"
            assert set(row["time_over_best_rope"]) == {f"{name}, window" for name in layer.WINDOWED}
            assert set(row["missing"]) == {"rope, window, flex", "rope, window, flash-attn"}
            continue
        # Compiled code is shared between layers of one class: were it by mistake, this one would run flash's.
        assert "No viable backend" in row["missing"]["rope, cudnn"]
        assert set(row["time_over_best_rope"]) == set(row["time_over_same_kernel"]) == {"coca-exact"}
        assert row["compiler"] == ("none" if eager else "aot_eager")
        if eager:
            assert row["missing"]["rope, flex"] == "FlexAttention is made to be compiled"
    assert {row["attention"] for row in checks} >= {"rope", "coca-exact" if window is None else "pope, window"}


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("g", [1, 4])
@torch.no_grad()
def test_candidates_of_a_spec_compute_the_same(g: int, window: int | None) -> None:
    layers, _ = candidates(Shape(2, 33, 32, 4, g), "cpu", window=window)
    x, compared = torch.randn(2, 33, 32, dtype=torch.float64), []
    first: dict[AttentionSpec, torch.Tensor] = {}
    for name, found in layers.items():
        if "cudnn" not in name:
            out = found.double()(x)
            assert (out - first.setdefault(found.spec, out)).abs().max() <= 1e-6, name  # flex works in float32
            compared.append(name)
    peers = {"rope, flex", "alibi, flex", "coca-slack, published", "coca-exact, flash"}
    assert set(compared) >= (peers if window is None else {"rope, window, flex", "pope, window"})
    assert len(first) == (len(layer.FAMILIES) if window is None else 4)


@pytest.mark.parametrize("family", ["coca-exact", "coca-slack"])
def test_plain_preparation_is_its_family_with_gradients(family: str) -> None:
    """Kept from a CPU's candidates, where it is what the family does."""
    own = Attention(32, 4, family, num_key_heads=2)
    peer = Peer(Shape(2, 33, 32, 4, 2), own.spec, layer.by_torch)
    peer.load_state_dict(own.state_dict())
    x, weights = torch.randn(2, 33, 32), torch.randn(2, 33, 32)
    got, want = (layer.results(one, one, x, weights) for one in (peer, own))
    assert all((got[name] - want[name]).abs().max() <= 1e-5 for name in want)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_figures_when_a_layer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int | None
) -> None:
    rows = layer.check_small(TOY, "cpu", dtype, window)
    assert {row["attention"].split(", ")[-1] for row in rows if "missing" in row} <= {"cudnn", "flex"}
    break_exact(monkeypatch)
    with pytest.raises(ResultsDifferError, match=f"coca-exact{', window' if window else ''}, "):
        layer.check_small(TOY, "cpu", dtype, window)


def test_a_training_step_of_a_compiled_layer_is_checked_in_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose gradient of the input is right, while that of a single weight is not."""
    [shape] = layer.shapes([16], [1], "cpu")
    right = layer.as_call

    def off(made: Attention, run: Any, x: torch.Tensor, passes: str) -> Any:
        step = right(made, run, x, passes)
        return step if run is made else lambda: (*(got := step())[:-1], 1.01 * got[-1])

    monkeypatch.setattr(layer, "as_call", off)
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "repeats": 1, "only": {"rope"}}
    with pytest.raises(ResultsDifferError, match=r"rope, d o_proj\.weight, is wrong by 1\.0e-02 .*allowed: 1\.0e-04"):
        layer.compare(shape, PASSES[1], compiler="aot_eager", **options)


def test_what_is_too_large_is_left_out_with_a_reason() -> None:
    missing = candidates(Shape(1, layer.UNROLLED + 1, 1024, 128, 128), "cpu", compiled=False)[1]
    assert {"alibi", "coca-slack, published"} <= set(missing)


def test_the_definition_has_windows() -> None:
    one = Attention(32, 2, AttentionSpec("pope", window=4)).double()
    q, k, v = one.project(torch.randn(1, 20, 32, dtype=torch.float64))
    assert (definition(one, q, k, v) - attention.own(one, q, k, v)).abs().max() <= 1e-10
