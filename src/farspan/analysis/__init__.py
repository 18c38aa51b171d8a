"""What rotary attention does in a checkpoint, inside and past its window: numbers here, figures in the report."""

from farspan.analysis.ablate import head_worth
from farspan.analysis.relate import study_rows
from farspan.analysis.rows import arrays, rows
from farspan.analysis.run import Analysis, Settings, analyze
from farspan.analysis.study import Correlation, rank_correlation
from farspan.analysis.window import EffectiveWindow, effective_window

__all__ = [
    "Analysis",
    "Correlation",
    "EffectiveWindow",
    "Settings",
    "analyze",
    "arrays",
    "effective_window",
    "head_worth",
    "rank_correlation",
    "rows",
    "study_rows",
]
