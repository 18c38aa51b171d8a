"""flash-linear-attention as a benchmark peer: found if it is there, called as it wants to be."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

MODULES = ("fla.ops.common.chunk_h", "fla.ops.common.chunk_o", "fla.ops.utils.cumsum")
"""Where its tuned kernels are."""


def features(x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """[ReLU(x) cos, ReLU(x) sin]: (b, n, h, d) → (b, n, h, 2d), for cosines and sines (n, 1, 1)."""
    x = x.relu()
    return torch.cat([x * wave for wave in waves], dim=-1)


def flash_linear_attention(device: str, *, quick: bool) -> tuple[Callable[..., Tensor] | None, dict[str, str]]:
    """Its chunk_linear_attn as a function of features q, k and of v, all (b, n, h, ·), or why there is none.

    It tries some fifty variants of each kernel at the first call, which takes minutes; `quick`: a few of them.
    """
    if not device.startswith("cuda"):
        return None, {"fla": "it needs a CUDA device"}
    if find_spec("fla") is None:
        return None, {"fla": "not installed; pip install fla-core"}
    if quick:
        keep_few_variants(MODULES)
    chunk_linear_attn = import_module("fla.ops.linear_attn").chunk_linear_attn

    def attend(q: Tensor, k: Tensor, v: Tensor, *, normalize: bool) -> Tensor:
        out: Tensor = chunk_linear_attn(q, k, v, scale=1.0, normalize=normalize)[0]
        return out

    return attend, {}


def keep_few_variants(modules: tuple[str, ...], *, warps: int = 4, stages: tuple[int, ...] = (2, 3)) -> int:
    """Leave each tuned kernel only its variants of so many warps and stages, where it has any; how many are left.

    Two numbers of stages: only where it has another does a tuner pass over a variant that asks for too much memory.
    """
    left = 0
    for name in modules:
        for kernel in vars(import_module(name)).values():
            tuner = _tuner(kernel)
            if tuner is not None:
                few = [x for x in tuner.configs if x.num_warps == warps and x.num_stages in stages]
                tuner.configs = few or tuner.configs[:1]
                left += len(tuner.configs)
    return left


def _tuner(kernel: Any) -> Any:
    """The autotuner around a kernel, below its other wrappings; None if there is none."""
    while kernel is not None and not hasattr(kernel, "configs"):
        kernel = getattr(kernel, "fn", None) if hasattr(kernel, "run") else None
    return kernel
