"""A tiny run, also in processes of its own."""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from farspan.data import prepare
from farspan.training import TrainConfig, checkpoint, train


def tokens(folder: Path) -> str:
    """A few hundred kilobytes of text as byte tokens."""
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}, and that is that.\n" for i in range(6000)))
    out = folder / "tokens"
    prepare([str(text)], str(out), tokenizer="bytes", valid_share=0.0, workers=1)
    return str(out)


def config(source: str, **changes: Any) -> TrainConfig:
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
    return TrainConfig.parse(values)


def run_quietly(out: str, source: str, *changes: str) -> None:
    """Train in this process, on one thread."""
    torch.set_num_threads(1)
    train(config(source, **{key: json.loads(value) for key, value in (pair.split("=") for pair in changes)}), out)


def run_out_of_room(out: str, source: str) -> None:
    """Train until the second checkpoint, for which this process may write no more than 2 kB a file."""
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


def run_with_others(out: str, source: str) -> None:
    """Train as one of several processes, and print how many there are."""
    run_quietly(out, source)
    print(PartialState().num_processes)
