"""Whether Triton kernels can run at all."""

from importlib.util import find_spec


def cannot_launch(device: str) -> str | None:
    """Why backend="triton" cannot run on a device, and what to do about it; None when it can."""
    if find_spec("triton") is None:
        return "backend='triton' needs triton; install farspan[gpu]"
    from farspan.ops.coca.kernels.narrow import INTERPRETED

    if device != "cuda" and not INTERPRETED:
        return f"backend='triton' needs CUDA tensors, got {device}; or set TRITON_INTERPRET=1 before the start, to test"
    return None


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
cannot_launch._dynamo_marked_constant = True  # type: ignore[attr-defined]
