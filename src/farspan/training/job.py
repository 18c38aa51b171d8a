"""What a run is made of: the loop knows nothing else about what it trains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.training.config import OptimizerSection, RunSection


class Rows(Protocol):
    """Batches as a pure function of step and process: that is what makes a resumed run exact."""

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """The rows of one process at one step; rows come first."""
        ...


@dataclass(frozen=True)
class Job:
    """What is trained, on what, and how a batch becomes a loss.

    Functions rather than things, so that a finished run opens neither data nor weights. Parameters that `start` and
    `load` freeze (``requires_grad=False``) are left out of the optimizer, but belong to every checkpoint.
    """

    settings: dict[str, Any]
    """What the folder belongs to, section by section; only the section "run" may change on resuming, but its seed."""
    optimizer: OptimizerSection
    run: RunSection
    batch_size: int
    """Rows a step, all processes together."""
    tokens_per_row: int
    start: Callable[[], PreTrainedModel]
    """The model training begins with, fresh or from a checkpoint."""
    load: Callable[[Path], PreTrainedModel]
    """A checkpoint of this job."""
    batches: Callable[[], Rows]
    objective: Callable[[Any], nn.Module]
    """Model → module that keeps it as ``.model`` and whose forward is the loss of one batch. What must be neither saved
    nor distributed, such as a teacher, it keeps out of its registered modules."""
    write_beside: Callable[[Path], None]
    """Writes what a model folder needs beside weights and configuration, such as the tokenizer."""
