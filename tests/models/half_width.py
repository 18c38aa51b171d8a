"""Models that decode with and without the half-width kernel, and texts read piece by piece."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from farspan import FarspanCache, FarspanForCausalLM
from tests.models.small import make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOPE = {"kind": "coca", "rotary": False}


def model_of(**options: Any) -> FarspanForCausalLM:
    options = {"attention": ["coca-exact"], "num_key_value_heads": 1, "dtype": torch.float32, **options}
    return make(num_hidden_layers=len(options["attention"]), **options).to(DEVICE)


def expected_of(model: FarspanForCausalLM, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call gives without the kernel, and with it."""
    results = []
    for backend in ("sdpa", "triton"):
        with decoding_on(model, backend):
            results.append(call())
    return results[0], results[1]


@contextmanager
def decoding_on(model: FarspanForCausalLM, backend: str) -> Iterator[None]:
    before, model.config.decode_backend = model.config.decode_backend, backend
    yield
    model.config.decode_backend = before


def steps(
    model: FarspanForCausalLM, x: torch.Tensor, pieces: list[int], mask: torch.Tensor | None, length: int | None
) -> torch.Tensor:
    """Logits of a text read piece by piece."""
    cache, parts, seen = FarspanCache(model.config, max_length=length), [], 0
    for piece in x.split(pieces, dim=1):
        seen += piece.shape[1]
        options = {} if mask is None else {"attention_mask": mask[:, :seen]}
        parts.append(model(piece, past_key_values=cache, **options).logits)
    return torch.cat(parts, dim=1)


def left_padding(rows: int, length: int, pad: int) -> torch.Tensor:
    return (torch.arange(length, device=DEVICE)[None] >= torch.arange(rows, device=DEVICE)[:, None] * pad).long()
