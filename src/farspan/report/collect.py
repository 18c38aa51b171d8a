"""Alias until merged."""

from farspan.report.results import Run, collect, collect_files

__all__ = ["Run", "collect", "collect_files"]
