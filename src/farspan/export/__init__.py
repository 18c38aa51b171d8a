"""A model as a folder for the Hugging Face hub: weights, tokenizer, source, and a card that says what was measured."""

from farspan.export.folder import export_folder
from farspan.export.source import flat_source

__all__ = ["export_folder", "flat_source"]
