"""Result files: numbers together with what made them."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from farspan.utils import check_writable, write_json

PACKAGES = ("farspan", "torch", "transformers", "triton")
GROUPS = ("bench", "eval")
"""The commands of `farspan` whose next word is a command too."""
MODES = ("--eager", "--eight-bits", "--quick", "--toy", "--tune")
"""Options that make another result of a command, not the same one anew: a trial must not replace a record."""


def write_result(
    path: str | os.PathLike[str],
    rows: list[dict[str, Any]],
    *,
    device: str,
    seed: int,
    kind: str | None = None,
    model: str | None = None,
) -> None:
    """Write rows with their provenance as one JSON file: whole, or not at all.

    The file is ``{"schema": 2, "kind", "command", "commit", "versions", "device", "seed", "rows"}``, with
    "model_fingerprint" (:func:`farspan.checkpoints.fingerprint`) where `model` says of which model the rows
    are. `kind` names what the rows hold, such as "perplexity" or "bench-layer". Files of schema 1 have no kind, and
    "ntk-F" means dynamic NTK there.
    """
    head: dict[str, Any] = {"schema": 1} if kind is None else {"schema": 2, "kind": kind}
    of = {} if model is None else {"model_fingerprint": model}
    result = head | provenance(device) | {"seed": seed} | of | {"rows": rows}
    write_json(path, result)


def check_out(path: Path, force: bool | None = None) -> None:
    """Raise OSError, with the remedy, unless a result may and can be written there: to call before any work begins.

    Args:
        force: whether an existing file may be replaced. None compares commands instead, until all commands have the
            option --force.
    """
    if force is None:
        check_replaceable(path)
    elif path.exists() and not force:
        raise FileExistsError(f"{str(path)!r} exists; add --force to replace it, or choose another name")
    check_writable(path)


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError unless nothing is lost by a result there: no file, an empty one, or one's own from before.

    One's own is a result of the command that this process runs (:func:`command_name`), whatever else it was given.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        maker = str(found["command"]) if isinstance(found["rows"], list) else None
    except (ValueError, KeyError, TypeError):  # of another kind altogether
        maker = None
    if maker is None or command_name(maker) != command_name(command_line()):
        held = "which holds no result" if maker is None else f"made by {shorten(maker, 60, placeholder=' …')!r}"
        raise FileExistsError(
            f"out must be a new file or an earlier result of the same command, got {str(path)!r}, {held}; "
            "choose another name"
        )


def command_line() -> str:
    """What this process was called with."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def command_name(line: str) -> str:
    """A command without its arguments and options, but for :data:`MODES`, however it was started.

    >>> command_name("farspan eval ppl runs/mine/model --lengths 512"), command_name("__main__.py eval ppl other")
    ('farspan eval ppl', 'farspan eval ppl')
    >>> command_name("farspan finetune models/mine --out runs/mine"), command_name("llama_parity.py mine.gguf")
    ('farspan finetune', 'llama_parity')
    >>> command_name("farspan bench layer --lengths 512 --quick")
    'farspan bench layer --quick'
    """
    program, _, rest = line.partition(" ")
    name = Path(program).stem.replace("__main__", "farspan")
    words = list(takewhile(lambda word: not word.startswith("-"), rest.split())) if name == "farspan" else []
    depth = 2 if words and words[0] in GROUPS else 1
    return " ".join([name, *words[:depth], *(mode for mode in MODES if mode in rest.split())])


def provenance(device: str) -> dict[str, Any]:
    """Command, commit, versions and device of this process."""
    return {
        "command": command_line(),
        "commit": commit(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if version(name)},
        "device": device_name(device),
    }


def commit() -> str | None:
    """The commit this package runs from: FARSPAN_COMMIT where a tree was copied without its history, else git's.

    "+" marks files that differ from it; None outside a checkout.
    """
    if "FARSPAN_COMMIT" in os.environ:
        return os.environ["FARSPAN_COMMIT"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """What a reader would call the device."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
