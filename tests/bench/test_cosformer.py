"""The cosFormer benchmark compares like with like, on both devices, and gives no figures otherwise."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.bench import cosformer, timing
from farspan.bench.checks import ResultsDifferError
from farspan.bench.timing import WITH_LAUNCHES
from farspan.ops import cosformer_attention
from tests.command_line import called

MEGABYTE = 2**20
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are for the interpreter, without a GPU")


def test_the_published_formulation_is_cosformer() -> None:
    q, k, v = torch.randn(3, 2, 3, 50, 16, dtype=torch.float64).unbind()
    published = cosformer.published_cosformer(q, k, v, 50)
    assert (published - cosformer_attention(q, k, v, max_length=50)).abs().max() <= 1e-12


@pytest.mark.parametrize("passes", cosformer.PASSES)
def test_the_published_formulation_is_far_behind_and_no_figures_when_it_differs(
    passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far in time, a recorded run says: beside other tests a clock tells little, memory as much as ever."""
    row = cosformer.against_published(512, passes, 1, "cpu", 0)
    assert row["memory_ratio"] >= (15 if passes == "forward" else 8)
    assert min(row["seconds"]["published"]) > min(row["seconds"]["farspan"])
    monkeypatch.setattr(cosformer, "published_cosformer", lambda q, k, v, max_length: v + q + k)
    with pytest.raises(ResultsDifferError, match="cosFormer beside its published formulation, 64 tokens, is wrong"):
        cosformer.against_published(64, passes, 1, "cpu", 0)


def test_the_fit_finds_the_exponent_and_the_worst_point() -> None:
    lengths = [1000, 2000, 4000, 8000]
    assert cosformer.fit(lengths, [1e-6 * n**2 for n in lengths])["exponent"] == 2
    row = cosformer.fit(lengths, [1.0, 2.0, 4.0, 16.0])
    assert row["exponent"] > 1.2
    assert row["largest_deviation"] > 0.2


def test_the_crossover_ignores_a_lucky_short_length() -> None:
    rows = [{"length": n, "speedup": s} for n, s in ((256, 1.5), (512, 0.8), (1024, 1.2), (2048, 3.0))]
    assert cosformer.crossover(rows)["length"] == 1024
    assert cosformer.crossover([{"length": 64, "speedup": 0.5}])["length"] is None


def test_memory_grows_with_the_length() -> None:
    """Beyond the output itself, a segment's features: the published formulation would take 4 GB at 8192."""
    short, long = (cosformer.time_length(n, 0, "cpu", 0)["peak_bytes"] for n in (2048, 8192))
    assert long <= 4 * short + 16 * MEGABYTE
    assert long <= 70 * MEGABYTE


@pytest.mark.parametrize("timed", [cosformer.time_length, cosformer.against_softmax])
def test_no_figures_when_what_is_timed_is_wrong(monkeypatch: pytest.MonkeyPatch, timed: Any) -> None:
    assert timed(300, 1, "cpu", 0)["error"] <= 1e-5
    right = cosformer.cosformer_attention

    def off(*args: Any, backend: str = "auto", **options: Any) -> torch.Tensor:
        return right(*args, backend=backend, **options) * (1.01 if backend == "auto" else 1)

    monkeypatch.setattr(cosformer, "cosformer_attention", off)
    with pytest.raises(ResultsDifferError, match="cosformer, 300 tokens, is wrong"):
        timed(300, 1, "cpu", 0)


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "cosformer.json"
    options = ("--quick", "--repeats", 1, "--published-length", 128)
    status, out, err = called("bench", "cosformer", *options, "--out", path)
    assert status == 0, err
    result = json.loads(path.read_text())
    kinds = ["length", "length", "fit", "softmax", "softmax", "crossover", "published", "published"]
    assert [row["kind"] for row in result["rows"]] == kinds
    assert result["kind"] == "bench-cosformer"
    assert "against cosFormer as published" in out


# On a GPU


def quadratic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, normalize: bool = True) -> torch.Tensor:
    """What flash-linear-attention computes of features, (b, n, h, ·), written out."""
    weights = (q.transpose(1, 2) @ k.transpose(1, 2).mT).tril()
    total = weights.sum(-1, keepdim=True) if normalize else 1.0
    return (weights @ v.transpose(1, 2) / total).transpose(1, 2)


@interpreted
def test_every_step_of_the_kernels_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    take = partial(cosformer.kernel_steps, cosformer.TOY, repeats=1, device="cpu", seed=0)
    monkeypatch.setattr(cosformer, "flash_linear_attention", lambda device: (quadratic, {"other": "not there"}))
    rows = [row for _, measure in take() for row in measure()]
    checks = [row for row in rows if row["kind"] == "check"]
    assert {row["attention"] for row in checks} == {"triton", "chunked", "fla"}
    assert all(row["error"] <= row["allowed"] for row in checks)
    found = [row for row in rows if row["kind"] == "linear"]
    assert [row["passes"] for row in found] == list(cosformer.PASSES)
    for row in found:
        assert set(row["speedup"]) == {"chunked", "fla", "flash softmax"}
        assert row["missing"] == {"other": "not there"}
        assert row["memory_over_least"]["triton"] > 0
    assert "missing: other: not there" in cosformer.tables(rows)
    off = partial(quadratic, normalize=False)
    monkeypatch.setattr(cosformer, "flash_linear_attention", lambda device: (lambda *x, normalize: off(*x), {}))
    with pytest.raises(ResultsDifferError, match="fla, output, width 16, is wrong"):
        take()[0][1]()
    right = cosformer.cosformer_attention
    monkeypatch.setattr(cosformer, "flash_linear_attention", lambda device: (None, {}))
    monkeypatch.setattr(cosformer, "cosformer_attention", lambda *x, **options: 1.1 * right(*x, **options))
    with pytest.raises(ResultsDifferError, match=r"(triton|chunked), output, width 16, is wrong"):
        take()[0][1]()


@interpreted
def test_a_peer_that_no_graph_can_hold_has_no_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    right = cosformer.time_candidates

    def timed(calls: Any, **options: Any) -> timing.Timed:
        found = right(calls, **options)
        found.graphs.update({"triton", "flash softmax"})
        return found

    monkeypatch.setattr(cosformer, "time_candidates", timed)
    [row] = cosformer.compare(cosformer.TOY[0], "forward", "cpu", 1, None, {})
    assert set(row["speedup"]) == {"flash softmax"}
    assert row["missing"] == {"chunked": WITH_LAUNCHES}
    assert row["milliseconds"]["chunked"]["graph"] is False


def test_features_are_cosformers() -> None:
    q, k, v = torch.randn(3, 2, 50, 3, 8, dtype=torch.float64) + 1
    waves = tuple(
        f(torch.pi / 100 * torch.arange(50, dtype=torch.float64))[:, None, None] for f in (torch.cos, torch.sin)
    )
    out = quadratic(cosformer.features(q, waves), cosformer.features(k, waves), v)
    want = cosformer_attention(*(x.transpose(1, 2) for x in (q, k, v)), max_length=50).transpose(1, 2)
    assert (out - want).abs().max() <= 1e-12


def test_without_a_gpu_or_the_package_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cosformer.flash_linear_attention("cpu") == (None, {"fla": "it needs a CUDA device"})
    monkeypatch.setattr(cosformer, "find_spec", lambda name: None)
    assert cosformer.flash_linear_attention("cuda") == (None, {"fla": "not installed; pip install fla-core"})
