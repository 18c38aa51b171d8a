"""What the tests of the kernels share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from farspan.ops.coca import COCA
from farspan.ops.coca_decode import why_not_decode_triton
from tests.helpers import coca_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ["exact", "slack"]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """torch.empty is full of NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(n: int, m: int | None = None, *, dtype: torch.dtype = torch.float32, **shape: int) -> tuple[Tensor, ...]:
    return tuple(x.detach().to(dtype) for x in coca_inputs(n, m, dtype=torch.float32, device=DEVICE, **shape))


def assert_as_good_as_eager(out: Tensor, truth: Tensor, plain: Tensor) -> None:
    """Error at most twice that of eager in the same dtype; the rounding of the result itself is always allowed.

    Of these, float32 may have two on a GPU, whose power of two is itself only right to one, and four on a processor,
    where eager may be much better than the kernel's angles: it depends on how sums are added up there.
    """
    units = (2 if DEVICE == "cuda" else 4) if out.dtype == torch.float32 else 1
    rounding = units * float(truth.abs().max()) * torch.finfo(out.dtype).eps
    ours, theirs = ((x.double() - truth).abs() for x in (out, plain))
    assert out.isfinite().all()
    largest, mean = ((float(ours.max()), float(theirs.max())), (float(ours.mean()), float(theirs.mean())))
    assert largest[0] <= 2 * largest[1] + rounding, f"largest error {largest[0]:.2e}, eager's {largest[1]:.2e}"
    assert mean[0] <= 2 * mean[1] + rounding / 8, f"mean error {mean[0]:.2e}, eager's {mean[1]:.2e}"


@contextmanager
def decoding(backend: str) -> Iterator[None]:
    """Let "auto" decode CoCA on the kernel wherever it can run ("triton"), or as any other call ("sdpa")."""
    kernel, _, *others = COCA.entries
    asked = kernel._replace(device=None, why_not=lambda call: why_not_decode_triton(replace(call, backend=backend)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(COCA, "entries", [*([asked] if backend == "triton" else []), *others])
        yield
