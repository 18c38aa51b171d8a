"""Measure what rotary attention does in a checkpoint, inside and past its window. Pages are the report's."""

from farspan.analysis.rows import analyze_checkpoint, rows
from farspan.analysis.run import Analysis, Settings, analyze

__all__ = ["Analysis", "Settings", "analyze", "analyze_checkpoint", "rows"]
