"""A half-width cache with rows of different lengths and positions; bad arguments raise."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install farspan[gpu])")

from farspan.ops import NTK, DynamicNTK, Rotary, coca_attention, coca_attention_reference
from farspan.ops.coca.half_width import half_width_attention, half_width_attention_reference
from farspan.ops.phases import rotary_steps
from farspan.ops.triton import coca_decode
from tests.ops.kernels import DEVICE, inputs, poison  # noqa: F401 (a fixture for every test here)

FORMS = ["exact", "slack"]


@pytest.mark.parametrize(
    ("n", "splits", "law"),
    [
        (1, 1, NTK(2)),
        (1, None, NTK(2)),
        (1, 3, DynamicNTK(4, 16)),
        (1, 2, None),
        (3, 2, NTK(2)),
        (17, 1, DynamicNTK(4, 40)),
    ],
    ids=str,
)
def test_rows_of_different_lengths_equal_each_row_alone(
    n: int, splits: int | None, law: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits is not None:
        monkeypatch.setattr(coca_decode, "choose_splits", lambda *arguments: splits)
    q, t, v = inputs(n, 90, b=4, h=2, g=1, d=16, dtype=torch.float16)
    lengths, first = torch.tensor([90, 20, 65, 0], device=DEVICE), torch.tensor([9, 0, 30, 1], device=DEVICE)
    t[1, :, 20:], v[1, :, 20:], v[3] = torch.nan, torch.nan, torch.nan
    rotary = None if law is None else Rotary(16, scaling=law)
    for options in ({}, {"window": 33, "form": "slack", "first": first}):
        options = {"rotary": rotary, "lengths": lengths, **options}
        out = half_width_attention(q, t, v, **options)
        wide = (q.double(), t.double(), v.double())
        assert (out - half_width_attention_reference(*wide, **options)).abs().max() <= 4e-3
        assert (out[3] == 0).all()


def test_lengths_and_first_may_be_strided() -> None:
    """A column of a table, or one number for all rows."""
    q, t, v = inputs(1, 20, b=2, d=16)
    table = torch.tensor([[20, 7], [9, 7]], device=DEVICE)
    for strided in (table[:, 0], torch.tensor([12], device=DEVICE).expand(2)):
        for name in ("lengths", "first"):
            options = {"rotary": Rotary(16), name: strided}
            truth = half_width_attention_reference(q.double(), t.double(), v.double(), **options)
            assert (half_width_attention(q, t, v, **options) - truth).abs().max() <= 1e-5


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("splits", [1, 2])
def test_queries_before_the_first_key_give_zeros_also_bidirectionally(
    window: int | None, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coca_decode, "choose_splits", lambda *arguments: splits)
    q, t, v = inputs(5, 40, b=2, d=16)
    options: dict[str, Any] = {"rotary": Rotary(16), "causal": False, "window": window}
    options["lengths"] = torch.tensor([40, 3], device=DEVICE)
    out = half_width_attention(q, t, v, **options)
    assert (out[1, :, :2] == 0).all()
    truth = half_width_attention_reference(q.double(), t.double(), v.double(), **options)
    assert (out - truth).abs().max() <= 1e-5


def test_per_request_base_is_that_of_each_row() -> None:
    """Each row its own request: its base comes from its own length, whatever the batch-mates."""
    q, t, v = inputs(1, 90, b=3, d=16)
    lengths, rotary = torch.tensor([90, 25, 60], device=DEVICE), Rotary(16, scaling=DynamicNTK(4, 20, "per_request"))
    out = half_width_attention(q, t, v, rotary=rotary, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = (x[row : row + 1].double() for x in (q, t[:, :, :length], v[:, :, :length]))
        truth = coca_attention_reference(*alone, rotary=rotary.at_length(length))
        assert (out[row] - truth[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("law", [None, DynamicNTK(4, 6)], ids=str)
def test_decoding_equals_prefill_equals_any_chunking(law: DynamicNTK | None) -> None:
    q, t, v = inputs(18, h=1, g=1, d=16)
    rotary = Rotary(16, scaling=law)
    whole = coca_attention(q, t, v, rotary=rotary, backend="triton")
    for pieces in ([1] * 18, [9, 3, 1, 5]):
        stop, parts = 0, []
        for piece in q.split(pieces, dim=2):
            stop += piece.shape[2]
            parts.append(coca_attention(piece, t[:, :, :stop], v[:, :, :stop], rotary=rotary, backend="triton"))
        assert (torch.cat(parts, dim=2) - whole).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lengths": torch.ones(3, dtype=torch.long)},
            "lengths must hold 2 integers, one a row, got torch.int64 \\(3,\\)",
        ),
        ({"first": torch.ones(2)}, "first must hold 2 integers, one a row, got torch.float32"),
        (
            {"lengths": torch.ones(2, dtype=torch.long, device="meta")},
            f"lengths must lie where q does, on {DEVICE}.*, got meta; move it",
        ),
        ({"window": 0}, "window must be a whole number of keys ≥ 1 or None, got 0; a query always sees itself"),
        ({"window": -3}, "window must be a whole number of keys ≥ 1 or None, got -3"),
        ({"first": 2**31 - 4}, "first must keep positions within ±2147483647, got 2147483644 … 2147483651"),
        ({"first": -(2**31)}, "first must keep positions within ±2147483647, got -2147483648 …"),
        ({"q": torch.ones(2, 4, 0, 8)}, "q must hold at least one position, got length 0; skip the call"),
        ({"q": torch.ones(0, 4, 1, 8)}, "q must hold at least one row, got batch size 0; skip the call"),
        ({"q": torch.ones(2, 4, 1, 9)}, "head_dim must be even to form rotary pairs, got 9; choose"),
        ({"q": torch.ones(2, 1, 8)}, "q must have shape \\(batch, heads, positions, width\\), got \\(2, 1, 8\\)"),
        ({"form": "exat"}, "did you mean 'exact'"),
    ],
)
def test_bad_caches_are_refused(change: dict[str, Any], message: str) -> None:
    q, t, v = inputs(1, 8, b=2)
    for op in (half_width_attention, half_width_attention_reference):
        with pytest.raises(ValueError, match=message):
            op(**{"q": q, "t": t, "v": v, "rotary": Rotary(8), **change})


def test_a_cache_that_wants_gradients_is_refused() -> None:
    q, t, v = inputs(1, 8, b=2)
    with pytest.raises(ValueError, match=r"half_width_attention has no gradients; call it under torch.no_grad\(\)"):
        half_width_attention(q, t.requires_grad_(), v, rotary=Rotary(8))


@pytest.mark.skipif(DEVICE != "cpu", reason="a look at values on a GPU would stall the stream")
def test_first_of_a_row_beyond_all_positions_is_refused() -> None:
    q, t, v = inputs(1, 8, b=2)
    with pytest.raises(ValueError, match="first must keep positions within ±2147483647, got 0 … 2147483651"):
        half_width_attention(q, t, v, rotary=Rotary(8), first=torch.tensor([0, 2**31 - 4]))


def test_first_of_a_row_is_not_cut_to_32_bits() -> None:
    q, t, v = inputs(1, 20, b=2, d=16)
    step, first = rotary_steps(Rotary(16), None, q.device), torch.tensor([2**31 - 9, 0], device=DEVICE)
    rest = (None, None, None, 0, 0, "exact", False, True, None, 0.25)
    out = coca_decode.decode_op(q, t, v, step, None, first, *rest)
    truth = coca_attention_reference(q.double(), t.double(), v.double(), rotary=Rotary(16))  # only distances count
    assert (out - truth).abs().max() <= 1e-5


@pytest.mark.parametrize("law", [None, DynamicNTK(4, 8)], ids=str)
def test_no_row_reads_beyond_its_cache(law: DynamicNTK | None) -> None:
    q, t, v = inputs(2, 20, b=2, d=16)
    options: dict[str, Any] = {"rotary": Rotary(16, scaling=law), "lengths": torch.tensor([35, 20], device=DEVICE)}
    out = half_width_attention(q, t, v, **options)
    truth = half_width_attention_reference(q.double(), t.double(), v.double(), **options)
    assert (out - truth).abs().max() <= 1e-5
    assert (out - half_width_attention(q, t, v, rotary=options["rotary"])).abs().max() <= 1e-5
