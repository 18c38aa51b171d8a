"""Every op with options of its own, inputs for it, and every kind of mask and positions."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from farspan.ops import (
    NTK,
    DynamicNTK,
    Linear,
    Rotary,
    YaRN,
    alibi_attention,
    coca_attention,
    cosformer_attention,
    linear_coca_attention,
    pope_attention,
    rope_attention,
)
from tests.helpers import coca_inputs, masks, softmax_inputs

SOFTMAX: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "rope": (rope_attention, {"rotary": Rotary(8)}),
    "nope": (rope_attention, {"rotary": None}),
    "alibi": (alibi_attention, {}),
    "exact": (coca_attention, {"rotary": Rotary(8)}),
    "slack": (coca_attention, {"rotary": Rotary(8), "form": "slack"}),
    "coca nope": (coca_attention, {"rotary": None}),
    "pope": (pope_attention, {"rotary": Rotary(16), "phase": torch.linspace(-3, 3, 48).double().view(6, 8)}),
}
LINEAR: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "raise": (cosformer_attention, {"max_length": 200}),
    "decoupled": (cosformer_attention, {"max_length": 200, "beyond": "decoupled"}),
    "decay": (cosformer_attention, {"max_length": 200, "beyond": "decay", "activation": "elu"}),
    "not re-weighted": (cosformer_attention, {"max_length": 200, "reweight": False}),
    "linear coca": (linear_coca_attention, {"rotary": Rotary(8, scaling=YaRN(4, 16))}),
    "linear coca nope": (linear_coca_attention, {"rotary": None}),
}
OPS = SOFTMAX | LINEAR
SCALINGS = [Linear(4), NTK(4), YaRN(4, 16), DynamicNTK(4, 7), DynamicNTK(2, 7, "per_request")]


def of_heads(options: dict[str, Any], heads: int) -> dict[str, Any]:
    """Return an op's options for so many heads."""
    return {name: x[:heads] if name == "phase" and x is not None else x for name, x in options.items()}


def inputs(kind: str, n: int, m: int, **shape: int) -> tuple[Tensor, ...]:
    """Return leaves. In linear ops each query meets its keys: a sum of weights near zero has no digits to compare."""
    op, _ = OPS[kind]
    q, k, v = (coca_inputs if op in (coca_attention, linear_coca_attention) else softmax_inputs)(n, m, **shape)
    if kind in LINEAR:
        q, k = q.detach() + 0.5, k.detach() + 0.5
    return tuple(x.detach().requires_grad_() for x in (q, k, v))


def ways(n: int, m: int) -> dict[str, dict[str, Any]]:
    """Return every kind of mask and positions, by name, for three rows."""
    pad = torch.tensor([[0], [4], [11]])
    ranks = torch.arange(m)[None] - pad
    pair = (ranks[:, m - n :] + 1, ranks)
    return {
        **masks(3, m),
        "shifted": {"positions": 40},
        "gaps": {"positions": torch.arange(m) * 2},
        "rows of positions": {"positions": ranks, "padding_mask": ranks >= 0},
        "pair": {"positions": pair},
        "pair, padding": {"positions": pair, "padding_mask": ranks >= 0},
        "pair, window": {"positions": pair, "window": 3},
        "pair, bidirectional": {"positions": pair, "causal": False},
    }


@st.composite
def calls(
    draw: st.DrawFn, kind: str, sizes: tuple[int, ...] = (1, 2, 17, 33, 64)
) -> tuple[dict[str, int], dict[str, Any]]:
    """Draw a shape, a mask, positions, a scaling and a scale together."""
    g, times = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    m, b = draw(st.sampled_from(sizes)), draw(st.integers(1, 3))
    n = draw(st.sampled_from([m, draw(st.integers(1, m))]))
    index, lengths = torch.arange(m), torch.tensor([draw(st.integers(0, m)) for _ in range(b)])[:, None]
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if kind in SOFTMAX:
        options["window"] = draw(st.one_of(st.none(), st.integers(1, 20), st.integers(1, m + 3)))
    padding = draw(st.sampled_from([None, "left", "right", "holes"]))
    if padding is not None:
        holes = (index * 7 + lengths) % 10 < 7
        options["padding_mask"] = {"left": index >= lengths, "right": index < lengths, "holes": holes}[padding]
    positions = draw(
        st.sampled_from([None, 3, (index * 3) // 2, index - lengths, *(["pair"] if kind in SOFTMAX else [])])
    )
    if isinstance(positions, str):
        positions = (index[None, m - n :] + draw(st.integers(0, 3)), index[None])
    elif draw(st.booleans()):
        options["documents"] = (index + lengths) // draw(st.sampled_from([1, 5, 30, 70]))
    options["positions"] = positions
    if kind in ("rope", "exact", "slack", "pope"):
        options["rotary"] = Rotary(16 if kind == "pope" else 8, scaling=draw(st.sampled_from([None, *SCALINGS])))
    return {"n": n, "m": m, "b": b, "h": g * times, "g": g}, options
