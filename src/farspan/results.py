"""Result files: numbers together with what made them."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from farspan.files import write_whole

PACKAGES = ("farspan", "torch", "transformers", "triton")


def write_result(
    path: str | os.PathLike[str], rows: list[dict[str, Any]], *, device: str, seed: int, model: str | None = None
) -> None:
    """Write rows with their provenance as one JSON file: whole, or not at all.

    The file is ``{"schema": 1, "command", "commit", "versions", "device", "seed", "rows"}``, with "model_fingerprint"
    (:func:`farspan.convert.fingerprint.fingerprint`) where `model` says of which model the rows are.
    """
    of = {} if model is None else {"model_fingerprint": model}
    result = {"schema": 1, **provenance(device), "seed": seed, **of, "rows": rows}
    write_whole(Path(path), json.dumps(result, indent=1) + "\n")


def provenance(device: str) -> dict[str, Any]:
    """Command, commit, versions and device of this process."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
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
