"""One transformers-native model for every attention of this library."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from farspan.models.cache import FarspanCache
from farspan.models.configuration import FarspanConfig
from farspan.models.modeling import FarspanForCausalLM, FarspanModel

AutoConfig.register("farspan", FarspanConfig, exist_ok=True)
AutoModel.register(FarspanConfig, FarspanModel, exist_ok=True)
AutoModelForCausalLM.register(FarspanConfig, FarspanForCausalLM, exist_ok=True)

__all__ = ["FarspanCache", "FarspanConfig", "FarspanForCausalLM", "FarspanModel"]
