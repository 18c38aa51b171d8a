"""Training: settings, one loop, checkpoints, losses, and pre-training."""

from farspan.training.checkpoint import TrainingStoppedError
from farspan.training.config import TrainConfig
from farspan.training.loop import Job, Rows, Status, run
from farspan.training.pretraining import pretraining_job, train

Progress = Status  # alias until merged

__all__ = [
    "Job",
    "Progress",
    "Rows",
    "Status",
    "TrainConfig",
    "TrainingStoppedError",
    "pretraining_job",
    "run",
    "train",
]
