"""Output folders that are whole or absent."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from farspan.convert.configuration import write_config
from farspan.convert.families import WEIGHTS
from farspan.convert.names import filled, template
from farspan.errors import require
from farspan.models import FarspanForCausalLM

SHARD_BYTES = 5 * 2**30


def check_out(out: Path) -> None:
    """Refuse a folder that holds something, before any work is done."""
    require(
        not out.exists() or (out.is_dir() and not any(out.iterdir())),
        f"--out must be a new or empty folder, got {str(out)!r}, which is not; choose another or remove it",
    )


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name only when all went well; otherwise nothing is left.

    >>> with tempfile.TemporaryDirectory() as parent, whole_folder(Path(parent) / "out") as folder:
    ...     _ = (folder / "a").write_text("x")
    """
    check_out(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-", suffix=".part"))
    except OSError as error:
        raise OSError(f"--out must be a folder that can be made, got {str(out)!r} ({error.strerror})") from error
    try:
        yield part
        part.chmod(0o755)
        os.replace(part, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"--out {str(out)!r} could not be written ({reason}); free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def save_as(model: FarspanForCausalLM, folder: Path, family: str) -> None:
    """Write a rope model as a checkpoint of another family, which transformers loads without farspan."""
    config = write_config(model.config, family)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_tensors(model, folder)


def save_ours(model: FarspanForCausalLM, folder: Path) -> None:
    """Write a model as `save_pretrained` does, quietly and with the file rights of its folder."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    save_tensors(model, folder)


def save_tensors(model: FarspanForCausalLM, folder: Path) -> None:
    """The weights by the names of the weight map, in shards of at most :data:`SHARD_BYTES`."""
    inverse = {ours: theirs for theirs, ours in WEIGHTS.items()}
    tensors: dict[str, Tensor] = {}
    for ours, parameter in model.named_parameters():  # a tied head comes once, as every family expects
        pattern, layer = template(ours)
        tensors[filled(inverse[pattern], layer)] = parameter.detach()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _save_shard(shards[0], folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save_shard(shard, folder / file)
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _save_shard(tensors: dict[str, Tensor], file: Path) -> None:
    save_file(tensors, file, {"format": "pt"})
    file.chmod(0o644)  # safetensors writes for the owner alone


Carry = Callable[[Path], None]
"""Leaves the source's tokenizer in a folder."""


def save(model: FarspanForCausalLM, out: Path, carry: Carry, *, to: str | None = None) -> None:
    """Write a model and what travels with it, whole or not at all; `to` names another family."""
    with whole_folder(out) as folder:
        if to is None:
            save_ours(model, folder)
        else:
            save_as(model, folder, to)
        carry(folder)
