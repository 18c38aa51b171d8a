"""One transformers-native model for every attention of this library.

Importing this package registers the configuration with transformers' AutoConfig. The models register themselves with
the other Auto classes when they are imported, which the first configuration does: it takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from farspan.models.configuration import FarspanConfig

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


AutoConfig.register("farspan", FarspanConfig, exist_ok=True)

__all__ = [
    "FarspanCache",
    "FarspanConfig",
    "FarspanForCausalLM",
    "FarspanForMaskedLM",
    "FarspanForSequenceClassification",
    "FarspanModel",
]
