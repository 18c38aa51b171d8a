"""Fine-tuning: recipes of stages, their objectives, and the run that applies them."""

from farspan.finetune.objectives import Distillation
from farspan.finetune.recipe import Lora, Recipe, Stage
from farspan.finetune.run import finetune

__all__ = ["Distillation", "Lora", "Recipe", "Stage", "finetune"]
