"""What the current device, compiler and autograd state allow; asking needs no Triton."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., object])

KERNEL_INTERFACE = 3
"""Changes with the arguments of the kernels' ops."""


def constant(function: F) -> F:
    """Mark a function whose result torch.compile may treat as a constant.

    Same as torch.compiler.assume_constant_result, without its import of the whole compiler. Use it as the outermost
    decorator, with no cache around or right inside it: torch.compile looks through the wrapper of a cache.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def is_hopper(index: int | None) -> bool:
    """Return whether a CUDA device is a Hopper GPU, for which the kernels' tile sizes were tuned."""
    return _capability(index) == (9, 0)


@constant
def is_ampere(index: int | None) -> bool:
    """Return whether a CUDA device is an Nvidia GPU from Ampere on: earlier ones have no bfloat16."""
    return _capability(index) >= (8, 0)


@constant
def why_not_triton(device: str, backend: str = "backend='triton'") -> str | None:
    """Return why kernels cannot be launched for tensors on a type of device, or None."""
    interpreted = _interpreted()
    if interpreted is None:
        return f"{backend} needs triton; install farspan[gpu], or choose another backend"
    if device != "cuda" and not interpreted:
        return f"{backend} needs CUDA tensors, got {device}; set TRITON_INTERPRET=1 before the start to test on a CPU"
    return None


@constant
def why_not_compiled_triton() -> str | None:
    """Return why Triton cannot compile kernels on this machine, or None."""
    return _start()


@constant
def has_sound_wgmma() -> bool:
    """Return whether the ptxas that Triton calls for Hopper handles every wgmma: version 12.9 or later.

    Triton 3.6 ships 12.8; TRITON_PTXAS_PATH names another, such as the `ptxas-blackwell` in the same folder.
    """
    return assembler() >= (12, 9)


@constant
def has_autocast(kind: str) -> bool:
    """Return whether a type of device has autocast; torch 2.11 cannot ask this while it traces a graph."""
    return torch.amp.is_autocast_available(kind)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    if not torch.cuda.is_available() or torch.version.hip is not None:  # AMD numbers its devices differently
        return (0, 0)
    return torch.cuda.get_device_capability(index)


@cache
def _start() -> str | None:
    interpreted = _interpreted()
    if interpreted is None:
        return "triton is not installed"
    if interpreted:
        return "TRITON_INTERPRET is set"
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        return f"triton cannot start, for which it needs a C compiler and Python's headers: {error}"
    return None


@cache
def _interpreted() -> bool | None:
    """Return whether Triton interprets kernels on the CPU; None if there are no kernels.

    The code of an exported model has none of its own. It takes those of an installed farspan that has the same calls.
    """
    if find_spec("triton") is None:
        return None
    try:
        from farspan.ops.triton.support import INTERFACE, INTERPRETED
    except ImportError:
        return None
    return bool(INTERPRETED) if INTERFACE == KERNEL_INTERFACE else None


@cache
def assembler() -> tuple[int, int]:
    """Return the version of the ptxas that Triton calls for Hopper; (0, 0) if there is none."""
    if find_spec("triton") is None:
        return (0, 0)
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        major, minor = get_ptxas(90).version.split(".")[:2]
    except RuntimeError:  # not found
        return (0, 0)
    return int(major), int(minor)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's dtype where autocast is on, except for float64.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product_dtype(torch.zeros(2)), product_dtype(torch.zeros(2, dtype=torch.float64))
    (torch.bfloat16, torch.float64)
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for angles, squares and sums: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cdiv(x: int, y: int) -> int:
    """Divide and round up. Triton's own version takes microseconds, and a launch needs a dozen of them.

    >>> cdiv(9, 4), cdiv(8, 4)
    (3, 2)
    """
    return -(-x // y)


def power_of_2(x: int) -> int:
    """Return the smallest power of two that is at least x ≥ 1.

    >>> [power_of_2(x) for x in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (x - 1).bit_length()


def wants_gradient(*inputs: Tensor | None) -> bool:
    """Return whether autograd will ask for the gradient of some input."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def takes_forward_derivatives() -> bool:
    """Return whether forward-mode derivatives are being taken; the kernels have none and would return zeros."""
    return forward_ad._current_level >= 0


def is_traced() -> bool:
    """Return whether a graph is being traced, or tensors are fake."""
    return torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor  # the latter under FakeTensorMode
