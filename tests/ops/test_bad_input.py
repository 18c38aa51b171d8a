"""Bad arguments raise one line that names argument, value and remedy."""

import pytest
import torch

from farspan.ops import DynamicNTK, Rotary, coca_attention, cosformer_attention, rope_attention
from tests.helpers import coca_inputs, softmax_inputs
from tests.ops.cases import OPS, inputs, of_heads

CASES = {
    "odd width": ({"q": (1, 4, 5, 7)}, r"head_dim must be even to form rotary pairs, got 7; choose"),
    "t width": ({"t": (1, 2, 5, 8)}, r"t must have width 4 for q of width 8, got 8; check the projection"),
    "groups": ({"t": (1, 3, 5, 4), "v": (1, 3, 5, 8)}, r"key heads must divide query heads, got 3 for 4; choose"),
    "rank": ({"q": (4, 5, 8)}, r"q must have shape \(batch, heads, positions, width\), got \(4, 5, 8\)"),
    "batch": ({"v": (2, 2, 5, 8)}, r"q, t and v must share the batch size, got 1, 1 and 2"),
    "lengths": ({"v": (1, 2, 6, 8)}, r"t and v must share heads and positions, got \(2, 5\) and \(2, 6\)"),
    "length 0": ({"q": (1, 4, 0, 8)}, r"q must hold at least one position, got length 0; skip the call"),
    "batch 0": (
        {"q": (0, 4, 5, 8), "t": (0, 2, 5, 4), "v": (0, 2, 5, 8)},
        r"q must hold at least one row, got batch size 0; skip the call",
    ),
    "more queries than keys": (
        {"q": (1, 4, 6, 8)},
        r"at least as many keys as queries, got 6 queries and 5 keys; pass",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_shapes_raise(name: str) -> None:
    shapes, message = CASES[name]
    shape = {"q": (1, 4, 5, 8), "t": (1, 2, 5, 4), "v": (1, 2, 5, 8)} | shapes
    q, t, v = (torch.zeros(shape[key]) for key in "qtv")
    with pytest.raises(ValueError, match=message):
        coca_attention(q, t, v, rotary=Rotary(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number of keys ≥ 1 or None, got 0"),
        ({"window": 2.5}, "window must be .* got 2.5"),
        (
            {"padding_mask": torch.ones(1, 4, dtype=torch.bool)},
            r"padding_mask must have shape .* = \(1, 5\), got \(1, 4\)",
        ),
        ({"padding_mask": torch.ones(1, 5)}, r"padding_mask must be bool \(True = keep\), got torch.float32"),
        ({"documents": torch.ones(1, 5)}, r"documents must be integer, got torch.float32"),
        ({"positions": torch.tensor([0, 1, 2, 1, 2])}, r"must not decrease, got 2 then 1 in row 0; pass documents="),
        (
            {"positions": torch.tensor([0, 1, 2, 3, 2**40])},
            r"positions must stay within ±2147483647, got 0 … 1099511627776",
        ),
        ({"positions": 2**31}, r"positions must stay within ±2147483647"),
        (
            {"positions": torch.arange(4)},
            r"positions must have shape \(5,\) or \(1, 5\), one for each of the keys, got \(4,\)",
        ),
        ({"positions": torch.arange(5.0)}, r"positions must hold integers, got torch.float32"),
        ({"positions": torch.arange(5)[None, None]}, r"positions must have shape \(5,\) or .*, got \(1, 1, 5\)"),
        (
            {"positions": (torch.arange(4), torch.arange(5))},
            r"positions\[0\] must have shape \(5,\) or \(1, 5\), one for each of the queries, got \(4,\)",
        ),
        (
            {"positions": (torch.arange(5), torch.arange(5)), "documents": torch.zeros(1, 5, dtype=torch.long)},
            "documents cannot be combined with a pair of positions; use a tensor",
        ),
        ({"form": "exat"}, "form must be one of 'exact', 'slack', got 'exat'; did you mean 'exact'"),
        ({"backend": "trition"}, "backend must be one of .* got 'trition'"),
        ({"rotary": Rotary(16)}, "rotary must have dim 8, the width of q, got 16"),
    ],
)
def test_wrong_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coca_attention(*coca_inputs(5), **{"rotary": Rotary(8), **options})


def test_more_queries_than_keys_need_positions_of_both() -> None:
    q, t, v = torch.randn(1, 4, 6, 8), torch.rand(1, 2, 4, 4), torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"positions=\(of queries, of keys\)"):
        coca_attention(q, t, v, rotary=Rotary(8), causal=False)
    options = {"rotary": Rotary(8), "causal": False, "positions": (torch.arange(6), torch.arange(4))}
    assert coca_attention(q, t, v, **options).shape == (1, 4, 6, 8)


def test_mixed_and_integer_dtypes_raise() -> None:
    q, t, v = coca_inputs(5)
    with pytest.raises(ValueError, match=r"t must have the floating dtype of q \(torch.float64\), got torch.float32"):
        coca_attention(q, t.float(), v, rotary=Rotary(8))
    with pytest.raises(ValueError, match=r"q must have the floating dtype of q .*, got torch.int64; convert"):
        coca_attention(q.long(), t.long(), v.long(), rotary=Rotary(8))


def test_packed_documents_may_restart_their_positions() -> None:
    documents, positions = torch.tensor([[0, 0, 0, 1, 1]]), torch.tensor([0, 1, 2, 0, 1])
    q, t, v = coca_inputs(5)
    out = coca_attention(q, t, v, rotary=Rotary(8), positions=positions, documents=documents, form="slack")
    second = coca_attention(q[:, :, 3:], t[:, :, 3:], v[:, :, 3:], rotary=Rotary(8), form="slack")
    assert (out[:, :, 3:] - second).abs().max() <= 1e-12


PAIR = (torch.arange(5), torch.arange(5))
DOCUMENTS = torch.zeros(1, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("pope", {"rotary": None}, "phase needs angles, got rotary=None"),
        ("pope", {"phase": torch.ones(3, 8)}, r"^phase must have shape \(4, 8\), one per head .*, got \(3, 8\)"),
        ("pope", {"rotary": Rotary(8)}, "rotary must have dim 16, twice the width of q, got 8"),
        ("linear coca", {"rotary": Rotary(8, scaling=DynamicNTK(4, 8))}, "fixed frequencies, got dynamic NTK"),
        ("linear coca", {"backend": "triton"}, "backend must be one of 'auto', 'chunked', 'reference', got 'triton'"),
        ("raise", {"max_length": 0}, "max_length must be a whole number ≥ 1, the M of the model, got 0"),
        ("raise", {"beyond": "raised"}, "beyond must be one of .* got 'raised'; did you mean 'raise"),
        ("raise", {"activation": "gelu"}, "activation must be one of 'relu', 'elu', got 'gelu'"),
        ("raise", {"backend": "chunkd"}, "did you mean 'chunked'"),
        ("raise", {"causal": False, "return_state": True}, "state needs causal=True"),
        ("raise", {"window": 3}, "linear attention has no window, got window 3"),
        ("raise", {"backend": "reference", "return_state": True}, "backend='reference' has no state"),
        ("raise", {"positions": "proportional"}, "a tensor or a pair of tensors, got 'proportional'"),
        ("raise", {"documents": torch.tensor([[0, 1, 0, 1, 1]])}, "must not decrease in linear attention"),
        ("raise", {"documents": DOCUMENTS, "return_state": True}, "documents cannot be combined"),
        ("raise", {"positions": PAIR}, "takes one position per key, got a pair of positions"),
        ("raise", {"padding_mask": torch.ones(1, 4).bool()}, r"padding_mask must have shape .* \(1, 5\)"),
    ],
)
def test_wrong_options_of_other_ops_raise(kind: str, options: dict[str, object], message: str) -> None:
    op, fixed = OPS[kind]
    with pytest.raises(ValueError, match=message):
        op(*inputs(kind, 5, 5), **of_heads(fixed, 4) | options)


@pytest.mark.parametrize("backend", ["auto", "chunked", "triton", "reference"])
def test_other_ops_check_their_tensors(backend: str) -> None:
    q, k, v = softmax_inputs(5)
    with pytest.raises(ValueError, match="k must have width 8"):
        rope_attention(q, k[..., :4], v, rotary=Rotary(8))
    with pytest.raises(ValueError, match="q must hold at least one row, got batch size 0; skip the call"):
        cosformer_attention(q[:0], k[:0], v[:0], max_length=8, backend=backend)
