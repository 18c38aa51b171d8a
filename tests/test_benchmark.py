"""The benchmark measures what it says, and keeps silent when results differ."""

import json
import os
import subprocess
import sys

import pytest
import torch

from farspan.benchmark import attention, model
from farspan.benchmark.agree import ResultsDifferError
from farspan.benchmark.measure import in_fresh_process, measure, measure_once
from farspan.ops import Rotary, coca_attention
from farspan.results import write_result

MEGABYTE = 2**20


def _touch(megabytes: int) -> int:
    torch.ones(1)
    return measure(lambda: torch.ones(megabytes * MEGABYTE // 4), repeats=1, device="cpu").peak_bytes


def test_peak_memory_is_what_was_touched() -> None:
    assert 60 * MEGABYTE <= in_fresh_process(_touch, 64) <= 72 * MEGABYTE


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cpu"])
def test_every_gpu_is_waited_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    measure_once(lambda: None, device)
    assert waited == ([] if device == "cpu" else [device])


def test_the_published_formulation_is_slack_coca() -> None:
    q, v, t = torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16), torch.rand(1, 2, 50, 8)
    published = attention.published_coca(q, t, v, Rotary(16))
    assert torch.allclose(published, coca_attention(q, t, v, rotary=Rotary(16), form="slack"), atol=1e-5)


def test_no_figures_when_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "published_coca", lambda q, t, v, rotary: v)
    with pytest.raises(ResultsDifferError, match="published and fused CoCA differ"):
        attention._against_published(64, 1, "cpu", 0)
    monkeypatch.setitem(attention.CHECKS, "rope", (lambda q, k, v, backend: q + k + v * len(backend), {}))
    with pytest.raises(ResultsDifferError, match="rope and its reference differ"):
        attention.check("cpu", 0)


def test_the_whole_model_is_timed_in_turn_and_its_window_weighed() -> None:
    options = {"variants": ("rope", "coca-exact"), "device": "cpu"}
    steps = model.training("tiny", rows=2, length=16, repeats=3, compile=False, **options)
    rows = [row for _, new in steps for row in new]
    assert [row["kind"] for row in rows] == ["check", "training", "training"]
    rope, coca = rows[1:]
    assert rope["time_over_rope"] == 1.0
    assert coca["parameters"] < rope["parameters"]
    assert all(len(row["seconds"]) == 3 and 0 < row["mfu"] < 1 for row in rows[1:])
    (_, [read]), *_ = model.window("tiny", length=300, chunk=64, **options)
    assert read["peak_bytes"] >= read["weight_bytes"] == 4 * rope["parameters"]


@pytest.mark.parametrize("name", ["coca-exact", "coca-slack", "alibi"])
def test_memory_grows_with_the_length_not_its_square(name: str) -> None:
    """Four times the tokens, at most about four times the memory; the square would be sixteen."""
    short, long = (in_fresh_process(attention._layer, name, n, 1, "cpu", 0)["peak_bytes"] for n in (2048, 8192))
    assert long <= 6 * short + 40 * MEGABYTE
    assert long <= 250 * MEGABYTE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "limit"), [("coca-exact", 32_768, 400e6), ("alibi", 16_384, 260e6)])
def test_long_texts_take_little_memory(name: str, length: int, limit: float) -> None:
    """The recorded run asks the same of ALiBi at 32 768 tokens, which takes too long here."""
    assert in_fresh_process(attention._layer, name, length, 0, "cpu", 0)["peak_bytes"] <= limit


@pytest.mark.slow
def test_the_published_formulation_is_far_behind() -> None:
    """Recorded: 11 times slower, 63 times the memory. Beside other tests a clock tells little: faster will do here."""
    row = in_fresh_process(attention._against_published, 8192, 1, "cpu", 0)
    assert row["memory_ratio"] >= 50
    assert min(row["seconds"]["published"]) > min(row["seconds"]["farspan"])


def test_a_killed_process_is_an_error_not_an_endless_wait() -> None:
    with pytest.raises(ChildProcessError, match=r"process of _exit\(9,\) died, perhaps for want of memory"):
        in_fresh_process(os._exit, 9)


def test_results_carry_their_provenance_and_are_written_whole(tmp_path) -> None:
    path = tmp_path / "deep" / "result.json"
    write_result(path, [{"a": 1}], device="cpu", seed=3)
    result = json.loads(path.read_text())
    assert set(result) == {"schema", "command", "commit", "versions", "device", "seed", "rows"}
    assert result["rows"] == [{"a": 1}]
    with pytest.raises(TypeError):
        write_result(path, [{"a": object()}], device="cpu", seed=3)
    assert json.loads(path.read_text()) == result
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def farspan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "farspan_cli", *arguments], capture_output=True, text=True)


def test_command_line_help_shows_an_example() -> None:
    done = farspan("bench", "attention", "--help")
    assert done.returncode == 0
    assert "farspan bench attention --lengths" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "a,b"], "--lengths must be whole numbers ≥ 1 separated by commas, got 'a,b'; try"),
        (["--lengths", "0"], "--lengths must be whole numbers ≥ 1"),
        (["--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["--repeats", "0"], "'--repeats': Input should be greater than or equal to 1"),
        (["--repetas", "3"], "No such option: --repetas"),
    ],
)
def test_command_line_bad_input_exits_2_with_one_line(arguments: list[str], message: str) -> None:
    done = farspan("bench", "attention", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
