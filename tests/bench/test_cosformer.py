"""The cosFormer benchmark compares like with like, on both devices, and gives no figures otherwise."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.bench import cosformer
from farspan.bench.checks import PASSES, ResultsDifferError
from farspan.ops import cosformer_attention
from tests.command_line import called

MEGABYTE = 2**20
TOY = cosformer.Shape(2, 1, 66, 16)
ONCE: dict[str, Any] = {"repeats": 1, "device": "cpu"}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes are for the interpreter, without a GPU")


def toy(n: int) -> cosformer.Shape:
    return cosformer.Shape(1, 8, n, 64)


@pytest.mark.parametrize("passes", PASSES)
def test_the_published_formulation_is_far_behind(passes: str) -> None:
    """How far in time, a recorded run says: beside other tests a clock tells little, memory as much as ever."""
    row = cosformer.time_shape(["cosformer", "published"], toy(512), passes, **ONCE)[-1]
    assert (row["kind"], row["n"], row["passes"]) == ("linear", 512, passes)
    assert row["peak_bytes"]["published"] >= 15 * row["peak_bytes"]["cosformer"]
    assert row["speedup"]["published"]["median"] > 1


def test_memory_grows_with_the_length() -> None:
    """Beyond the output itself, a segment's features: the published formulation would take 4 GB at 8192."""
    rows = [cosformer.time_shape(["cosformer"], toy(n), PASSES[0], **ONCE)[-1] for n in (2048, 8192)]
    short, long = (row["peak_bytes"]["cosformer"] for row in rows)
    assert long <= 4 * short + 16 * MEGABYTE
    assert long <= 70 * MEGABYTE


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("broken", ["cosformer_attention", "published_cosformer"])
def test_no_figures_when_what_is_timed_is_wrong(monkeypatch: pytest.MonkeyPatch, broken: str, passes: str) -> None:
    right, names = getattr(cosformer, broken), ["cosformer", "published"]

    def off(*args: Any, backend: str = "auto", **options: Any) -> torch.Tensor:
        options |= {"backend": backend} if broken == "cosformer_attention" else {}
        found = right(*args, **options)
        return found if backend == "reference" or options.get("return_state") else found * 1.01

    monkeypatch.setattr(cosformer, broken, off)
    if broken == "cosformer_attention":
        with pytest.raises(ResultsDifferError, match="cosformer, output, is wrong"):
            cosformer.time_shape(names, toy(100), passes, **ONCE)
    else:  # the authors' code, and no reason to lose the other rows
        row = cosformer.time_shape(names, toy(100), passes, **ONCE)[-1]
        assert "published, output, is wrong" in row["missing"]["published"]
        assert set(row["milliseconds"]) == {"cosformer"}


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "cosformer.json"
    options = ("--quick", "--repeats", 1, "--published-length", 256)
    status, out, err = called("bench", "cosformer", *options, "--out", path)
    assert status == 0, err
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if row["kind"] != "check"]
    assert [(row["n"], row["passes"]) for row in rows] == [(256, PASSES[0]), (1024, PASSES[0]), (256, PASSES[1])]
    assert [set(row["speedup"]) for row in rows] == [{"softmax", "published"}, {"softmax"}, {"published"}]
    assert result["kind"] == "bench-cosformer"
    assert "published" in out


# On a GPU


def quadratic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, normalize: bool = True) -> torch.Tensor:
    """What flash-linear-attention computes of features, (b, n, h, ·), written out."""
    weights = (q.transpose(1, 2) @ k.transpose(1, 2).mT).tril()
    total = weights.sum(-1, keepdim=True) if normalize else 1.0
    return (weights @ v.transpose(1, 2) / total).transpose(1, 2)


@interpreted
def test_every_step_of_the_kernels_at_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    monkeypatch.setattr(cosformer, "flash_linear_attention", lambda device: (quadratic, {"other": "not there"}))
    rows = [row for _, measure in cosformer.kernel_steps([TOY], **ONCE) for row in measure()]
    checks = [row for row in rows if row["kind"] == "check"]
    assert {row["attention"] for row in checks} == {"triton", "chunked", "fla"}
    assert all(row["error"] <= row["allowed"] for row in checks)
    found = [row for row in rows if row["kind"] == "linear"]
    assert [row["passes"] for row in found] == list(PASSES)
    for row in found:
        assert set(row["speedup"]) == {"chunked", "fla", "flash softmax"}
        assert row["missing"] == {"other": "not there"}
        assert row["memory_over_least"]["triton"] > 0
        assert 4 * 16 * 33 <= row["state_bytes"] <= 8 * 17 * 34  # 2d × d sums and 2d denominators, in float32
    monkeypatch.setattr(cosformer, "flash_linear_attention", lambda device: (partial(quadratic, normalize=False), {}))
    row = cosformer.time_shape(cosformer.KERNELS, TOY, PASSES[0], **ONCE)[-1]
    assert "fla, output, is wrong" in row["missing"]["fla"]
    assert "fla" not in row["milliseconds"]


def test_plain_attention_is_cosformer_of_the_last_query() -> None:
    q, k, v = torch.randn(3, 2, 50, 3, 8, dtype=torch.float64) + 1
    want = cosformer.by_heads(partial(cosformer_attention, max_length=50))(q, k, v)
    waves = cosformer.angles(50, q)
    assert (cosformer.plain_attention(q[:, -1:], k, v, waves=waves) - want[:, -1:]).abs().max() <= 1e-12
    assert (quadratic(cosformer.features(q, waves), cosformer.features(k, waves), v) - want).abs().max() <= 1e-12


def test_without_a_gpu_or_the_package_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cosformer.flash_linear_attention("cpu") == (None, {"fla": "it needs a CUDA device"})
    monkeypatch.setattr(cosformer, "find_spec", lambda name: None)
    assert cosformer.flash_linear_attention("cuda") == (None, {"fla": "not installed; pip install fla-core"})
