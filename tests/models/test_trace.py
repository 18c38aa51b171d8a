"""How far a reader of one training step or one decoded token has to go, and that every path calls `coca_attention`."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import farspan
from farspan import FarspanForCausalLM
from farspan.ops import coca_attention
from tests.models.small import make, tokens

ROOT = str(Path(farspan.__file__).parent)


def trace(run: Callable[[], object]) -> Counter[tuple[str, str]]:
    """Count the calls of farspan's Python functions, by file and name."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            calls[code.co_filename, code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def model_of(attention: str, layers: int) -> FarspanForCausalLM:
    return make(attention, num_hidden_layers=layers, dtype=torch.float32)


def training(attention: str, layers: int) -> Counter[tuple[str, str]]:
    model, x = model_of(attention, layers).train(), tokens(2, 16)
    model(x, labels=x).loss.backward()  # makes tables that later calls share
    return trace(lambda: model(x, labels=x))


@torch.no_grad()
def prefill(attention: str, layers: int) -> Counter[tuple[str, str]]:
    model = model_of(attention, layers)
    return trace(lambda: model(tokens(2, 16), use_cache=True))


@torch.no_grad()
def decoding(attention: str, layers: int) -> Counter[tuple[str, str]]:
    model = model_of(attention, layers)
    cache = model(tokens(2, 16), use_cache=True).past_key_values
    model(tokens(2, 1), past_key_values=cache)
    return trace(lambda: model(tokens(2, 1), past_key_values=cache))


def test_a_training_step_is_read_in_ten_files_and_forty_functions() -> None:
    calls = training("coca-exact", 2)
    assert len({file for file, _ in calls}) <= 10
    assert len(calls) <= 40


@pytest.mark.parametrize("attention", ["coca-exact", "coca-slack", "rope"])
@pytest.mark.parametrize("step", [training, decoding])
def test_a_layer_takes_at_most_fifty_calls(step: Callable, attention: str) -> None:
    few, many = (step(attention, layers).total() for layers in (2, 4))
    assert 0 < (many - few) / 2 <= 50


@pytest.mark.parametrize("attention", ["coca-exact", "coca-strict", "coca-slack"])
@pytest.mark.parametrize("step", [training, prefill, decoding])
def test_every_path_calls_the_op_once_per_layer(step: Callable, attention: str) -> None:
    code = coca_attention.__code__
    assert step(attention, 3)[code.co_filename, code.co_qualname] == 3
