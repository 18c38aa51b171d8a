"""(q, t) → (q̃, k̃): by one Triton kernel, forward and backward, or by plain torch; which of them is decided here.

A kernel wants no tables of angles, so the choice is made with the plan, once for all layers of a model.
"""

import torch
from torch import Tensor

from farspan.ops.coca.decoding import WIDEST
from farspan.ops.coca.fused import coca_features
from farspan.ops.launch import cannot_derive_forwards, cannot_start, constant, is_ampere
from farspan.ops.phases import PhasePlan, Phases, phase_plan
from farspan.ops.positions import Positions
from farspan.ops.rotary import Angles, Plan, Rotary

DTYPES = (torch.bfloat16, torch.float32)
"""Those the kernel prepares: squares leave float16's range, which :func:`~farspan.ops.coca.fused.balance` mends."""


def coca_plan(rotary: Rotary, places: Positions, *, causal: bool, dtype: torch.dtype) -> Plan | PhasePlan:
    """The angles of a CoCA call in q's dtype as "auto" wants them: phases where the kernel prepares, else tables.

    >>> places = Positions(2, 5, torch.device("cpu"), 0, None, True)
    >>> type(coca_plan(Rotary(8), places, causal=True, dtype=torch.float32)[0].query).__name__
    'Angles'
    """
    if preparation_refusal(dtype, rotary.dim, places.device) is None:
        return phase_plan(rotary, places, causal=causal)
    return rotary.plan(places, places.n, places.m, causal=causal, dtype=dtype)


def preparation_refusal(dtype: torch.dtype, width: int, device: torch.device) -> str | None:
    """Why the kernel cannot prepare heads of a width; None when it can.

    >>> preparation_refusal(torch.float32, 64, torch.device("cpu"))
    'the kernel prepares on CUDA alone, got cpu'
    """
    if device.type != "cuda":
        return f"the kernel prepares on CUDA alone, got {device.type}"
    if width > WIDEST:  # which is not told: torch.compile may let it vary
        return f"the kernel prepares heads up to {WIDEST} wide"
    return cannot_derive_forwards() or _lasting_refusal(dtype, device)


@constant
def _lasting_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """What of :func:`preparation_refusal` torch.compile may keep: it looks out for torch.func's transforms itself."""
    if dtype not in DTYPES:
        return f"the kernel prepares bfloat16 and float32, got {dtype}"
    if torch._C._are_functorch_transforms_active():
        return "the kernel has no rules for the transforms of torch.func"
    if torch.compiler.is_exporting():
        return "an exported graph should run where there is no Triton, too"
    if not is_ampere(device.index):
        return "the kernel prepares on Nvidia GPUs from Ampere on"
    return cannot_start()


def prepared(
    q: Tensor, t: Tensor, query: Angles | Phases | None, key: Angles | Phases | None, *, form: str = "exact"
) -> tuple[Tensor, Tensor]:
    """:func:`farspan.ops.coca_features`; from phases by the kernel, unless q has another dtype than they were made for.

    >>> q, t = torch.randn(1, 2, 5, 8), torch.rand(1, 1, 5, 4)
    >>> [q_.shape[-1] for q_ in prepared(q, t, None, None)]
    [4, 4]
    """
    if isinstance(query, Phases) and isinstance(key, Phases) and q.dtype in DTYPES:
        return _by_kernel(q, t, query, key, form)
    return coca_features(q, t, _table(query, q), _table(key, t), form=form)


def _by_kernel(q: Tensor, t: Tensor, query: Phases, key: Phases, form: str) -> tuple[Tensor, Tensor]:
    from farspan.ops.triton.coca_features import prepare_op

    read = (t, query.step, query.positions, key.positions)
    if any(x is not None and x.device != q.device for x in read):  # the kernel would not notice
        raise ValueError(f"t, angles and positions must be on the device of q, {q.device}; move them there")
    return prepare_op(q, t, query.step, query.positions, key.positions, query.first, key.first, form, query.factor)


def _table(angles: Angles | Phases | None, x: Tensor) -> Angles | None:
    return angles.angles(x.shape[2], x.dtype) if isinstance(angles, Phases) else angles
