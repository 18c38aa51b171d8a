"""The learning rate of each step."""

from farspan.training.config import OptimizerSection


def learning_rate(step: int, section: OptimizerSection) -> float:
    """Linear warm-up from start_lr to peak_lr over the first share of steps, then linear decay to end_lr (Sec. 3.3).

    >>> section = OptimizerSection(steps=200, start_lr=0.0, peak_lr=1.0, end_lr=0.5, warmup_share=0.01)
    >>> [learning_rate(step, section) for step in (0, 2, 101, 200)]
    [0.0, 1.0, 0.75, 0.5]
    """
    warmup = max(1, round(section.steps * section.warmup_share))
    if step < warmup:
        return section.start_lr + (section.peak_lr - section.start_lr) * step / warmup
    return section.peak_lr + (section.end_lr - section.peak_lr) * (step - warmup) / max(1, section.steps - warmup)
