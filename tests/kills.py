"""Kill commands at random moments, run them again, and compare all files: ``python -m tests.kills --kills 200``.

A command that was killed must write what an uninterrupted one writes, byte for byte, and leave nothing else. Half of
the kills come after a random time, the others right before a random change to the file system.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from tests.command_line import program
from tests.fuzz import make_inputs
from tests.processes import Started

COMMANDS = {
    "train": "train config.toml --out out",
    "data": "data text.jsonl more.txt --out out --train-tokenizer 300",
    "finetune": "finetune model --data tokens --recipe recipe.toml --checkpoint-every 2 --out out",
    "convert": "convert llama --attention coca-exact --out out",
    "reproduce": "reproduce --preset tiny.toml --only ppl --out out",
    "export": "export model --out out",
}
ONCE = {"convert", "export"}
"""Commands whose folder appears complete, and which then raise for it rather than continue."""
TIMES = {"seconds", "tokens_per_second", "mfu"}
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate"}
TRAINING = """
model = { preset = "tiny", options = { num_hidden_layers = 1, hidden_size = 32, intermediate_size = 48 } }
data = { sources = { "tokens" = 1.0 }, length = 16, batch_size = 4 }
optimizer = { steps = 20, peak_lr = 1e-2, accumulation = 2 }
run = { checkpoint_every = 4 }
"""
STAGE = """
[[stages]]
name = "%s"
length = 16
batch_size = 2
optimizer = { steps = 6, peak_lr = 1e-2, accumulation = 1 }
"""


@dataclass
class Outcome:
    """What a command that was killed did differently from an uninterrupted one."""

    command: str
    kills: int = 0
    different: list[str] = field(default_factory=list)
    litter: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.different and not self.litter

    def __str__(self) -> str:
        equal = f"no {self.different[:3]}" if self.different else "yes"
        return f"{self.command}: {self.kills} kills, bit-equal {equal}, litter {self.litter[:3] or 'none'}"


def make_kill_inputs(folder: Path) -> None:
    """Write the inputs of :data:`COMMANDS`: those of the fuzzer, with longer runs and several checkpoints."""
    make_inputs(folder)
    (folder / "config.toml").write_text(TRAINING)
    (folder / "recipe.toml").write_text(STAGE % "one" + STAGE % "two")
    (folder / "more.txt").write_text("".join(f"{i} plus {i} is {i + i}.\n" for i in range(20_000)))


def kill_and_compare(arguments: Sequence[str], folder: Path, *, seed: int, kills: int) -> Outcome:
    """Run a command in a copy of a folder, then kill and repeat it in other copies; compare all their files.

    Args:
        arguments: the command line without ``farspan``; paths are relative to the folder.
        folder: inputs of the command; it stays as it is.
        seed: of the moments.
        kills: how many processes are killed; each copy sees one to three kills before the command may finish.
    """
    draw, outcome = random.Random(f"{seed}/{arguments}"), Outcome(arguments[0])
    with tempfile.TemporaryDirectory() as home:
        case = Path(home) / "case"  # one path for all: files hold paths
        shutil.copytree(folder, case)
        before, began = files(case), time.monotonic()
        status, changes = run(arguments, case)
        seconds, expected = time.monotonic() - began, files(case)
        assert status == 0, f"farspan {' '.join(arguments)} exits with {status} without any kill"
        for attempt in range(4 * kills):
            if outcome.kills >= kills or not outcome.good:
                break
            shutil.rmtree(case)
            shutil.copytree(folder, case)
            for _ in range(min(draw.randint(1, 3), kills - outcome.kills)):
                moment = {"after": draw.uniform(0, seconds)} if attempt % 2 else {"change": draw.randrange(changes)}
                status, _ = run(arguments, case, **moment)
                outcome.kills += status == -signal.SIGKILL
                if status != -signal.SIGKILL or is_complete(arguments, case):
                    break
            if not is_complete(arguments, case) and (status := run(arguments, case)[0]):
                outcome.different.append(f"exit status {status}")
            found = files(case)
            outcome.different += [name for name in expected if found.get(name) != expected[name]]
            outcome.litter += [name for name in found if name not in expected and name not in before]
    return outcome


def is_complete(arguments: Sequence[str], folder: Path) -> bool:
    """Whether a command that does not continue has written its folder, which it would raise for."""
    return arguments[0] in ONCE and (folder / "out").exists()


def run(arguments: Sequence[str], folder: Path, *, after: float = 300.0, change: int = -1) -> tuple[int, int]:
    """Run a command for so many seconds or changes to its folder; return its exit status, and how many there were."""
    with tempfile.NamedTemporaryFile("r") as counted:
        with Started(dying, change, counted.name, *arguments, cwd=folder) as running:
            status = running.wait(after).returncode
        return status, int(counted.read() or 0)


def dying(change: int, counted: str, *arguments: str) -> None:
    """Be the command, and die right before a change to the current folder. Write the number of changes at the end."""
    process, folder, seen = os.getpid(), os.getcwd() + os.sep, 0

    def watch(event: str, details: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CHANGES or (event == "open" and writes(*details[1:])):
            path = details[0] if isinstance(details[0], str | os.PathLike) else ""
            if os.getpid() == process and os.path.abspath(path).startswith(folder):
                if seen == change:
                    os.kill(process, signal.SIGKILL)
                seen += 1

    torch.set_num_threads(1)
    sys.addaudithook(watch)
    try:
        program("", *arguments)
    finally:
        Path(counted).write_text(str(seen))


def writes(mode: str | None, flags: int) -> bool:
    """Whether a file is opened to be written, by `open` or by `os.open`."""
    return bool(set(mode) & set("wax+")) if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))


def files(folder: Path) -> dict[str, Any]:
    """Read all files below a folder, without times, locks and TensorBoard's events, whose names are times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if "tensorboard" not in path.parts and not path.name.endswith(".lock"):
            shown = path.is_dir() or "report" in path.parts  # a page shows times
            content: Any = b"" if shown else path.read_bytes()
            is_json = path.suffix == ".json" and content
            found[str(path.relative_to(folder))] = timeless(json.loads(content)) if is_json else content
    return found


def timeless(value: Any) -> Any:
    """Drop what depends on the clock from JSON."""
    if isinstance(value, dict):
        return {key: timeless(one) for key, one in value.items() if key not in TIMES}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def main() -> None:
    """Spread kills over all commands, print a line for each, and exit with 1 if anything differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    disable_progress_bar()
    good = True
    with tempfile.TemporaryDirectory() as home:
        make_kill_inputs(Path(home))
        for number, line in enumerate(COMMANDS.values()):
            share = given.kills // len(COMMANDS) + (number < given.kills % len(COMMANDS))
            outcome = kill_and_compare(line.split(), Path(home), seed=given.seed, kills=share)
            good = good and outcome.good
            print(outcome, flush=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
