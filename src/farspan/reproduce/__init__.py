"""The papers' experiments from nothing to a page: resumable, a failed step is named and the others go on."""

from farspan.reproduce.preset import Preset
from farspan.reproduce.run import Outcome, main_table, reproduce

__all__ = ["Outcome", "Preset", "main_table", "reproduce"]
