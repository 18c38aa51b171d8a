"""One piece of a reproduction's work, with the file that shows it is done."""

from dataclasses import dataclass
from pathlib import Path

WEIGHTS = {"train": 8, "finetune": 8, "convert": 2}
"""How long each kind of step takes, very roughly, beside the others, which count 1: for the share that is done."""
MEASURED_UNDER_A_LAW = ("ppl", "passkey")


@dataclass(frozen=True)
class Step:
    """One piece of work: its kind, its subject and its result.

    Kinds are "data", "train", "ppl", "passkey", "speed"; of a drop-in study also "convert", "finetune", "bits",
    "pairs" and "cache". Training for a task includes its test.
    """

    kind: str
    result: Path
    variant: str = ""
    seed: int = 0
    scaling: str = "none"
    task: str = ""
    tasks: tuple[str, ...] = ()
    """The tasks that data are made for."""
    model: str = ""
    """Of a drop-in study: what is made or measured."""
    part: str = ""
    """Of a drop-in study's windows: "near" or "far"; of CoCA's speed: "layer" or "decode"."""
    like: str = ""
    """Of a drop-in study: what else its time depends on, such as the stage that is trained."""
    needs: tuple[str, ...] = ()
    """Names of the steps that must be done before; they stand before it in a plan."""

    @property
    def weight(self) -> int:
        return WEIGHTS.get(self.kind, 1)

    @property
    def alike(self) -> tuple[str, ...]:
        """Steps that have this in common take about as long."""
        return self.kind, self.part, self.task, self.scaling, self.like

    @property
    def lock(self) -> str:
        """What only one process may be at: all data steps share the corpus, whatever tasks they are for."""
        return "data" if self.kind == "data" else self.result.stem

    @property
    def name(self) -> str:
        """
        >>> Step("ppl", Path("x.json"), "rope", 1, "ntk-4").name
        'ppl rope seed 1 ntk-4'
        >>> Step("ppl", Path("x.json"), model="calibrated", part="far").name
        'ppl far calibrated none'
        """
        variant = f"{self.variant} seed {self.seed}" if self.variant else ""
        law = self.scaling if self.kind in MEASURED_UNDER_A_LAW else ""
        return " ".join(filter(None, (self.kind, self.part, self.task, variant, self.model, law)))
