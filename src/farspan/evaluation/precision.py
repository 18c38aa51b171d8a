"""The rounding under which a model is evaluated."""

from contextlib import AbstractContextManager, nullcontext

import torch


def as_trained(device: str) -> AbstractContextManager[object]:
    """bf16 autocast on a GPU, float32 elsewhere: what `farspan train` does by default, so numbers compare."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
