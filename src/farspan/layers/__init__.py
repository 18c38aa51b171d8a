"""Attention layers as plain nn.Modules, usable in anyone's transformer."""

from farspan.layers.attention import AlibiAttention, Attention, CocaAttention, RopeAttention
from farspan.layers.cache import LayerCache
from farspan.layers.spec import AttentionSpec

__all__ = ["AlibiAttention", "Attention", "AttentionSpec", "CocaAttention", "LayerCache", "RopeAttention"]
