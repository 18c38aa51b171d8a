"""Whether Triton kernels can run at all, on which dtype, and whether what is made for them may be kept."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """What torch.compiler.assume_constant_result does, without its import of the whole compiler.

    The outermost decorator, with no cache outside or right inside: torch.compile looks through the wrapper of one.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def cannot_launch(device: str, argument: str = "backend", other: str = "sdpa") -> str | None:
    """Why "triton", asked for by an argument, cannot run on a device, and what to do about it; None when it can."""
    if find_spec("triton") is None:
        return f"{argument}='triton' needs triton; install farspan[gpu], or use {argument}='{other}'"
    from farspan.ops.triton.support import INTERPRETED

    if device != "cuda" and not INTERPRETED:
        return (
            f"{argument}='triton' needs CUDA tensors, got {device}; use {argument}='{other}', "
            "or set TRITON_INTERPRET=1 before the start, to test"
        )
    return None


@constant
def is_hopper(index: int | None) -> bool:
    """Whether a CUDA device has what the kernels' cuts were chosen for: others may have less shared memory."""
    return _capability(index) == (9, 0)


@constant
def is_ampere(index: int | None) -> bool:
    """Whether a CUDA device is an Nvidia GPU of that generation or a later one: earlier ones have no bfloat16."""
    return _capability(index) >= (8, 0)


@constant
def cannot_start() -> str | None:
    """Why Triton cannot run compiled kernels here, whatever the call; None when it can."""
    return _start()


@constant
def has_sound_wgmma() -> bool:
    """Whether the ptxas that Triton calls for Hopper can be trusted with every wgmma: 12.9 or later.

    That of Triton 3.6 is 12.8; TRITON_PTXAS_PATH names another, such as the `ptxas-blackwell` in the same folder.
    """
    return assembler() >= (12, 9)


@constant
def has_autocast(kind: str) -> bool:
    """Whether a kind of device has autocast: what torch 2.11 cannot ask while it traces a graph."""
    return torch.amp.is_autocast_available(kind)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    if not torch.cuda.is_available() or torch.version.hip is not None:  # AMD counts otherwise
        return (0, 0)
    return torch.cuda.get_device_capability(index)


@cache
def _start() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    from triton.runtime import driver

    from farspan.ops.triton.support import INTERPRETED

    if INTERPRETED:
        return "TRITON_INTERPRET is set"
    try:
        driver.active.get_current_target()
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        return f"triton cannot start, for which it needs a C compiler and Python's headers: {error}"
    return None


@cache
def assembler() -> tuple[int, int]:
    """The release of the ptxas that Triton calls for Hopper; (0, 0) where there is none."""
    if find_spec("triton") is None:
        return (0, 0)
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        major, minor = get_ptxas(90).version.split(".")[:2]
    except RuntimeError:  # not found
        return (0, 0)
    return int(major), int(minor)


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products with x come in: autocast's dtype where that is on, but of float64, which it leaves alone.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product_dtype(torch.zeros(2)), product_dtype(torch.zeros(2, dtype=torch.float64))
    (torch.bfloat16, torch.float64)
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not has_autocast(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up. Triton's own takes microseconds, and a launch has a dozen of them.

    >>> cdiv(9, 4), cdiv(8, 4)
    (3, 2)
    """
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The least power of two that is not below x ≥ 1.

    >>> [power_of_2(x) for x in (1, 2, 3, 64, 65)]
    [1, 2, 4, 64, 128]
    """
    return 1 << (x - 1).bit_length()


def cannot_derive_forwards(argument: str = "backend", other: str = "sdpa") -> str | None:
    """Why "triton" cannot run just now: forward-mode derivatives are being taken, and its own would be zeros."""
    if forward_ad._current_level >= 0:
        return f"{argument}='triton' has no forward-mode derivatives; use {argument}='{other}'"
    return None


def may_keep() -> bool:
    """Whether a tensor made now can serve later calls: not in a graph that is traced, nor in one that is captured."""
    return not (is_traced() or is_captured())


def is_traced() -> bool:
    """Whether a graph is being traced, which makes its own tensors."""
    return torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor  # the latter under FakeTensorMode


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: it fills a tensor only when it is replayed, in memory that is its own."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
