"""Fine-tuning: recipes of stages, their objectives, and the run that applies them."""

from farspan.finetune.objectives import OBJECTIVES, Distillation
from farspan.finetune.recipe import Lora, Recipe, Stage
from farspan.finetune.run import finetune, open_origin, run_stage, stage_job, stage_model, stage_row

__all__ = [
    "OBJECTIVES",
    "Distillation",
    "Lora",
    "Recipe",
    "Stage",
    "finetune",
    "open_origin",
    "run_stage",
    "stage_job",
    "stage_model",
    "stage_row",
]
