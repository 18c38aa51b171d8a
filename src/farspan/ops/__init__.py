"""Attention as pure functions on tensors, each beside its reference. Layout (batch, heads, positions, width)."""

from farspan.ops.coca import coca_attention, coca_attention_reference, coca_features
from farspan.ops.coca.half_width import half_width_attention, half_width_attention_reference
from farspan.ops.cosformer import (
    LinearState,
    cosformer_attention,
    cosformer_attention_reference,
    linear_coca_attention,
    linear_coca_attention_reference,
)
from farspan.ops.rotary import Rotary
from farspan.ops.scaling import NTK, DynamicNTK, Linear, Llama3, YaRN
from farspan.ops.softmax.interface import (
    alibi_attention,
    alibi_attention_reference,
    alibi_slopes,
    rope_attention,
    rope_attention_reference,
)

__all__ = [
    "NTK",
    "DynamicNTK",
    "Linear",
    "LinearState",
    "Llama3",
    "Rotary",
    "YaRN",
    "alibi_attention",
    "alibi_attention_reference",
    "alibi_slopes",
    "coca_attention",
    "coca_attention_reference",
    "coca_features",
    "cosformer_attention",
    "cosformer_attention_reference",
    "half_width_attention",
    "half_width_attention_reference",
    "linear_coca_attention",
    "linear_coca_attention_reference",
    "rope_attention",
    "rope_attention_reference",
]
