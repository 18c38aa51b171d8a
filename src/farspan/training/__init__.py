"""Pre-training: one loop, its configuration, its loss and its checkpoints."""

from farspan.training.config import TrainConfig
from farspan.training.loop import Progress, TrainingStoppedError, train

__all__ = ["Progress", "TrainConfig", "TrainingStoppedError", "train"]
