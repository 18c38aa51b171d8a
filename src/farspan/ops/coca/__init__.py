"""Collinear constrained attention: contract, equations, fused form."""

from farspan.ops.coca.fused import coca_features
from farspan.ops.coca.interface import coca_attention, coca_attention_reference

__all__ = ["coca_attention", "coca_attention_reference", "coca_features"]
