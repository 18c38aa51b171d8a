"""Every task at a size that trains in a second or two."""

import json
from pathlib import Path
from typing import Any

import torch

from farspan.data import Shards, prepare
from farspan.tasks import Material, Task, TaskSettings, make_task

MODEL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
COMMON: dict[str, Any] = {"options": MODEL, "batch_size": 16, "steps": 24, "peak_lr": 1e-2, "train": 300, "valid": 40}
SIZES: dict[str, dict[str, Any]] = {
    "listops": {"length": 24, "generator": {"max_depth": 3, "max_args": 4, "min_length": 4, "max_length": 24}},
    "pathfinder": {
        "length": 256,
        "train": 64,
        "valid": 8,
        "test": 16,
        "steps": 12,
        "generator": {"size": 16, "dashes": 4, "distractors": 1, "distractor_dashes": 2},
    },
    "mqar": {"length": 16, "generator": {"length": 16, "pairs": 2, "vocabulary": 16}},
    "text": {"length": 40, "test": 30},
    "finetuning": {"length": 32, "test": 30, "pretraining_steps": 20, "pretraining_batch_size": 16},
    "lm": {"length": 32},
}


def settings(name: str, **changes: Any) -> TaskSettings:
    return TaskSettings(**{**COMMON, "test": 50, **SIZES[name], **changes})


def material(folder: Path) -> Material:
    """Running text, and labelled texts whose label a word gives away."""
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}, and that is that.\n" for i in range(3000)))
    tokens = folder / "tokens"
    prepare([str(text)], str(tokens), tokenizer="bytes", valid_share=0.0)
    names = []
    for split, count in (("train", 200), ("valid", 30), ("test", 40)):
        lines = [{"label": i % 2, "text": f"{('dull', 'good')[i % 2]} film {split} {i}"} for i in range(count)]
        path = folder / f"{split}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        names.append(str(path))

    def held_out() -> list[torch.Tensor]:
        return [torch.from_numpy(Shards(str(tokens)).window(0, 400).astype("int64"))]

    return Material(folder / "tables", {str(tokens): 1.0}, held_out, tuple(names))


def task(name: str, folder: Path, **changes: Any) -> Task:
    made = make_task(name, settings(name, **changes), material(folder))
    made.prepare()
    return made
