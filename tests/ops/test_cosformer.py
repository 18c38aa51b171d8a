"""cosFormer: chunks and the definition agree, in any dtype, and bad calls raise."""

import math

import pytest
import torch

from farspan.ops import cosformer_attention, cosformer_attention_reference
from farspan.ops.cosformer import BEYOND
from farspan.ops.device import why_not_triton
from tests.helpers import largest_difference, masks, softmax_inputs
from tests.ops.cosformer import check_against_eager, in_pieces
from tests.ops.kernels import DEVICE

MASKS = [name for name in masks(1, 1) if "window" not in name]


def test_two_tokens_by_hand() -> None:
    q = torch.tensor([[1.0, -5.0], [2.0, 3.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([[1.0, 1.0], [-7.0, 2.0]], dtype=torch.float64)[None, None]
    v = torch.tensor([[1.0], [10.0]], dtype=torch.float64)[None, None]
    far, near = (2 + 3) * math.cos(math.pi / 8), 6.0  # query 1 on key 0, M = 4, and on itself
    want = [1.0, (far * 1 + near * 10) / (far + near)]
    assert cosformer_attention(q, k, v, max_length=4).flatten().tolist() == pytest.approx(want, rel=1e-14)


def test_chunked_equals_reference_over_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.ops.cosformer_chunked.ELEMENTS", 2**12)
    q, k, v = (x.detach() for x in softmax_inputs(1025, d=4, h=1, g=1))
    options = {"max_length": 2000}
    whole = cosformer_attention_reference(q, k, v, **options)
    assert (cosformer_attention(q, k, v, **options) - whole).abs().max() <= 1e-12
    for size in (64, 300):
        assert (in_pieces((q, k, v), size, **options)[0] - whole).abs().max() <= 1e-12


@pytest.mark.parametrize("beyond", BEYOND)
def test_growing_the_sequence_changes_no_earlier_output(beyond: str) -> None:
    """The published code takes M from the current length; a prefix then changes by a third."""
    q, k, v = (x.detach() for x in softmax_inputs(200))
    whole = cosformer_attention(q, k, v, max_length=256, beyond=beyond)
    for n in (1, 64, 130):
        prefix = cosformer_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], max_length=256, beyond=beyond)
        assert (prefix - whole[:, :, :n]).abs().max() <= 1e-12
    published = cosformer_attention(q[:, :, :100], k[:, :, :100], v[:, :, :100], max_length=100)
    longer = cosformer_attention(q, k, v, max_length=200)[:, :, :100]
    assert (published - longer).norm() / longer.norm() > 0.02  # what tying M to the length would do


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [64, 257])
def test_errors_are_at_most_twice_those_of_eager_and_of_the_output_one_rounding(dtype: torch.dtype, n: int) -> None:
    check_against_eager(n, dtype, "chunked", h=4, g=4, d=32)
    q, k, v = (x.detach().to(dtype) for x in softmax_inputs(n, h=4, g=4, d=32))
    truth = cosformer_attention_reference(q.double(), k.double(), v.double(), max_length=n)
    error = (cosformer_attention(q, k, v, max_length=n).double() - truth).abs().max()
    assert error <= torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("causal", [True, False])
def test_autocast_does_not_reach_the_sums(causal: bool) -> None:
    inputs = [x.detach().bfloat16().requires_grad_() for x in softmax_inputs(100)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = cosformer_attention(*inputs, max_length=100, causal=causal)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


NEEDS_TRITON = pytest.mark.skipif(why_not_triton(DEVICE) is not None, reason="needs triton (pip install farspan[gpu])")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("beyond", "backend"),
    [*((beyond, "auto") for beyond in BEYOND), pytest.param("raise", "triton", marks=NEEDS_TRITON)],
)
@pytest.mark.parametrize("size", [1e-3, 100.0])
def test_dead_queries_and_disjoint_supports_are_finite(
    dtype: torch.dtype, beyond: str, backend: str, size: float
) -> None:
    n, device = (40, DEVICE) if backend == "triton" else (70, "cpu")
    q, k, v = (x.detach().to(device, dtype) * size for x in softmax_inputs(n, d=8, h=2, g=2))
    q[:, :, ::3] = -q[:, :, ::3].abs()  # nothing after the ReLU
    q[:, 1, :, :4], k[:, 1, :, 4:] = -1, -1  # no feature in common
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = cosformer_attention(*inputs, max_length=70, beyond=beyond, backend=backend)
    assert out.isfinite().all()
    assert (out[:, :, ::3] == 0).all()
    assert (out[:, 1] == 0).all()
    assert out[:, 0].abs().sum() > 0
    gradients = torch.autograd.grad(out.float().sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)


def test_training_keeps_one_state_per_segment() -> None:
    """Saved for backward: inputs, outputs, and the sums of each segment; neither N×2d×d nor the features."""
    q, k, v = (x.float().detach().requires_grad_() for x in softmax_inputs(4096, h=2, g=2, d=32))
    saved: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        cosformer_attention(q, k, v, max_length=4096)
    assert sum(saved.values()) <= 2 * (q.nbytes + k.nbytes + v.nbytes)


@pytest.mark.slow
def test_it_compiles_without_a_graph_break() -> None:
    inputs = softmax_inputs(200, b=2)
    compiled = torch.compile(cosformer_attention, fullgraph=True, backend="aot_eager")
    assert largest_difference(compiled, cosformer_attention, inputs, max_length=200, beyond="decay") <= 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length must be a whole number ≥ 1, the M of the model, got 0"),
        ({"max_length": 2.5}, "max_length must be .* got 2.5"),
        ({"beyond": "raised"}, "beyond must be one of .* got 'raised'; did you mean 'raise"),
        ({"activation": "gelu"}, "activation must be one of 'relu', 'elu', got 'gelu'"),
        ({"backend": "chunkd"}, "did you mean 'chunked'"),
        ({"causal": False, "return_state": True}, "state needs causal=True"),
        ({"window": 3}, "linear attention has no window, got window 3"),
        ({"backend": "reference", "return_state": True}, "backend='reference' has no state"),
        ({"positions": "proportional"}, "a tensor or a pair of tensors, got 'proportional'"),
        ({"documents": torch.tensor([[0, 1, 0, 1, 1]])}, "documents must be adjacent runs .* a split one in row 0"),
        ({"documents": torch.zeros(1, 5, dtype=torch.long), "return_state": True}, "documents cannot be combined"),
        (
            {"positions": (torch.arange(5), torch.arange(5)), "return_state": True},
            "state needs queries that are the last",
        ),
        ({"padding_mask": torch.ones(1, 4, dtype=torch.bool)}, r"padding_mask must have shape .* \(1, 5\)"),
    ],
)
def test_bad_calls_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosformer_attention(*softmax_inputs(5), **{"max_length": 8, **options})
