"""How cosFormer's kernels cut a text: no cut shows, no launch and no sum grows past what there is room for."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import cosformer_attention
from farspan.ops.triton import linear
from tests.ops.cosformer import (
    check_against_eager,
    compare,
    inputs,
    meeting,
    short_segments,  # noqa: F401 (a fixture that tests name)
)
from tests.ops.kernels import poison  # noqa: F401 (a fixture for every test here)


@pytest.mark.usefixtures("short_segments")
def test_a_head_wider_than_a_programs_share_of_columns() -> None:
    check_against_eager(65, torch.bfloat16, h=1, d=128)
    assert linear.PRECISE.columns < 96
    assert compare(meeting(inputs(66, b=1, h=1, g=1, d=96))) <= 2e-6


def test_segments_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any cutting of the text gives the same up to the order of sums."""
    q, k, v = (x.detach() for x in inputs(130, h=1, d=8))
    results = []
    for segment in (64, 128, 640):
        monkeypatch.setattr(linear, "segment_of", lambda k, v, segment=segment: segment)
        results.append(cosformer_attention(q, k, v, max_length=150, backend="triton"))
    assert max(float((x - results[0]).abs().max()) for x in results) <= 1e-6


@pytest.mark.parametrize(("cut", "segment"), [((64, 32, 4, 2), 192), ((64, 128, 4, 2), 64), ((128, 64, 8, 2), 64)])
def test_no_cut_shows(cut: tuple[int, ...], segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller and larger than each other, and than a segment."""
    for table in (linear.PAIRS, linear.QUERY_PAIRS):
        monkeypatch.setitem(table, 64, linear.Cut(*cut))
    monkeypatch.setattr(linear, "segment_of", lambda q, v: segment)
    check_against_eager(200, torch.bfloat16, b=1, h=1, g=1, d=16)


@pytest.mark.usefixtures("short_segments")
def test_no_launch_grows_where_cuda_counts_to_65_535(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, tuple[int, ...]] = {}

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(linear, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids[self.name] = grid
            return self.kernel[grid]

    names = ("pairs_kernel", "totals_kernel", "prefix_kernel")
    for name in names:
        monkeypatch.setattr(linear, name, Noted(name))
    assert compare(meeting(inputs(66, b=3, h=1, g=1, d=8))) <= 2e-6
    assert {*grids} == {*names}
    assert all(len(grid) == 1 and grid[0] % 3 == 0 for grid in grids.values()), grids


@pytest.mark.parametrize("segment", [64, 128])
def test_the_backward_pass_keeps_inputs_outputs_and_a_state_a_segment(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = inputs(128, h=1, g=1, d=16, dtype=torch.bfloat16)
    monkeypatch.setattr(linear, "segment_of", lambda q, v: segment)
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = cosformer_attention(*leaves, max_length=128, backend="triton")
    denominators, angles = 4 * 128, 2 * 4 * 128
    states = 128 // segment * 2 * (2 * 16 * 16 + 4 * 16)  # with values in bfloat16
    assert sum(saved.values()) == sum(x.nbytes for x in (*leaves, out)) + denominators + angles + states


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_training_needs_at_most_a_fifth_more_than_inputs_outputs_and_gradients(d: int) -> None:
    leaves = inputs(32_768, b=1, h=16, g=16, d=d, dtype=torch.bfloat16)
    gradient = torch.randn_like(leaves[0])
    cosformer_attention(*leaves, max_length=32_768, backend="triton").backward(gradient)
    for x in leaves:
        x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(x.nbytes for x in leaves) - gradient.nbytes
    cosformer_attention(*leaves, max_length=32_768, backend="triton").backward(gradient)
    needed = 8 * leaves[0].nbytes  # q, k, v, output, and the gradient of each
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * needed
