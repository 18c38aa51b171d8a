"""Fine-tuning: recipes of stages, their objectives, and the training room that runs them."""

from farspan.finetune.objectives import OBJECTIVES, Distillation
from farspan.finetune.recipe import Lora, Recipe, Stage
from farspan.finetune.run import Standing, finetune, stage_job

__all__ = ["OBJECTIVES", "Distillation", "Lora", "Recipe", "Stage", "Standing", "finetune", "stage_job"]
