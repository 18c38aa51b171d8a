"""Result files → tables, figures and one offline page."""

from farspan.report.experiment import Experiment, load_experiments
from farspan.report.page import write_report

__all__ = ["Experiment", "load_experiments", "write_report"]
