"""Frequencies as whole numbers: exact at any position, made once, and never left behind by a trace or a graph."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from farspan.ops import Rotary
from farspan.ops.phases import rotary_steps, steps_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_steps_are_exact_where_float32_angles_are_not() -> None:
    theta = Rotary(128).frequencies()
    for position in (1, 131_071, 2**31 - 1, -7):
        phase = (steps_of(theta)[0] * position).double() / 2.0**64
        error = torch.remainder(phase - theta * position / (2 * torch.pi) + 0.5, 1) - 0.5
        assert error.abs().max() <= 2.0**-53 * abs(position) + 2**-52


@pytest.mark.parametrize("fake_first", [True, False])
def test_steps_made_under_fake_tensors_are_not_kept(fake_first: bool) -> None:
    """Tracing by fake tensors must neither leave one behind for real calls nor be handed a real one."""
    rotary = Rotary(16, base=777.0 + fake_first)  # of its own, so that nothing is kept yet
    for fake in (fake_first, not fake_first):
        with FakeTensorMode() if fake else nullcontext():
            assert isinstance(rotary_steps(rotary, None, torch.device(DEVICE)), FakeTensor) is fake


@contextmanager
def capturing() -> Iterator[None]:
    """As if a CUDA graph were captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def test_steps_made_in_a_cuda_graph_are_not_kept() -> None:
    rotary, device = Rotary(16, base=4711.0), torch.device(DEVICE)
    with capturing():
        inside, again = (rotary_steps(rotary, None, device) for _ in range(2))
    outside = rotary_steps(rotary, None, device)
    assert len({id(x) for x in (inside, again, outside)}) == 3
    assert (inside - outside).abs().max() <= 2**12  # 2⁻⁵² turns: a GPU's powers are not the CPU's to the last bit


def test_a_cuda_graph_reads_steps_made_before_which_then_stay() -> None:
    """Else it would replay the making of them; and it does not keep alive what it reads."""
    rotary, device = Rotary(16, base=1147.0), torch.device(DEVICE)
    before = weakref.ref(rotary_steps(rotary, None, device))
    with capturing():
        assert rotary_steps(rotary, None, device) is before()
    other = weakref.ref(rotary_steps(Rotary(16, base=1148.0), None, device))
    for length in range(300):
        rotary_steps(rotary, length, device)
    assert other() is None  # no graph reads it: let go
    with capturing():
        assert rotary_steps(rotary, None, device) is before()
