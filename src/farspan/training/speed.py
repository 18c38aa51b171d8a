"""How fast a run goes, against what the machine was seen to do."""

import time

import torch
from transformers import PreTrainedModel


def flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Floating-point operations of forward and backward, a token: 6 a weight, and the attention products.

    A causal token sees length/2 others on average; a window layer sees its window. Recomputation does not count.
    """
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if ".embed_" not in name)
    if config.tie_word_embeddings:  # the embedding works as the head
        weights += config.vocab_size * config.hidden_size
    seen = sum(min(length / 2, spec.window or length) for spec in config.attention_specs)
    assert config.head_dim is not None
    return 6 * weights + 12 * config.num_attention_heads * config.head_dim * seen


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, measured now (best of several)."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(8):
        _wait(device)
        start = time.perf_counter()
        a @ b
        _wait(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
