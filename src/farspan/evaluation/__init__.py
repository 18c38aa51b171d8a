"""Measure trained models: perplexity, loss by position and retrieval at any length, and skills at short ones."""

from farspan.evaluation.answers import passkey, retrieval
from farspan.evaluation.conditions import as_trained, scaling_name, scaling_of, set_scaling
from farspan.evaluation.evaluate import (
    evaluate_bits,
    evaluate_pairs,
    evaluate_passkey,
    evaluate_perplexity,
    evaluate_positions,
    evaluate_retrieval,
)
from farspan.evaluation.losses import bits_per_byte, loss_by_position, perplexity
from farspan.evaluation.pairs import minimal_pairs, read_pairs

__all__ = [
    "as_trained",
    "bits_per_byte",
    "evaluate_bits",
    "evaluate_pairs",
    "evaluate_passkey",
    "evaluate_perplexity",
    "evaluate_positions",
    "evaluate_retrieval",
    "loss_by_position",
    "minimal_pairs",
    "passkey",
    "perplexity",
    "read_pairs",
    "retrieval",
    "scaling_name",
    "scaling_of",
    "set_scaling",
]
