"""Linear attention with cosine weights: cosFormer, and exact CoCA without its softmax."""

from farspan.ops.cosformer.coca import linear_coca_attention, linear_coca_attention_reference
from farspan.ops.cosformer.interface import cosformer_attention, cosformer_attention_reference
from farspan.ops.cosformer.state import LinearState

__all__ = [
    "LinearState",
    "cosformer_attention",
    "cosformer_attention_reference",
    "linear_coca_attention",
    "linear_coca_attention_reference",
]
