"""The cosFormer benchmark compares like with like, and keeps silent otherwise."""

import json
from pathlib import Path

import pytest
import torch

from farspan.benchmark import cosformer
from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.measure import in_fresh_process
from farspan.ops import cosformer_attention
from tests.command_line import called, refusal

MEGABYTE = 2**20


def test_the_published_formulation_is_cosformer() -> None:
    q, k, v = torch.randn(3, 2, 3, 50, 16, dtype=torch.float64).unbind()
    published = cosformer.published_cosformer(q, k, v, 50)
    assert (published - cosformer_attention(q, k, v, max_length=50)).abs().max() <= 1e-12


@pytest.mark.parametrize("passes", cosformer.PASSES)
def test_no_figures_when_results_differ(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cosformer, "published_cosformer", lambda q, k, v, max_length: v + q + k)
    with pytest.raises(ResultsDifferError, match="published and chunked cosFormer differ"):
        cosformer._against_published(64, passes, 1, "cpu", 0)
    wrong = (lambda q, k, v, backend: q + k + v * len(backend), {})
    monkeypatch.setitem(cosformer.CHECKS, "linear", wrong)
    with pytest.raises(ResultsDifferError, match="linear and its reference differ"):
        cosformer._check("cpu", 0)


def test_the_fit_finds_the_exponent_and_the_worst_point() -> None:
    lengths = [1000, 2000, 4000, 8000]
    assert cosformer.fit(lengths, [1e-6 * n**2 for n in lengths])["exponent"] == 2
    row = cosformer.fit(lengths, [1.0, 2.0, 4.0, 16.0])
    assert row["exponent"] > 1.2
    assert row["largest_deviation"] > 0.2


def test_the_crossover_ignores_a_lucky_short_text() -> None:
    rows = [{"length": n, "speedup": s} for n, s in ((256, 1.5), (512, 0.8), (1024, 1.2), (2048, 3.0))]
    assert cosformer.crossover(rows)["length"] == 1024
    assert cosformer.crossover([{"length": 64, "speedup": 0.5}])["length"] is None


def test_memory_grows_with_the_length() -> None:
    """Beyond the output itself, a segment's features: the published formulation would take 4 GB at 8192."""
    short, long = (in_fresh_process(cosformer._length, n, 0, "cpu", 0)["peak_bytes"] for n in (2048, 8192))
    assert long <= 4 * short + 16 * MEGABYTE
    assert long <= 70 * MEGABYTE


def test_the_published_formulation_is_far_behind() -> None:
    """How far in time, a recorded run says: beside other tests a clock tells little, memory as much as ever."""
    row = in_fresh_process(cosformer._against_published, 512, "forward", 1, "cpu", 0)
    assert row["memory_ratio"] >= 15
    assert min(row["seconds"]["published"]) > min(row["seconds"]["farspan"])


@pytest.mark.parametrize("timed", [cosformer._length, cosformer._against_softmax])
def test_no_figures_when_what_is_timed_is_wrong(monkeypatch: pytest.MonkeyPatch, timed) -> None:
    assert timed(300, 1, "cpu", 0)["error_as_timed"] <= 1e-5
    right = cosformer.cosformer_attention

    def off(*args, backend="auto", **options):
        return right(*args, backend=backend, **options) * (1.01 if backend == "auto" else 1)

    monkeypatch.setattr(cosformer, "cosformer_attention", off)
    with pytest.raises(ResultsDifferError, match="cosformer, 300 tokens: what is timed differs"):
        timed(300, 1, "cpu", 0)


def test_the_command_writes_what_it_measured(tmp_path) -> None:
    path = tmp_path / "cosformer.json"
    options = ("--quick", "--repeats", 1, "--published-length", 128)
    status, out, err = called("bench", "cosformer", *options, "--out", path)
    assert status == 0, err
    rows = json.loads(path.read_text())["rows"]
    kinds = ["check", "length", "length", "fit", "softmax", "softmax", "crossover", "published", "published"]
    assert [row["kind"] for row in rows] == kinds
    assert "against cosFormer as published" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--softmax-lengths", "a"], "--softmax-lengths must be whole numbers ≥ 1 separated by commas, got 'a'; try"),
        (["--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in refusal("bench", "cosformer", *arguments, cwd=tmp_path)
