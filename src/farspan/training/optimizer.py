"""The optimizer of a run, and the compilation that speeds up its steps."""

import torch
from transformers import PreTrainedModel

from farspan.training.config import OptimizerSection


def make_optimizer(model: PreTrainedModel, section: OptimizerSection, device: torch.device | str) -> torch.optim.AdamW:
    """AdamW as in the paper (Sec. 3.3); matrices decay, norms and biases do not."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=section.peak_lr,
        betas=section.betas,
        fused=torch.device(device).type == "cuda",
    )


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile block by block: they share their code, so that one compilation serves them all."""
    for block in model.model.layers:
        block.compile()
