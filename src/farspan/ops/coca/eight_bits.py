"""t in eight bits, as a cache may keep it: unsigned codes, as t is never negative, and one scale a key and key head."""

import torch
from torch import Tensor

from farspan.errors import require
from farspan.ops.launch import is_traced
from farspan.ops.rotary import working_dtype

LEVELS = 255


@torch.no_grad()
def quantize_t(t: Tensor) -> tuple[Tensor, Tensor]:
    """t → (codes, t_scale) with t ≈ codes · t_scale, off by at most half a scale, for scales in float32's normal range.

    CoCA's t is not negative by its ReLU. What is negative all the same is refused where a look costs nothing, on a CPU
    and not while compiling, and becomes zero elsewhere.

    Args:
        t: (…, m, d/2) coefficients in any floating dtype; one new key or a whole cache, in one piece or in pages.

    Returns:
        codes: (…, m, d/2) uint8, rounded to nearest.
        t_scale: (…, m) float32, the largest of a key's coefficients / 255; a key of zeros has 0.

    >>> codes, t_scale = quantize_t(torch.tensor([[0.0, 0.5, 51.0], [0.0, 0.0, 0.0]]))
    >>> codes.tolist(), [round(scale, 6) for scale in t_scale.tolist()]
    ([[0, 2, 255], [0, 0, 0]], [0.2, 0.0])
    """
    require(t.is_floating_point(), f"t must be floating-point, got {t.dtype}; codes are made from t as it is projected")
    require(t.ndim > 0 and t.shape[-1] > 0, f"t must hold coefficients along its last axis, got {tuple(t.shape)}")
    if t.device.type == "cpu" and t.numel() and not (is_traced() or torch._C._are_functorch_transforms_active()):
        low = float(t.min())
        require(not low < 0, f"t must not be negative, got {low:g}; CoCA's t comes from a ReLU")
    wide = t.to(working_dtype(t.dtype))
    t_scale = (wide.amax(-1).clamp(min=0) / LEVELS).float()
    unit = torch.where(t_scale > 0, t_scale, 1.0).to(wide.dtype)
    return (wide / unit[..., None]).round().clamp(0, LEVELS).to(torch.uint8), t_scale


def dequantize_t(codes: Tensor, t_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes (…, m, d/2) and their scales (…, m) stand for, in a dtype: exact in float64.

    >>> dequantize_t(torch.tensor([[0, 2, 255]], dtype=torch.uint8), torch.tensor([0.25]), torch.float64).tolist()
    [[0.0, 0.5, 63.75]]
    """
    wide = working_dtype(dtype)
    return (codes.to(wide) * t_scale.to(wide)[..., None]).to(dtype)
