"""The steps of a reproduction, in order, each with the file that shows it is done."""

from dataclasses import dataclass
from pathlib import Path

from farspan.errors import require
from farspan.reproduce.preset import Preset

TASKS = {
    "table1": {"ppl"},
    "table2": {"passkey"},
    "table3": {"ppl", "passkey"},
    "figure1": {"ppl"},
    "figure4": {"passkey"},
    "figure5": {"passkey"},
}
"""What each table and figure of the paper needs to be measured."""


WEIGHTS = {"data": 1, "train": 8, "ppl": 1, "passkey": 1}
"""How long each kind of step takes, very roughly, beside the others: for the time left."""


@dataclass(frozen=True)
class Step:
    """One piece of work: its kind ("data", "train", "ppl", "passkey"), its subject and its result."""

    kind: str
    result: Path
    variant: str = ""
    seed: int = 0
    scaling: str = "none"

    @property
    def weight(self) -> int:
        return WEIGHTS[self.kind]

    @property
    def name(self) -> str:
        subject = f" {self.variant} seed {self.seed}" if self.variant else ""
        return f"{self.kind}{subject}" + (f" {self.scaling}" if self.kind in ("ppl", "passkey") else "")


def plan(preset: Preset, folder: Path, only: list[str] | None = None) -> list[Step]:
    """All steps for the chosen tables and figures; training comes before what needs it."""
    chosen = only or list(TASKS)
    for name in chosen:
        require(name in TASKS, f"--only must name some of {', '.join(TASKS)}, got {name!r}; separate them by commas")
    wanted = set().union(*(TASKS[name] for name in chosen))
    results = folder / "results"
    steps = [Step("data", folder / "data" / "done.json")]
    runs = [
        (v, s) for s in range(max([1, *preset.seeds.values()])) for v in preset.variants if s < preset.seeds.get(v, 1)
    ]
    steps += [Step("train", results / f"train-{v}-s{s}.json", v, s) for v, s in runs]
    lengths = {"ppl": preset.evaluation.perplexity_lengths, "passkey": preset.evaluation.passkey_lengths}
    for kind in ("ppl", "passkey"):
        if kind in wanted and lengths[kind]:
            for variant, seed in runs:
                for scaling in preset.evaluation.scalings if variant != "alibi" else ["none"]:
                    path = results / f"{kind}-{variant}-s{seed}-{scaling}.json"
                    steps.append(Step(kind, path, variant, seed, scaling))
    return steps
