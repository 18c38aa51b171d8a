"""Every op with options of its own, inputs for it, and every kind of mask and positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farspan.ops import (
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
