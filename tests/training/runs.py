"""A tiny run, also in processes of its own."""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin

from farspan.data import prepare
from farspan.training import TrainConfig, checkpoint, loop, train


def tokens(folder: Path) -> str:
    """A few hundred kilobytes of text as byte tokens."""
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}, and that is that.\n" for i in range(6000)))
    out = folder / "tokens"
    prepare([str(text)], str(out), tokenizer="bytes", valid_share=0.0)
    return str(out)


def settings(source: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """Twelve steps of a model of one small layer."""
    values: dict[str, dict[str, Any]] = {
        "model": {"preset": "tiny", "options": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}},
        "data": {"sources": {source: 1.0}, "length": 16, "batch_size": 8},
        "optimizer": {"steps": 12, "peak_lr": 1e-2, "accumulation": 2},
        "run": {"checkpoint_every": 4},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values[section][key] = value
    return values


def config(source: str, **changes: Any) -> TrainConfig:
    return TrainConfig.parse(settings(source, **changes))


class PowerCutError(Exception):
    """What ends a run in a test as a power cut would."""


@contextmanager
def cut_at(*calls: int) -> Iterator[list[int]]:
    """Raise PowerCutError in place of the n-th steps taken; yield the steps that were asked for."""
    advance, asked = loop._Run.advance, list[int]()

    def cut(self: loop._Run, step: int) -> None:
        asked.append(step)
        if len(asked) - 1 in calls:
            raise PowerCutError
        advance(self, step)

    with patch.object(loop._Run, "advance", cut):
        yield asked


def run_quietly(out: str, source: str, *changes: str) -> None:
    """Train in this process, on one thread. The change stop=N ends it before step N, as a power cut does."""
    torch.set_num_threads(1)
    values = {key: json.loads(value) for key, value in (pair.split("=") for pair in changes)}
    stop, advance = values.pop("stop", None), loop._Run.advance

    def cut(self: loop._Run, step: int) -> None:
        if step == stop:
            print(type(self.network).__name__, PartialState().num_processes)
            sys.exit()
        advance(self, step)

    loop._Run.advance = cut  # type: ignore[method-assign]
    train(config(source, **values), out)
    print(PartialState().num_processes)


def run_sharded(out: str, source: str, *changes: str) -> None:
    """Train under FSDP2. Accelerate begins it on GPUs only, so its state is made here; the rest is its own code."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["FarspanBlock"],
        cpu_ram_efficient_loading=False,
    )
    Accelerator(cpu=True, mixed_precision="no")
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    run_quietly(out, source, *changes)


def run_out_of_space(out: str, source: str) -> None:
    """Train until the second checkpoint, for which this process may write no more than 2 kB per file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save = checkpoint.save_file

    def limited(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "00000008" in str(path):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        save(tensors, path)

    checkpoint.save_file = limited
    try:
        run_quietly(out, source)
    except OSError as error:
        sys.exit(str(error))
