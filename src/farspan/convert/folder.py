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
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    inverse = {ours: theirs for theirs, ours in WEIGHTS.items()}
    tensors = {}
    for ours, tensor in model.named_parameters():  # a tied head is left out, as the family expects
        pattern, layer = template(ours)
        tensors[filled(inverse[pattern], layer)] = tensor.detach()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _save_shards(tensors, folder)


def _save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


Carry = Callable[[Path], None]
"""Leaves the source's tokenizer in a folder."""


def save(model: FarspanForCausalLM, out: Path, carry: Carry, *, to: str | None = None) -> None:
    """Write a model and what travels with it, whole or not at all; `to` names another family."""
    with whole_folder(out) as folder:
        if to is None:
            model.save_pretrained(folder)
        else:
            save_as(model, folder, to)
        carry(folder)
