"""Attention as pure functions on tensors, each with its reference. Layout (batch, heads, positions, width)."""

from farspan.ops.coca import (
    coca_attention,
    coca_attention_reference,
    coca_features,
    pope_attention,
    pope_attention_reference,
)
from farspan.ops.cosformer import LinearState, cosformer_attention, cosformer_attention_reference
from farspan.ops.dispatch import explain
from farspan.ops.linear_coca import linear_coca_attention, linear_coca_attention_reference
from farspan.ops.masking import AttentionContext, AttentionMask
from farspan.ops.rotary import NTK, DynamicNTK, Linear, Llama3, Rotary, YaRN
from farspan.ops.softmax import (
    alibi_attention,
    alibi_attention_reference,
    alibi_slopes,
    rope_attention,
    rope_attention_reference,
)

__all__ = [
    "NTK",
    "AttentionContext",
    "AttentionMask",
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
    "explain",
    "linear_coca_attention",
    "linear_coca_attention_reference",
    "pope_attention",
    "pope_attention_reference",
    "rope_attention",
    "rope_attention_reference",
]
