"""Fine-tuning: recipes of stages, their objectives, and the run that applies them."""

from farspan.finetune.objectives import Distillation
from farspan.finetune.recipe import Recipe, Stage
from farspan.finetune.run import finetune

__all__ = ["Distillation", "Recipe", "Stage", "finetune"]
