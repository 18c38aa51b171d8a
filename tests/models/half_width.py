"""Models that decode with and without the half-width kernel, and sequences read piece by piece."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farspan import FarspanCache, FarspanForCausalLM
from tests.models.small import make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOPE = {"kind": "coca", "rotary": False}


def model_of(**options: Any) -> FarspanForCausalLM:
    options = {"attention": ["coca-exact"], "num_key_value_heads": 1, "dtype": torch.float32, **options}
    return make(num_hidden_layers=len(options["attention"]), **options).to(DEVICE)


def on(backend: str, model: FarspanForCausalLM) -> FarspanForCausalLM:
    """Make the same model with another backend for decoding."""
    config = copy.deepcopy(model.config)
    config.decode_backend = backend
    twin = FarspanForCausalLM(config).to(model.device, model.dtype).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def without_and_with_kernel(
    model: FarspanForCausalLM, call: Callable[[FarspanForCausalLM], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a call gives without the kernel, and with it."""
    return call(on("sdpa", model)), call(on("triton", model))


class Allocations(TorchDispatchMode):
    """Note the elements of the largest new tensor, and count the kernel's calls."""

    def __init__(self, *held: torch.Tensor) -> None:
        super().__init__()
        self.known, self.largest, self.calls = {x.untyped_storage().data_ptr() for x in held}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += func.name() == "farspan::half_width_attention"
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.numel())
        return out


def kernel_calls(call: Callable[[], object]) -> int:
    """Count how often a call runs the half-width kernel."""
    with Allocations() as made:
        call()
    return made.calls


def steps(
    model: FarspanForCausalLM,
    x: torch.Tensor,
    pieces: list[int],
    mask: torch.Tensor | None = None,
    length: int | None = None,
) -> torch.Tensor:
    """Compute the logits of a sequence read piece by piece."""
    cache, parts, seen = FarspanCache(model.config, max_length=length), [], 0
    for piece in x.split(pieces, dim=1):
        seen += piece.shape[1]
        options = {} if mask is None else {"attention_mask": mask[:, :seen]}
        parts.append(model(piece, past_key_values=cache, **options).logits)
    return torch.cat(parts, dim=1)


def left_padding(rows: int, length: int, pad: int) -> torch.Tensor:
    return (torch.arange(length, device=DEVICE)[None] >= torch.arange(rows, device=DEVICE)[:, None] * pad).long()
