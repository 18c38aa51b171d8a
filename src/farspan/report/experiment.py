"""Alias until merged."""

from farspan.experiments import LENGTHS, Experiment, load


def load_experiments() -> list[Experiment]:
    """Alias until merged: experiments.load(*experiments.LENGTHS)."""
    return load(*LENGTHS)
