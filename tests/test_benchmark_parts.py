"""Each benchmark says beforehand how many steps it will take, so that a progress bar ends where the work does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farspan.benchmark import attention, cosformer, cosformer_gpu, cosformer_tuning, decode, layer, model


def steps(found: Iterator[tuple[str, list[dict[str, Any]]]]) -> int:
    return len(list(found))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is taken, and what it would measure is made up."""
    row = {"length": 8, "median": 1.0, "speedup": 1.0, "missing": {}}
    for module in (attention, cosformer):
        monkeypatch.setattr(module, "in_fresh_process", lambda function, *arguments: row | {"length": arguments[0]})
    monkeypatch.setattr(layer, "matmul_peak", lambda device, dtype: 1e12)
    for module in (layer, cosformer_gpu):
        monkeypatch.setattr(module, "check", lambda *arguments: [])
        monkeypatch.setattr(module, "compare", lambda *arguments, **options: dict(row))
    monkeypatch.setattr(cosformer_tuning, "compile_ahead", lambda function, calls: (calls, {}))
    monkeypatch.setattr(cosformer_tuning, "_measure", lambda *arguments: [])
    monkeypatch.setattr(decode, "make_model", lambda *arguments, **fields: torch.nn.Identity())
    monkeypatch.setattr(decode, "why_no_kernel", lambda config, device: None if device == "cuda" else "no GPU")
    monkeypatch.setattr(torch.nn.Identity, "config", None, raising=False)
    for name in ("decode", "best", "prefill"):
        monkeypatch.setattr(decode, name, lambda *arguments, **options: [])


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("lengths", [[64], [64, 128], [64, 128, 512]])
def test_attention_alone(lengths: list[int]) -> None:
    settings = {"repeats": 1, "device": "cpu", "seed": 0}
    assert steps(attention.run(lengths, 64, **settings)) == attention.parts(lengths)
    for peers in ([32], lengths):
        assert steps(cosformer.run(lengths, peers, 64, **settings)) == cosformer.parts(lengths, peers)
    assert steps(cosformer_gpu.run(lengths, **settings)) == cosformer_gpu.parts(lengths)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("groups", [[1], [1, 4]])
@pytest.mark.parametrize("lengths", [[64], [512, 2048, 16_384]])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_layer(lengths: list[int], groups: list[int], device: str) -> None:
    shapes = layer.shapes(lengths, groups, device)
    assert steps(layer.run(shapes)) == layer.parts(shapes)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("compile", ["none", "one", "all"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("contexts", "batches", "prompts"), [([8], [1], []), ([8, 32], [1, 2, 4], [16, 64])])
def test_decoding(contexts: list[int], batches: list[int], prompts: list[int], compile: str, device: str) -> None:
    found = decode.run("tiny", contexts=contexts, batches=batches, prompts=prompts, compile=compile, device=device)
    assert steps(found) == decode.parts(contexts, batches, prompts, compile)


@pytest.mark.usefixtures("unmeasured")
def test_tuning_where_every_variant_runs() -> None:
    pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")
    assert steps(cosformer_tuning.run(device="cuda", repeats=1, widths=(64,))) == cosformer_tuning.parts((64,))


def test_the_whole_model() -> None:
    one = ["rope"]
    trained = steps(model.training("tiny", variants=one, rows=1, length=8, repeats=1, compile=False))
    assert trained == model.parts(one, read=False)
    assert trained + steps(model.window("tiny", variants=one, length=16)) == model.parts(one)
