"""Alias until merged."""

from farspan.experiments import Experiment, load
from farspan.experiments import parse_experiment as parse_task_table

__all__ = ["load_task_tables", "parse_task_table"]


def load_task_tables() -> list[Experiment]:
    """Alias until merged: experiments.load("tasks")."""
    return load("tasks")
