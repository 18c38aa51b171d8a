"""Result files: numbers together with what made them."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from farspan.utils import check_writable, write_json

PACKAGES = ("farspan", "torch", "transformers", "triton")


def write_result(
    path: str | os.PathLike[str],
    rows: list[dict[str, Any]],
    *,
    device: str,
    seed: int,
    kind: str,
    model: str | None = None,
) -> None:
    """Write rows with their provenance as one JSON file, complete or not at all.

    The file is ``{"schema": 2, "kind", "command", "commit", "versions", "device", "seed", "rows"}``, with
    "model_fingerprint" (:func:`farspan.checkpoints.fingerprint`) where `model` says of which model the rows
    are. `kind` names what the rows hold, such as "perplexity" or "bench-layer". Files of schema 1 have no kind, and
    "ntk-F" means dynamic NTK there.
    """
    versions = {"python": platform.python_version()} | {name: v for name in PACKAGES if (v := version(name))}
    result = {
        "schema": 2,
        "kind": kind,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions,
        "device": device_name(device),
        "seed": seed,
    }
    result |= {} if model is None else {"model_fingerprint": model}
    write_json(path, {**result, "rows": rows})


def check_out(path: Path, force: bool) -> None:
    """Raise OSError, with the remedy, unless a result may and can be written there: to call before any work begins."""
    if path.exists() and not force:
        raise FileExistsError(f"{str(path)!r} exists; add --force to replace it, or choose another name")
    check_writable(path)


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
