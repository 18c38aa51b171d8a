"""Everything that can be refused of a recipe before its first stage is trained."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from farspan.convert.configuration import config_of
from farspan.convert.sources import open_source
from farspan.data import TextTokenizer
from farspan.data.passkey import check_row
from farspan.finetune.objectives import check_teacher
from farspan.finetune.recipe import Recipe
from farspan.finetune.weights import give_lengths, prepared
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.training.config import DataSection
from farspan.training.pretraining import text_batches


def check(
    recipe: Recipe,
    model: Path,
    teacher: Path | None,
    data: Mapping[str, float],
    tokenizer: Callable[[], TextTokenizer],
) -> None:
    """Go through the stages with a model that has shapes but no weights, and open the data at each stage's length."""
    config = config_of(open_source(model))
    for stage in recipe.stages:
        with torch.device("meta"):
            student = FarspanForCausalLM(config)
            give_lengths(student, stage)  # the next stage begins with this configuration
            theirs = config_of(open_source(teacher)) if stage.needs_teacher and teacher is not None else None
            if theirs is not None:
                check_teacher(student.config, theirs, stage.objective)
            prepared(student, stage, theirs)
        text_batches(DataSection(dict(data), stage.length, stage.batch_size), tokenizer(), 0)
        if stage.passkey_share:
            check_row(tokenizer(), stage.length, f"length of stage {stage.name}")
    if recipe.log_length:
        student.set_log_length(True)
