"""Training: settings, one loop, checkpoints, losses, and pre-training."""

from farspan.training.checkpoint import TrainingStoppedError
from farspan.training.config import TrainConfig
from farspan.training.loop import Job, run
from farspan.training.pretraining import pretraining_job, train

__all__ = ["Job", "TrainConfig", "TrainingStoppedError", "pretraining_job", "run", "train"]
