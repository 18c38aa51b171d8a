"""stub"""
from typing import NamedTuple, Any
from torch import Tensor
ACTIVATIONS={"relu":1,"elu":1}; BEYOND=("raise","decoupled","raised-cosine","decay")
class LinearState(NamedTuple):
    numerator: Any; denominator: Any; anchor: Any; position: Any; first: Any; kernel: str
def cosformer_attention(*a, **k): raise NotImplementedError
cosformer_attention_reference=cosformer_attention
