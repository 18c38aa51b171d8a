"""One transformers-native model for every attention of this library."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from farspan.models.cache import FarspanCache
from farspan.models.configuration import FarspanConfig
from farspan.models.heads import FarspanForMaskedLM, FarspanForSequenceClassification
from farspan.models.modeling import FarspanForCausalLM, FarspanModel

AutoConfig.register("farspan", FarspanConfig, exist_ok=True)
AutoModel.register(FarspanConfig, FarspanModel, exist_ok=True)
AutoModelForCausalLM.register(FarspanConfig, FarspanForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(FarspanConfig, FarspanForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(FarspanConfig, FarspanForSequenceClassification, exist_ok=True)

__all__ = [
    "FarspanCache",
    "FarspanConfig",
    "FarspanForCausalLM",
    "FarspanForMaskedLM",
    "FarspanForSequenceClassification",
    "FarspanModel",
]
