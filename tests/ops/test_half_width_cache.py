"""The half-width kernels on a static cache: rows of different lengths and positions."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import NTK, DynamicNTK, Rotary, coca_attention, coca_attention_reference
from farspan.ops.masking import AttentionMask
from farspan.ops.rotary import fixed_point
from farspan.ops.triton import coca_decode
from farspan.ops.triton.coca_decode import DecodeCall, launch
from tests.ops.kernels import DEVICE, inputs, poison  # noqa: F401 (a fixture for every test here)


def static_mask(n: int, m: int, lengths: torch.Tensor, starts: torch.Tensor) -> AttentionMask:
    """Make the mask of n queries at the end of each row's keys, of which there are `lengths` (b) in m slots."""
    key = starts[:, None] + torch.arange(m, device=lengths.device)
    query = (starts + lengths)[:, None] + torch.arange(-n, 0, device=lengths.device)
    shared: dict[str, Any] = {"positions": (query, key), "lengths": lengths, "firsts": lambda: starts}
    return AttentionMask(n, m, lengths.device, first=None, aligned=False, **shared)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize(
    ("n", "splits", "scaling"),
    [(1, None, NTK(2)), (1, 3, DynamicNTK(4, 16)), (3, 2, None), (12, 1, DynamicNTK(4, 40))],
    ids=str,
)
def test_rows_of_different_lengths_equal_each_row_alone(
    n: int, splits: int | None, scaling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits is not None:
        monkeypatch.setattr(coca_decode, "choose_splits", lambda *arguments: splits)
    q, t, v = inputs(n, 70, b=4, h=2, g=1, d=16, dtype=torch.float16)
    lengths = numbers(70, 20, 65, 0)
    written = (torch.arange(70, device=DEVICE) < lengths[:, None])[:, None, :, None]
    rotary = None if scaling is None else Rotary(16, scaling=scaling)
    for form, window, starts in (("exact", None, numbers(0, 0, 0, 0)), ("slack", 33, numbers(9, 0, 30, 1))):
        mask = static_mask(n, 70, lengths, starts)
        mask.window = window
        truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=rotary, form=form, mask=mask)
        held = [torch.where(written, x, torch.nan) for x in (t, v)]
        out = coca_attention(q, *held, rotary=rotary, form=form, mask=mask, backend="triton")
        assert (out - truth).abs().max() <= 4e-3
        assert (out[3] == 0).all()


def test_lengths_and_starts_may_be_strided() -> None:
    """A column of a table, or one number for all rows."""
    q, t, v = inputs(1, 20, b=2, h=1, g=1, d=16)
    for strided in (torch.tensor([[20, 7], [9, 7]], device=DEVICE)[:, 0], numbers(12).expand(2)):
        for lengths, starts in ((strided, numbers(0, 0)), (numbers(20, 20), strided)):
            options: dict[str, Any] = {"rotary": Rotary(16), "mask": static_mask(1, 20, lengths, starts)}
            truth = coca_attention_reference(q.double(), t.double(), v.double(), **options)
            assert (coca_attention(q, t, v, **options, backend="triton") - truth).abs().max() <= 1e-5


@pytest.mark.parametrize(("window", "splits"), [(None, 1), (2, 2)])
def test_queries_before_the_first_key_give_zeros_also_bidirectionally(window: int | None, splits: int) -> None:
    q, t, v = inputs(5, 40, b=2, d=16)
    step, rest = fixed_point(Rotary(16).frequencies()).to(DEVICE), (None, None, None, None)
    call = DecodeCall(q, t, v, step, numbers(40, 3), *rest, 0, "exact", causal=False, window=window, scale=0.25)
    out = launch(call, splits=splits)
    assert (out[1, :, :2] == 0).all()
    for got, row, length in ((out[0], 0, 40), (out[1, :, 2:], 1, 3)):
        alone = (x[row : row + 1, :].double() for x in (q[:, :, -length:], t[:, :, :length], v[:, :, :length]))
        truth = coca_attention_reference(*alone, rotary=Rotary(16), causal=False, window=window)
        assert (got - truth[0]).abs().max() <= 1e-5


def test_per_request_base_is_that_of_each_row() -> None:
    """Each row is its own request: its base comes from its own length, whatever the rest of the batch."""
    q, t, v = inputs(1, 90, b=3, d=16)
    lengths, rotary = numbers(90, 25, 60), Rotary(16, scaling=DynamicNTK(4, 20, "per_request"))
    out = coca_attention(q, t, v, rotary=rotary, mask=static_mask(1, 90, lengths, 0 * lengths), backend="triton")
    for row, length in enumerate(lengths.tolist()):
        alone = (x[row : row + 1].double() for x in (q, t[:, :, :length], v[:, :, :length]))
        truth = coca_attention_reference(*alone, rotary=rotary.at_length(length))
        assert (out[row] - truth[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("scaling", [None, DynamicNTK(4, 6)], ids=str)
def test_decoding_equals_prefill_equals_any_chunking(scaling: DynamicNTK | None) -> None:
    q, t, v = inputs(18, h=1, g=1, d=16)
    rotary = Rotary(16, scaling=scaling)
    whole = coca_attention(q, t, v, rotary=rotary, backend="triton")
    for pieces in ([1] * 18, [9, 3, 1, 5]):
        stop, parts = 0, []
        for piece in q.split(pieces, dim=2):
            stop += piece.shape[2]
            parts.append(coca_attention(piece, t[:, :, :stop], v[:, :, :stop], rotary=rotary, backend="triton"))
        assert (torch.cat(parts, dim=2) - whole).abs().max() <= 1e-5


def test_the_start_of_a_row_is_not_cut_to_32_bits() -> None:
    q, t, v = inputs(1, 20, b=2, d=16)
    step, first = fixed_point(Rotary(16).frequencies()).to(DEVICE), numbers(2**31 - 9, 0)
    out = coca_decode.decode_op(q, t, v, step, None, first, None, None, None, 0, "exact", True, None, 0.25)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16))  # only distances count
    assert (out - truth).abs().max() <= 1e-5


def test_no_row_reads_beyond_its_cache() -> None:
    q, t, v = inputs(2, 20, b=2, d=16)
    step = fixed_point(Rotary(16).frequencies()).to(DEVICE)
    call = DecodeCall(q, t, v, step, numbers(35, 20), None, None, None, None, 0, "exact", True, None, 0.25)
    assert torch.equal(launch(call), launch(call._replace(lengths=None)))
