"""Alias until merged."""

from farspan.report.results import relation, theorems

__all__ = ["relation", "theorems"]
