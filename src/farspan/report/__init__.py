"""Result files → tables, figures and one offline page."""

from farspan.report.page import write_report

__all__ = ["write_report"]
