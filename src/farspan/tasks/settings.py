"""How large a task is, and the attentions that are compared on it."""

from dataclasses import dataclass, field
from typing import Any

from farspan.errors import require, require_choice
from farspan.layers import NAMES

PLAIN = "cosformer-plain"
"""cosFormer without its re-weighting: the paper's ablation."""
VARIANTS = (*NAMES, PLAIN)
SPLITS = ("train", "valid", "test")


def attention_of(variant: str) -> str | dict[str, Any]:
    """What :class:`farspan.FarspanConfig` calls a variant.

    >>> attention_of("rope"), attention_of("cosformer-plain")
    ('rope', {'kind': 'cosformer', 'rotary': False})
    """
    require_choice("variant", variant, VARIANTS)
    return {"kind": "cosformer", "rotary": False} if variant == PLAIN else variant


@dataclass(frozen=True)
class TaskSettings:
    """``[tasks.NAME]``: model, training and examples of one task, the same for every variant and seed."""

    preset: str = "tiny"
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's preset to replace."""
    length: int = 128
    """Tokens a row; shorter examples are padded, longer texts cut."""
    batch_size: int = 32
    accumulation: int = 1
    steps: int = 100
    peak_lr: float = 1e-3
    end_lr: float = 1e-5
    warmup_share: float = 0.1
    weight_decay: float = 0.1
    compile: bool = False
    train: int = 1000
    valid: int = 200
    test: int = 500
    """Examples of each split; of files no more than they have."""
    generator: dict[str, Any] = field(default_factory=dict)
    """Fields of the task's generator to replace; without it the task is as published."""
    pretraining_steps: int = 0
    """Steps of masked-language-model training before fine-tuning, where the task has it."""
    pretraining_batch_size: int = 32
    pretraining_lr: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "accumulation", "steps", "train", "valid", "test"):
            value = getattr(self, name)
            require(
                value >= 1,
                f"{name} must be at least 1, got {value}; try {TaskSettings.__dataclass_fields__[name].default}",
            )
        require(
            self.batch_size % self.accumulation == 0,
            f"batch_size must be a multiple of accumulation = {self.accumulation}, got {self.batch_size}",
        )

    @property
    def examples(self) -> dict[str, int]:
        """Examples wanted, by split."""
        return {split: getattr(self, split) for split in SPLITS}
