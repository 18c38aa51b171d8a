"""Output folders that are whole or absent."""

import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from farspan.convert.configuration import write_config
from farspan.convert.families import WEIGHTS
from farspan.convert.names import filled, template
from farspan.errors import require
from farspan.files import NO_ROOM, claim
from farspan.modeling_farspan import FarspanForCausalLM

SHARD_BYTES = 5 * 2**30

PART, LOCK = ".part", "lock"


def clear_out(out: Path) -> None:
    """Remove what a killed call left for this folder (:func:`sweep`); refuse one that holds anything else."""
    sweep(out)
    require(
        (out.is_dir() and not any(out.iterdir())) or not os.path.lexists(out),
        f"out must be a new or empty folder, got {str(out)!r}, which is not; choose another or remove it",
    )


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name only when all went well; otherwise nothing is left.

    An empty folder that exists already (the current one, a link, a mount) stays, and gets the files at the end.

    >>> with tempfile.TemporaryDirectory() as parent, whole_folder(Path(parent) / "out") as folder:
    ...     _ = (folder / "a").write_text("x")
    """
    clear_out(out)
    exists = out.exists()
    missing = [parent for parent in out.parents if not parent.exists()]
    try:
        with _part(out if exists else out.parent, out) as part:
            yield part
            if exists:
                for entry in sorted(part.iterdir(), key=lambda entry: entry.name == "config.json"):  # a model at last
                    entry.rename(out / entry.name)
            else:
                part.rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "free some space or choose another folder" if _number(error) in NO_ROOM else "choose another folder"
        raise OSError(f"out {str(out)!r} could not be written ({reason}); {remedy}") from error
    finally:
        for parent in missing:
            with suppress(OSError):  # it holds the result
                parent.rmdir()


@contextmanager
def _part(home: Path, out: Path) -> Iterator[Path]:
    """A folder with ordinary rights inside a temporary one, which has its owner's alone."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(
            dir=home, prefix=f".{out.name}-", suffix=PART, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ValueError(f"out must be a folder that can be made, got {str(out)!r} ({error.strerror})") from error
    with orderly_end(), temporary as name, ExitStack() as held:
        with suppress(OSError):  # a file system without locks: then `sweep` removes nothing there either
            held.enter_context(claim(Path(name) / LOCK))
        (Path(name) / "whole").mkdir()
        yield Path(name) / "whole"


def sweep(out: Path) -> None:
    """Remove the half-made folders of calls for this place that were killed; a living one holds its lock."""
    for home in (out.parent, out):
        for litter in home.glob(f".{escape(out.name)}-????????{PART}"):
            with suppress(OSError), claim(litter / LOCK) as ours:  # another user's is not ours to remove
                if ours:
                    shutil.rmtree(litter, ignore_errors=True)


@contextmanager
def orderly_end() -> Iterator[None]:
    """For as long as the context lasts SIGTERM is an exception, as Ctrl-C is: what is half made gets removed."""
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not own:
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)  # what a shell reports of a process that a signal ended

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _number(error: Exception) -> int | None:
    """The system's number of an error; safetensors says it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def save_as(model: FarspanForCausalLM, folder: Path, family: str) -> None:
    """Write a rope model as a checkpoint of another family, which transformers loads without farspan."""
    config = write_config(model.config, family)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_tensors(model, folder)


def save_ours(model: FarspanForCausalLM, folder: Path) -> None:
    """Write a model as `save_pretrained` does, quietly and with ordinary file rights."""
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
    file.touch()
    rights = file.stat().st_mode  # as the umask has them; safetensors writes for the owner alone
    save_file(tensors, file, {"format": "pt"})
    file.chmod(rights)


Carry = Callable[[Path], None]
"""Puts beside the weights, in a folder that has no name yet, what goes with them: tokenizer, notes, a card, source."""


def save(model: FarspanForCausalLM, out: Path, carry: Carry, *, to: str | None = None) -> None:
    """Write a model and what travels with it, whole or not at all; `to` names another family."""
    with whole_folder(out) as folder:
        if to is None:
            save_ours(model, folder)
        else:
            save_as(model, folder, to)
        carry(folder)
