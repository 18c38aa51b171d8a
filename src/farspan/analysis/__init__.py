"""Measure what rotary attention does in a checkpoint, inside and past its window. Pages are the report's."""

from farspan.analysis.rows import analyze_checkpoint, rows
from farspan.analysis.run import Analysis, Settings, analyze
from farspan.analysis.study import head_worth, rank_correlation, study_rows

__all__ = [
    "Analysis",
    "Settings",
    "analyze",
    "analyze_checkpoint",
    "head_worth",
    "rank_correlation",
    "rows",
    "study_rows",
]
