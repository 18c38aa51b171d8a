"""Checkpoints: written whole or not at all, tensors as safetensors only.

A checkpoint is a folder ``checkpoint-00000500`` that `from_pretrained` can read: model.safetensors, config.json, the
tokenizer, and beside them optimizer.safetensors and trainer.json. It is built under another name and renamed when
complete, so a folder with the right name is always good.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Sharded (FSDP), replicated (DDP) and plain modules give and take the same whole tensors."""


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = (p for p in folder.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit())
    return sorted(found, key=_step)


def last_step(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 without one."""
    found = checkpoints(folder)
    return _step(found[-1]) if found else 0


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


def save(
    folder: Path,
    step: int,
    network: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    *,
    write_model: Callable[[Path, dict[str, Tensor]], None],
    is_main: bool,
    keep: int,
) -> Path:
    """Write checkpoint `step`; every process calls it, the main one writes. Older ones beyond `keep` are removed."""
    weights = get_model_state_dict(network, options=FULL)
    moments = get_optimizer_state_dict(network, optimizer, options=FULL)
    path = folder / f"checkpoint-{step:08d}"
    if not is_main:
        return path
    part = folder / f"{path.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        write_model(part, weights)  # type: ignore[arg-type]
        tensors, groups = _flatten(moments)
        save_file(tensors, part / "optimizer.safetensors")
        (part / "trainer.json").write_text(json.dumps({"step": step, "groups": groups, **state}, indent=1))
        if path.exists():
            shutil.rmtree(path)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        last = checkpoints(folder)
        kept = f"the last good one is {last[-1]}" if last else "there is none yet"
        raise OSError(f"checkpoint {path.name} could not be written ({error}); {kept}; free some space") from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_optimizer(path: Path, network: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Restore the optimizer; return trainer.json."""
    state: dict[str, Any] = json.loads((path / "trainer.json").read_text())
    moments = _unflatten(load_file(path / "optimizer.safetensors"), state.pop("groups"))
    set_optimizer_state_dict(network, optimizer, moments, options=FULL)
    return state


def _flatten(moments: dict[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    tensors = {
        f"{name}/{kind}": tensor.contiguous()
        for name, entry in moments["state"].items()
        for kind, tensor in entry.items()
    }
    return tensors, moments["param_groups"]


def _unflatten(tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        state.setdefault(name, {})[kind] = tensor
    return {"state": state, "param_groups": groups}
