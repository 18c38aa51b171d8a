"""Training: one loop, the jobs it is given, their configuration, loss and checkpoints."""

from farspan.training.config import TrainConfig
from farspan.training.job import Job, Rows
from farspan.training.loop import Progress, TrainingStoppedError, run
from farspan.training.pretraining import pretraining_job, train

__all__ = ["Job", "Progress", "Rows", "TrainConfig", "TrainingStoppedError", "pretraining_job", "run", "train"]
