"""Checkpoints: complete or absent, verified before they are read, tensors as safetensors only.

A checkpoint is a folder ``checkpoint-00000500`` that `from_pretrained` can read: model.safetensors, config.json, the
tokenizer, and beside them optimizer.safetensors and trainer.json. ``checksums.json``, written last, tells damage apart
from intact files. All of it is synced to disk before the folder gets its name.
"""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from farspan.errors import require
from farspan.utils import atomic_path, remove, sha256

logger = logging.getLogger(__name__)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Sharded (FSDP2), replicated (DDP) and plain modules give and take the same complete tensors."""
NAME = re.compile(r"checkpoint-([0-9]+)")
CHECKSUMS = "checksums.json"
KEPT = 2
"""Checkpoints of a run: the newest, and the one before for when that is damaged."""


class TrainingStoppedError(RuntimeError):
    """The run cannot go on; its last good checkpoint is kept."""


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, whether or not they are intact."""
    return sorted((p for p in folder.glob("checkpoint-*") if NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("checkpoint-"))


def last_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    return max(map(step_of, checkpoints(folder)), default=0)


def last_good(folder: Path) -> str:
    """Say which checkpoint is the last one, for an error."""
    found = checkpoints(folder)
    return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"


def newest_intact(folder: Path) -> Path | None:
    """Return the newest intact checkpoint; None if there is no checkpoint at all.

    Damaged ones that are newer are renamed to ``….damaged`` with a warning that says what is wrong with each. Raise
    ValueError if all are damaged.
    """
    found, damaged = checkpoints(folder), dict[Path, str]()
    while found and (problem := damage(found[-1])) is not None:
        damaged[found.pop()] = problem
    if damaged:
        what = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
        require(bool(found), f"no checkpoint in {str(folder)!r} is intact ({what}); remove them to begin anew")
        for path in damaged:
            remove(aside := path.with_name(path.name + ".damaged"))
            path.rename(aside)
        logger.warning("skipped damaged checkpoints (%s); the run continues from %s", what, found[-1].name)
    return found[-1] if found else None


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None if each file has its checksum, and the step is that of its name."""
    try:
        sums = json.loads((path / CHECKSUMS).read_text())
        for name, digest in sums.items():
            if sha256(path / name) != digest:
                return f"{name} is not as it was written"
        if unlisted := sorted({file.name for file in path.iterdir()} - {*sums, CHECKSUMS}):
            return f"{unlisted[0]} has no checksum"
        if (step := json.loads((path / "trainer.json").read_text())["step"]) != step_of(path):
            return f"trainer.json is of step {step}"
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return f"{name} is missing" + " (is it of version 0.1? finish that run there)" * (name == CHECKSUMS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read: {error!r}"
    return None


def gather(network: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gather complete weights and moments on the main process; every process calls this."""
    return get_model_state_dict(network, options=FULL), get_optimizer_state_dict(network, optimizer, options=FULL)


def write(
    folder: Path,
    step: int,
    weights: dict[str, Tensor],
    moments: dict[str, Any],
    state: dict[str, Any],
    write_model: Callable[[Path, dict[str, Tensor]], None],
) -> None:
    """Write checkpoint `step` and remove those before the last. Raise TrainingStoppedError for nan and inf."""
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise TrainingStoppedError(f"weight {name} is not finite after step {step - 1}; {last_good(folder)}")
    path = folder / f"checkpoint-{step:08d}"
    try:
        with atomic_path(path) as part:
            part.mkdir()
            write_model(part, weights)
            tensors = {f"{name}/{kind}": x for name, entry in moments["state"].items() for kind, x in entry.items()}
            save_file({name: x.contiguous() for name, x in tensors.items()}, part / "optimizer.safetensors")
            trainer = part / "trainer.json"
            trainer.write_text(json.dumps({"step": step, "groups": moments["param_groups"], **state}, indent=1))
            for file in part.iterdir():
                file.chmod(trainer.stat().st_mode)  # safetensors gives its files to their owner alone
            sums = {file.name: sha256(file) for file in sorted(part.iterdir())}
            (part / CHECKSUMS).write_text(json.dumps(sums, indent=1))
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path.name} could not be written ({error}); {last_good(folder)}; free some space") from error
    for old in checkpoints(folder)[:-KEPT]:
        remove(old)


def load_optimizer(path: Path, network: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Restore the optimizer's state; return trainer.json."""
    state: dict[str, Any] = json.loads((path / "trainer.json").read_text())
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(path / "optimizer.safetensors").items():
        name, _, kind = key.rpartition("/")
        found.setdefault(name, {})[kind] = tensor
    moments = {"state": found, "param_groups": state.pop("groups")}
    set_optimizer_state_dict(network, optimizer, moments, options=FULL)
    return state
