"""Attention layers as plain nn.Modules, usable in anyone's transformer."""

from farspan.layers.attention import Attention
from farspan.layers.cache import LayerCache, StateCache
from farspan.layers.cosformer import CosformerAttention
from farspan.layers.linear_coca import LinearCocaAttention
from farspan.layers.softmax import AlibiAttention, CocaAttention, RopeAttention
from farspan.layers.spec import AttentionSpec

__all__ = [
    "AlibiAttention",
    "Attention",
    "AttentionSpec",
    "CocaAttention",
    "CosformerAttention",
    "LayerCache",
    "LinearCocaAttention",
    "RopeAttention",
    "StateCache",
]
