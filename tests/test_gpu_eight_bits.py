"""t in eight bits on a GPU, at the lengths it is for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from farspan.ops import DynamicNTK, Rotary, half_width_attention, half_width_attention_reference, quantize_t

pytestmark = pytest.mark.gpu
M = 32_768
DRAWS = 8


def inputs(h: int, g: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """With queries of half the usual size: of larger ones now and then one key of one head makes most of the error."""
    sizes = ((2, h, n, d), (2, g, M, d // 2), (2, g, M, d))
    q, t, v = (torch.randn(size, device="cuda").to(dtype) for size in sizes)
    return q / 2, t.relu_(), v


def error(out: Tensor, q: Tensor, t: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Against the equations in float64, a row at a time, which fits into memory."""
    t_scale, lengths = options.pop("t_scale", None), options.pop("lengths", None)
    errors = []
    for row in range(len(q)):
        one = slice(row, row + 1)
        options["lengths"] = None if lengths is None else lengths[one]
        options["t_scale"] = None if t_scale is None else t_scale[one]
        keys = t[one] if t_scale is not None else t[one].double()
        truth = half_width_attention_reference(q[one].double(), keys, v[one].double(), **options)
        errors.append(out[one].double() - truth)
    return torch.cat(errors)


@pytest.mark.parametrize("form", ["exact", "slack"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("h", "g", "n"), [(4, 4, 1), (8, 2, 1), (8, 1, 1), (8, 2, 2), (4, 2, 20)], ids=str)
def test_codes_cost_a_kernel_nothing_beyond_quantizing(
    form: str, dtype: torch.dtype, d: int, h: int, g: int, n: int
) -> None:
    """On several inputs at most 1.5 times the error of plain t usually, and twice at the largest, each against its own
    float64; on one, which of the two is nearer is chance."""
    options: dict[str, Any] = {"rotary": Rotary(d), "form": form}
    options["lengths"] = torch.tensor([M, 20_001], device="cuda")
    found = []
    for _ in range(DRAWS):
        q, t, v = inputs(h, g, n, d, dtype)
        codes, t_scale = quantize_t(t)
        coded = half_width_attention(q, codes, v, t_scale=t_scale, **options)
        ours = error(coded, q, codes, v, t_scale=t_scale, **options)
        found.append((coded, ours, error(half_width_attention(q, t, v, **options), q, t, v, **options)))
    coded, ours, theirs = (torch.cat(parts) for parts in zip(*found, strict=True))
    rounding = float(coded.abs().max()) * torch.finfo(dtype).eps
    assert ours.isfinite().all()
    assert ours.norm() <= 1.5 * theirs.norm()
    assert ours.abs().max() <= 2 * theirs.abs().max() + rounding


@pytest.mark.parametrize(("h", "g"), [(4, 4), (8, 2)], ids=str)
def test_a_graph_of_codes_follows_lengths_as_they_grow(h: int, g: int) -> None:
    q, t, v = inputs(h, g, 1, 128, torch.bfloat16)
    codes, t_scale = quantize_t(t)
    lengths = torch.tensor([M, 20_001], device="cuda")
    options: dict[str, Any] = {"rotary": Rotary(128, scaling=DynamicNTK(4, 8192)), "t_scale": t_scale}

    def step() -> Tensor:
        return half_width_attention(q, codes, v, lengths=lengths, **options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for grown in ([M, 20_002], [700, 31_000]):
        lengths.copy_(torch.tensor(grown))
        graph.replay()
        assert torch.equal(out, step())
