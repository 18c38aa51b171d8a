"""The benchmark of cosFormer on a GPU takes every step at toy size, and keeps silent when a kernel is wrong."""

import io
import types

import pytest
import torch
from rich.console import Console

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.benchmark import cosformer_gpu, cosformer_tuning, linear_peers
from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.clock import UNFAIR, Times
from farspan.ops import cosformer_attention
from farspan.ops.triton import linear
from farspan_cli.bench import show_linear

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are for the interpreter, without a GPU")


def quadratic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, normalize: bool) -> torch.Tensor:
    """What flash-linear-attention computes of features, (b, n, h, ·), written out."""
    weights = (q.transpose(1, 2) @ k.transpose(1, 2).mT).tril()
    total = weights.sum(-1, keepdim=True) if normalize else 1.0
    return (weights @ v.transpose(1, 2) / total).transpose(1, 2)


@interpreted
def test_every_step_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cosformer_gpu, "flash_linear_attention", lambda device, quick: (quadratic, {"other": "not there"})
    )
    rows = [row for _, new in cosformer_gpu.run([], repeats=1, device="cpu", seed=0, toy=True) for row in new]
    checks = [row for row in rows if row["kind"] == "check"]
    assert {row["attention"] for row in checks} == {"triton", "chunked", "fla"}
    assert all(row["error"] <= row["allowed"] for row in checks)
    found = [row for row in rows if row["kind"] == "linear"]
    assert [row["passes"] for row in found] == list(cosformer_gpu.PASSES)
    for row in found:
        ours, theirs = (row["milliseconds"][name] for name in ("triton", "chunked"))
        assert row["speedup"]["chunked"]["median"] == pytest.approx(theirs["median"] / ours["median"])
        assert {"fla", "flash softmax", "fla, features given", "fla, features given, numerators alone"} <= {
            *row["speedup"]
        }
        assert row["missing"] == {"other": "not there"}
    console = Console(file=io.StringIO(), width=300)
    show_linear(console, rows)
    printed = console.file.getvalue()
    assert "missing: other: not there" in printed
    assert "checked against float64: the worst of 12 is" in printed


@interpreted
def test_no_figures_when_a_contestant_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (lambda q, k, v, normalize: 1.2 * quadratic(q, k, v, normalize=normalize), {})
    monkeypatch.setattr(cosformer_gpu, "flash_linear_attention", lambda device, quick: wrong)
    with pytest.raises(ResultsDifferError, match="of 12 results at width 16 fail their check: fla, output"):
        list(cosformer_gpu.run([], repeats=1, device="cpu", seed=0, toy=True))
    right = cosformer_gpu.cosformer_attention
    monkeypatch.setattr(cosformer_gpu, "flash_linear_attention", lambda device, quick: (None, {}))
    monkeypatch.setattr(cosformer_gpu, "cosformer_attention", lambda *x, **options: 1.1 * right(*x, **options))
    with pytest.raises(ResultsDifferError, match=r"triton, output.*chunked, output"):
        list(cosformer_gpu.run([], repeats=1, device="cpu", seed=0, toy=True))


@interpreted
def test_tuning_checks_each_cut_and_puts_the_table_back(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(linear.PAIRS)
    rows = [row for _, new in cosformer_tuning.run(device="cpu", repeats=1, toy=True) for row in new]
    assert [row["passes"] for row in rows] == list(cosformer_gpu.PASSES)
    right = cosformer_gpu.cosformer_attention
    monkeypatch.setattr(cosformer_gpu, "cosformer_attention", lambda *x, **options: 1.1 * right(*x, **options))
    with pytest.raises(ResultsDifferError):
        list(cosformer_tuning.run(device="cpu", repeats=1, toy=True))
    assert table == linear.PAIRS


@interpreted
def test_a_peer_that_no_graph_can_hold_has_no_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def clock(call: object, *, device: str, repeats: int, graph: bool = True) -> Times:
        if graph and next(calls) == 1:  # ours is the first, "chunked" the second
            raise RuntimeError("operation not permitted when stream is capturing")
        return Times(1.0, 1.0, 1.0, graph)

    monkeypatch.setattr(cosformer_gpu, "clock", clock)
    row = cosformer_gpu.compare(cosformer_gpu.Shape(1, 1, 66, 16), "forward", "cpu", 1, None)
    assert {*row["speedup"]} == {"flash softmax"}
    assert row["missing"] == {"chunked": UNFAIR}
    assert row["milliseconds"]["chunked"]["graph"] is False


def test_features_are_cosformers() -> None:
    q, k, v = torch.randn(3, 2, 50, 3, 8, dtype=torch.float64) + 1
    waves = tuple(
        f(torch.pi / 100 * torch.arange(50, dtype=torch.float64))[:, None, None] for f in (torch.cos, torch.sin)
    )
    out = quadratic(linear_peers.features(q, waves), linear_peers.features(k, waves), v, normalize=True)
    want = cosformer_attention(*(x.transpose(1, 2) for x in (q, k, v)), max_length=50).transpose(1, 2)
    assert (out - want).abs().max() <= 1e-12


def test_without_a_gpu_or_the_package_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_peers.flash_linear_attention("cpu", quick=True) == (None, {"fla": "it needs a CUDA device"})
    monkeypatch.setattr(linear_peers, "find_spec", lambda name: None)
    peer, missing = linear_peers.flash_linear_attention("cuda", quick=True)
    assert peer is None
    assert missing == {"fla": "not installed; pip install fla-core"}


def test_a_quick_run_leaves_few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [types.SimpleNamespace(num_warps=w, num_stages=s) for w in (2, 4) for s in (2, 3, 4)]
    tuner = types.SimpleNamespace(configs=list(variants), run=None, fn=None)
    lone = types.SimpleNamespace(configs=[variants[0], variants[1]], run=None, fn=None)
    module = types.SimpleNamespace(a=types.SimpleNamespace(run=None, fn=tuner), b=lone, c=3, d=None)
    monkeypatch.setattr(linear_peers, "import_module", lambda name: module)
    assert linear_peers.keep_few_variants(("any",)) == 3
    assert tuner.configs == [variants[3], variants[4]]
    assert lone.configs == [variants[0]]


def test_the_table_has_both_widths_and_as_many_tokens_everywhere() -> None:
    shapes = cosformer_gpu.shapes(cosformer_gpu.LENGTHS)
    assert {shape.d for shape in shapes} == {64, 128}
    assert {shape.b * shape.n for shape in shapes} == {cosformer_gpu.TOKENS}
