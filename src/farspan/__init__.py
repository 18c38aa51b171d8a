"""farspan: transformers that work far beyond the length they were trained on.

Importing it registers model type "farspan" with transformers' Auto classes; models and `farspan.convert` are imported
when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from farspan.configuration_farspan import FarspanConfig

if TYPE_CHECKING:
    from farspan import convert
    from farspan.modeling_farspan import (
        FarspanCache,
        FarspanForCausalLM,
        FarspanForMaskedLM,
        FarspanForSequenceClassification,
        FarspanModel,
    )

__version__ = "0.2.0"

__all__ = [
    "FarspanCache",
    "FarspanConfig",
    "FarspanForCausalLM",
    "FarspanForMaskedLM",
    "FarspanForSequenceClassification",
    "FarspanModel",
    "__version__",
    "convert",
]


def __getattr__(name: str) -> Any:
    if name == "convert":
        return import_module("farspan.convert")
    if name in __all__:
        return getattr(import_module("farspan.modeling_farspan"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
