"""farspan: transformers that work far beyond the length they were trained on.

Importing it registers model type "farspan" with transformers' Auto classes.
"""

from farspan import convert
from farspan.models import (
    FarspanCache,
    FarspanConfig,
    FarspanForCausalLM,
    FarspanForMaskedLM,
    FarspanForSequenceClassification,
    FarspanModel,
)

__version__ = "0.1.0"

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
