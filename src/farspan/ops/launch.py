"""Whether Triton kernels can run at all, and whether what is made for them may be kept."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad


def cannot_launch(device: str, argument: str = "backend", other: str = "sdpa") -> str | None:
    """Why "triton", asked for by an argument, cannot run on a device, and what to do about it; None when it can."""
    if find_spec("triton") is None:
        return f"{argument}='triton' needs triton; install farspan[gpu], or use {argument}='{other}'"
    from farspan.ops.coca.kernels.narrow import INTERPRETED

    if device != "cuda" and not INTERPRETED:
        return (
            f"{argument}='triton' needs CUDA tensors, got {device}; use {argument}='{other}', "
            "or set TRITON_INTERPRET=1 before the start, to test"
        )
    return None


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
cannot_launch._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def is_hopper(index: int | None) -> bool:
    """Whether a CUDA device has what the kernels' cuts were chosen for: others may have less shared memory."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(index) == (9, 0)


is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def has_sound_wgmma() -> bool:
    """Whether the ptxas that Triton calls can be trusted with every wgmma: 12.9 or later.

    That of Triton 3.6 is 12.8; TRITON_PTXAS_PATH names another, such as the `ptxas-blackwell` in the same folder.
    """
    if find_spec("triton") is None:
        return False
    import triton

    major, minor = triton.knobs.nvidia.ptxas.version.split(".")[:2]
    return (int(major), int(minor)) >= (12, 9)


has_sound_wgmma._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cannot_derive_forwards(argument: str = "backend", other: str = "sdpa") -> str | None:
    """Why "triton" cannot run just now: forward-mode derivatives are being taken, and its own would be zeros."""
    if forward_ad._current_level >= 0:
        return f"{argument}='triton' has no forward-mode derivatives; use {argument}='{other}'"
    return None


def may_keep() -> bool:
    """Whether a tensor made now can serve later calls.

    Not while a graph is traced, which makes its own; and not while a CUDA graph is captured, which fills the tensor
    only when it is replayed, in memory that is its own.
    """
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:  # the latter under FakeTensorMode
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
