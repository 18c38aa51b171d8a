"""One transformers-native model for every attention of this library.

transformers' Auto classes know its configuration from the start, and its models from the first configuration on:
importing them takes seconds, most of them transformers' own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from farspan.models.configuration import FarspanConfig, at_first_use

if TYPE_CHECKING:
    from farspan.models.cache import FarspanCache
    from farspan.models.heads import FarspanForMaskedLM, FarspanForSequenceClassification
    from farspan.models.modeling import FarspanForCausalLM, FarspanModel

HOMES = {
    "FarspanCache": "cache",
    "FarspanForCausalLM": "modeling",
    "FarspanForMaskedLM": "heads",
    "FarspanForSequenceClassification": "heads",
    "FarspanModel": "modeling",
}
"""Name → the module that is imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def _register_models() -> None:
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
    )

    from farspan.models.heads import FarspanForMaskedLM, FarspanForSequenceClassification
    from farspan.models.modeling import FarspanForCausalLM, FarspanModel

    AutoModel.register(FarspanConfig, FarspanModel, exist_ok=True)
    AutoModelForCausalLM.register(FarspanConfig, FarspanForCausalLM, exist_ok=True)
    AutoModelForMaskedLM.register(FarspanConfig, FarspanForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(FarspanConfig, FarspanForSequenceClassification, exist_ok=True)


AutoConfig.register("farspan", FarspanConfig, exist_ok=True)
at_first_use.append(_register_models)

__all__ = [
    "FarspanCache",
    "FarspanConfig",
    "FarspanForCausalLM",
    "FarspanForMaskedLM",
    "FarspanForSequenceClassification",
    "FarspanModel",
]
