"""What the tests of the kernels share."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

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
