"""The paper's experiments from nothing to a page: resumable, a failed step is named and the rest go on."""

from farspan.reproduce.preset import Preset
from farspan.reproduce.run import Standing, reproduce

__all__ = ["Preset", "Standing", "reproduce"]
